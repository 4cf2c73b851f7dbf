# SPDX-License-Identifier: Apache-2.0
"""Logs have the name of the command, and a destination that cannot be opened is named."""

import logging
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from oslo_config import cfg
from oslo_log import handlers, log

from cyborg.compat.oslo import set_up_logging
from cyborg.core.errors import Misconfigured


@pytest.fixture(autouse=True)
def root_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the handlers and the level of the root logger, and the name in oslo.log."""
    monkeypatch.setattr(handlers, "_get_binary_name", handlers._get_binary_name)
    saved, level = logging.root.handlers[:], logging.root.level
    logging.root.handlers[:] = []
    yield
    logging.root.handlers[:] = saved
    logging.root.setLevel(level)


def make_conf(folder: Path) -> cfg.ConfigOpts:
    conf = cfg.ConfigOpts()
    log.register_options(conf)
    conf(["--log-dir", str(folder)], project="cyborg")
    return conf


def test_file_of_a_thread_has_the_name_of_the_command(tmp_path: Path) -> None:
    thread = Thread(target=set_up_logging, args=(make_conf(tmp_path), "cyborg-conductor"))
    thread.start()
    thread.join()
    for handler in logging.root.handlers:
        handler.close()
    assert [path.name for path in tmp_path.iterdir()] == ["cyborg-conductor.log"]


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"log_dir.* '.*/missing/cyborg-agent.log'"):
        set_up_logging(make_conf(tmp_path / "missing"), "cyborg-agent")
