# SPDX-License-Identifier: Apache-2.0
"""The options of oslo.privsep in the configuration files of the agent."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from oslo_config import cfg

import cyborg.conf
from cyborg.cmd.agent import share_configuration
from cyborg.drivers.privileged import CONTEXT


@pytest.fixture
def conf(tmp_path: Path) -> Iterator[cfg.ConfigOpts]:
    path = tmp_path / "cyborg.conf"
    path.write_text("[cyborg_privileged]\nhelper_command = doas privsep-helper\n")
    conf = cfg.ConfigOpts()
    cyborg.conf.register(conf, cyborg.conf.AGENT_GROUPS)
    conf(["--config-file", str(path)], project="cyborg")
    yield conf
    cfg.CONF.reset()


def test_helper_is_started_with_the_configuration_of_the_agent(
    conf: cfg.ConfigOpts, tmp_path: Path
) -> None:
    share_configuration(conf)
    words = CONTEXT.helper_command("/run/socket")
    assert words[:2] == ["doas", "privsep-helper"]
    assert words[-4:] == [
        *("--privsep_context", "cyborg.drivers.privileged.CONTEXT"),
        *("--privsep_sock_path", "/run/socket"),
    ]
