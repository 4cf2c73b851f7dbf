# SPDX-License-Identifier: Apache-2.0
"""A whole agent beside a conductor that only listens, and the command as a process."""

import json
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.service import AgentService
from cyborg.core.device import Ability
from cyborg.core.errors import Misconfigured
from cyborg.core.wanted import Wish
from cyborg.fixtures.broker import Bus
from cyborg.fixtures.converging import Wisher
from cyborg.fixtures.processes import free_port
from cyborg.rpc.agent import AgentClient
from cyborg.tests.unit.agent.test_reporter import Conductor

DISCOVERY = "5f0d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e"

CARD = "0000:0c:00.0"
HEAVY = ("sqlalchemy", "alembic", "oslo_db", "pecan", "wsme", "openstack", "keystoneauth1")


def test_an_agent_finds_reports_answers_and_stops(bus: Bus, tmp_path: Path) -> None:
    conductor = Conductor()
    bus.conf.set_override("host", "compute-1")
    bus.conf.set_override("enabled_drivers", ["fake"], group="agent")
    bus.conf.set_override("state_path", str(tmp_path / "state"))
    boot = tmp_path / "boot_id"
    boot.write_text("boot-1")
    service = AgentService(bus.conf, bus.conductor(), bus.transport, tmp_path, boot)
    job, item = str(uuid.uuid4()), {"backend": "fake", "device": CARD, "deployable": CARD}
    arguments = {"items": [item], "image": str(uuid.uuid4())}
    with bus.serving("conductor", conductor):
        service.start()
        assert service.wait_ready(20)
        agent = AgentClient(bus.transport, bus.conf)
        (hardware,) = agent.hardware("compute-1")["hardware"]
        assert hardware["address"] == CARD
        assert agent.discovery("compute-1", "fake", DISCOVERY)["status"] == "IN-PROGRESS"
        conductor.heard.wait_until(("discovery_done",))
        assert agent.job("compute-1", job, "program", arguments, 20)["state"] == "running"
        conductor.heard.wait_until(("job_done",))
        assert agent.job("compute-1", job, "program", arguments, 20)["state"] == "done"
        service.stop()
        service.stop()
        service.wait()
    reports = [said for name, said in conductor.said if name == "report"]
    images = [report.devices[0].deployables[0].bitstream_id for report in reports]
    assert images == [None, arguments["image"]]
    assert reports[0].devices[0].abilities == {Ability.PROGRAMS}
    names = [name for name, _ in conductor.said if name in ("report", "job_done")]
    assert names == ["report", "report", "job_done"]
    (done,) = [said for name, said in conductor.said if name == "discovery_done"]
    assert (done["discovery_id"], done["drivers"][0]["status"]) == (DISCOVERY, "READY")
    (end,) = [said for name, said in conductor.said if name == "job_done"]
    assert end == {"job": job, "host": "compute-1", "state": "done", "error": None}
    kept = json.loads((tmp_path / "state" / "agent" / "jobs-compute-1.json").read_text())
    assert kept["boot_id"] == "boot-1"
    assert kept["jobs"][job]["state"] == "completed"


class Wishing(Conductor):
    """Wants a backend of a driver that is installed, and has its devices reported first."""

    def __init__(self) -> None:
        super().__init__()
        self.wisher = Wisher()

    def hello(self, ctxt: Any = None, **said: Any) -> dict[str, Any]:
        return {**super().hello(ctxt, **said), "wanted": self.wisher.revision}

    def backends_wanted(self, ctxt: Any, host: str, epoch: str) -> Any:
        return self.wisher.backends_wanted(host, epoch)


