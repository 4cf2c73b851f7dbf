# SPDX-License-Identifier: Apache-2.0
"""Tests of the command cyborg-dbsync."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cyborg.db import migrate
from cyborg.tests.fixtures.machine.processes import start_fork_server

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-c", "import sys; from cyborg.cmd.dbsync import main; sys.exit(main())"]


def _run(conf: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--config-file", str(conf), *arguments]
    return start_fork_server().run(command, os.environ)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "cyborg.conf"
    path.write_text(f"[database]\nconnection = sqlite:///{tmp_path}/cyborg.db\n")
    return path


def test_upgrade_of_an_empty_database_reaches_head(conf: Path) -> None:
    head = migrate.head()
    initial = _run(conf, "version")
    assert (initial.returncode, initial.stdout) == (0, f"none (head is {head})\n")
    done = _run(conf, "upgrade")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == f"The database is at {head}."
    upgraded = _run(conf, "version")
    assert upgraded.stdout == f"{head} (head)\n"


def test_command_accepts_a_configuration_directory(conf: Path) -> None:
    command = [*COMMAND, "--config-dir", str(conf.parent), "stamp", "head"]
    done = start_fork_server().run(command, os.environ)
    assert done.returncode == 0, done.stderr
    assert "marked" in done.stdout


def test_concurrent_upgrades_run_each_migration_once(database_url: str, tmp_path: Path) -> None:
    path = tmp_path / "cyborg.conf"
    path.write_text(f"[database]\nconnection = {database_url}\n")
    start_fork_server()  # before the threads: a process has one
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: _run(path, "upgrade"), range(2)))
    assert [done.returncode for done in results] == [0, 0], results
    assert sum("Done:" in done.stdout for done in results) == 1, results


@pytest.mark.parametrize(
    ("section", "arguments", "code", "expected"),
    [
        ("", ["upgrade"], 1, "[database] connection is not set"),
        pytest.param(
            "connection = nonsense\n",
            ["version"],
            1,
            "[database] connection is not usable",
            marks=pytest.mark.matrix,
        ),
        (
            "connection = mysql+pymysql://root@127.0.0.1:1/x\n",
            ["--wait", "0", "upgrade"],
            1,
            "the database does not answer",
        ),
        pytest.param(
            "connection = sqlite:////nowhere/x.db\n",
            ["--wait", "0", "upgrade"],
            1,
            "does not exist",
            marks=pytest.mark.matrix,
        ),
        ("connection = sqlite:///{here}/x.db\n", ["upgrade", "nope"], 1, "unknown revision 'nope'"),
        pytest.param(
            "connection = sqlite:///{here}/x.db\n",
            ["stamp", "nope"],
            1,
            "unknown revision 'nope'",
            marks=pytest.mark.matrix,
        ),
        pytest.param("", ["--wait", "soon", "upgrade"], 1, "--wait", marks=pytest.mark.matrix),
        ("", [], 2, "usage"),
    ],
)
def test_command_reports_an_error_in_one_line(
    tmp_path: Path, section: str, arguments: list[str], code: int, expected: str
) -> None:
    path = tmp_path / "cyborg.conf"
    path.write_text("[database]\n" + section.format(here=tmp_path))
    done = _run(path, *arguments)
    assert done.returncode == code, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert len(done.stderr.splitlines()) == 1
