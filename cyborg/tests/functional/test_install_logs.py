# SPDX-License-Identifier: Apache-2.0
"""Each daemon, started by the commands of the install guide, logs to the file that it names."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cyborg.tests.fixtures.clouds.web_servers import (
    PAGE,
    ROOT,
    Server,
    code_block,
    gunicorn,
    unit_command,
    uwsgi,
)
from cyborg.tests.fixtures.machine.processes import (
    BIN,
    Daemon,
    free_port,
    start_fork_server,
    wait_until,
)

WebServer = Callable[[Path, Path], list[str]]

pytestmark = pytest.mark.matrix


class Installation:
    """The configuration of the guide in a folder, and the daemons that run with it.

    Without authentication and a network: SQLite, and a broker in the memory of each process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "log"
        self.logs.mkdir()
        self.config = folder / "cyborg.conf"
        values = {
            "auth_strategy": "noauth",
            "transport_url": "kombu+memory:////",
            "state_path": f"{folder}/state",
            "log_dir": f"{self.logs}",
            "connection": f"sqlite:///{folder}/cyborg.db",
        }
        text = code_block("/etc/cyborg/cyborg.conf")
        for name, value in values.items():
            text, count = re.subn(f"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
            assert count == 1, name
        self.config.write_text(text)
        (upgrade,) = re.findall(r"-- (/opt/cyborg/bin/cyborg-dbsync .*)$", PAGE.read_text(), re.M)
        command = upgrade.replace("/opt/cyborg/bin", str(BIN))
        command = command.replace("/etc/cyborg/cyborg.conf", str(self.config))
        start_fork_server().run(command.split(), os.environ).check_returncode()
        self.daemons: list[Daemon] = []

    def start(self, name: str) -> Daemon:
        """Start a daemon by the command of its unit for systemd."""
        command = unit_command(ROOT / "etc" / "systemd" / f"{name}.service", self.config)
        return self.run(name, command)

    def run(self, name: str, command: list[str]) -> Daemon:
        """Start a daemon by a command."""
        daemon = Daemon(name, command, self.folder, {})
        self.daemons.append(daemon)
        daemon.start()
        return daemon

    def count(self, name: str, text: str) -> int:
        """Return how often a text is in the log of a daemon."""
        file = self.logs / f"{name}.log"
        return file.read_text().count(text) if file.exists() else 0


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    installed = Installation(tmp_path)
    yield installed
    for daemon in installed.daemons:
        daemon.kill()


def test_daemons_log_where_the_guide_says(installation: Installation) -> None:
    conductor = installation.start("cyborg-conductor")
    installation.start("cyborg-agent")

    def wait(name: str, text: str, count: int = 1) -> None:
        wait_until(f"{name} logs", lambda: installation.count(name, text) >= count)

    wait("cyborg-conductor", "Conductor is ready")
    workers = installation.count("cyborg-conductor", "Conductor is ready")
    os.kill(conductor.pid, signal.SIGHUP)
    wait("cyborg-conductor", "Conductor is ready", workers + 1)
    wait("cyborg-agent", "gpus")
    (names,) = re.findall(r"logs to ``/var/log/cyborg/NAME.log``: ([^.]*)\.", PAGE.read_text())
    documented = {f"{name}.log" for name in re.findall("``(.*?)``", names)}
    found = {path.name for path in installation.logs.iterdir()}
    assert found == documented - {"cyborg-api.log"}
    assert "cyborg-api.log" in documented
    assert [daemon.tail() for daemon in installation.daemons] == ["", ""]


@pytest.mark.parametrize("make", [gunicorn, uwsgi])
def test_api_logs_where_the_guide_says(installation: Installation, make: WebServer) -> None:
    command = make(installation.folder, installation.config)
    server = Server(command, installation.folder, installation.config)
    try:
        server.start()
        wait_until("the server answers", server.ready)
        server.hang_up()
        wait_until("the server answers", server.ready)
    finally:
        server.close()
    assert installation.count("cyborg-api", "GET /v2/devices 200") >= 2
    assert {path.name for path in installation.logs.iterdir()} == {
        "cyborg-api.log",
        "cyborg-dbsync.log",
    }


def test_standalone_logs_under_its_name(installation: Installation) -> None:
    file = installation.folder / "standalone.conf"
    file.write_text(f"[DEFAULT]\nlog_dir = {installation.logs}\n")
    ports = ["--port", str(free_port()), "--placement-port", str(free_port())]
    state = ["--state-dir", str(installation.folder / "state"), "--config-file", str(file)]
    command = [sys.executable, "-m", "cyborg.cmd.standalone", *state, *ports]
    daemon = installation.run("standalone", command)
    wait_until("it is ready", lambda: "ready:" in daemon.tail())
    assert installation.count("cyborg-standalone", "Conductor is ready") == 1