def test_backends_come_and_go_by_the_bus(bus: Bus, tmp_path: Path) -> None:
    conductor = Wishing()
    bus.conf.set_override("host", "compute-1")
    bus.conf.set_override("state_path", str(tmp_path / "state"))
    wisher = conductor.wisher
    wisher.want("f1", num_devices=2)
    with bus.serving("conductor", conductor):
        service = AgentService(bus.conf, bus.conductor(), bus.transport, tmp_path)
        service.start()
        assert service.wait_ready(20)
        conductor.heard.wait_until(("backends_applied",))
        agent = AgentClient(bus.transport, bus.conf)
        assert len(agent.hardware("compute-1", "f1")["hardware"]) == 2
        revision = wisher.want("f1", Wish.ABSENT)
        assert agent.wanted("compute-1", revision)["revision"] in (0, 1)
        seen = len(conductor.heard.calls)
        while len(applied := said(conductor, "backends_applied")) < 2:
            seen = len(conductor.heard.wait_for(seen + 1))
        service.stop()
        again = AgentService(bus.conf, bus.conductor(), bus.transport, tmp_path)
        seen = len(conductor.heard.calls)
        again.start()
        conductor.heard.wait_for(seen + 1)
        again.stop()
    assert [one["outcomes"] for one in applied] == [
        [{"backend": "f1", "revision": number, "error": None}] for number in (1, 2)
    ]
    names = [name for name, _ in conductor.said if name in ("report", "backends_applied")]
    assert names[:4] == ["report", "report", "backends_applied", "report"]
    reports = said(conductor, "report")
    assert [len(report.devices) for report in reports[:3]] == [0, 2, 0]
    assert {entry.name for entry in reports[0].drivers} == {"fake", "generic"}
    hellos = said(conductor, "hello")
    assert hellos[0]["wanted"] == 0
    assert hellos[-1]["drivers"] == [], "nor in the next life"
    kept = json.loads((tmp_path / "state" / "agent" / "backends-compute-1.json").read_text())
    assert kept["revision"] == 2


def said(conductor: Conductor, name: str) -> list[Any]:
    return [what for one, what in conductor.said if one == name]


def test_a_wrong_option_stops_the_start(memory_bus: Bus) -> None:
    memory_bus.conf.set_override("enabled_drivers", ["fke"], group="agent")
    service = AgentService(memory_bus.conf, memory_bus.conductor(), memory_bus.transport)
    with pytest.raises(Misconfigured, match="did you mean fake"):
        service.start()
    service.stop()


def test_a_sysfs_that_stands_elsewhere_is_not_watched(
    memory_bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel tells of its own only."""
    memory_bus.conf.set_override("enabled_drivers", ["generic"], group="agent")
    memory_bus.conf.set_override("state_path", str(tmp_path / "state"))
    service = AgentService(
        memory_bus.conf, memory_bus.conductor(), memory_bus.transport, tmp_path / "sys"
    )
    caplog.set_level("INFO")
    service.start()
    service.stop()
    assert "backends generic" in caplog.text
    assert "Watching uevents" not in caplog.text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_agent_starts_light() -> None:
    code = (
        "import json, sys, cyborg.cmd.agent, cyborg.drivers.fake, cyborg.drivers.generic\n"
        "import cyborg.conf; from oslo_config import cfg\n"
        "cyborg.conf.register(cfg.ConfigOpts(), cyborg.conf.AGENT_GROUPS)\n"
        f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cyborg.conf"
    path.write_text(
        f"[DEFAULT]\ntransport_url = rabbit://guest:hunter2@127.0.0.1:{free_port()}/\n"
        "[rpc]\ntimeout = 0.5\n[agent]\nenabled_drivers = generic\n"
    )
    return path


def test_a_rule_that_does_not_parse_ends_the_command(config: Path) -> None:
    with config.open("a") as file:
        file.write("[generic]\ndevices = vendr=8086\n")
    done = run("-m", "cyborg.cmd.agent", "--config-file", str(config))
    assert done.returncode == 1
    assert "cyborg-agent: [generic] devices: found 'vendr=8086'; expected key=value" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_not_there_ends_the_command(tmp_path: Path) -> None:
    done = run("-m", "cyborg.cmd.agent", "--config-file", str(tmp_path / "none.conf"))
    assert done.returncode == 1
    assert "none.conf" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def not_under_nohup() -> Iterator[None]:
    """Let children hear SIGHUP even if whoever runs the tests does not."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("not_under_nohup")
def test_signals_without_a_broker(config: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "cyborg.cmd.agent", "--config-file", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        watch = threading.Timer(30, process.kill)
        watch.start()
        lines: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "The conductor does not take our word" in line:
                process.send_signal(signal.SIGHUP)
            if "SIGHUP" in line:
                process.send_signal(signal.SIGTERM)
        watch.cancel()
    text = "".join(lines)
    assert process.returncode == 0, text
    assert "has stopped" in text
    # In a container that is told nothing it cannot.
    assert "Watching uevents of pci" in text or "Uevents cannot be heard" in text
    assert "hunter2" not in text
