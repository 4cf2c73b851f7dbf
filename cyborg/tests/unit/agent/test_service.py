# SPDX-License-Identifier: Apache-2.0
"""A whole agent beside a conductor that only listens, and the command as a process."""

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent import service as services
from cyborg.agent.desired.reconciler import BackendReconciler
from cyborg.agent.service import AgentService
from cyborg.core.capture.model import Uevent
from cyborg.core.drivers.desired_state import DesiredStatus
from cyborg.core.errors import Misconfigured
from cyborg.core.inventory.device import Ability
from cyborg.drivers.replay.recorder import save_capture
from cyborg.rpc.client import make_agent_client
from cyborg.testing import captures
from cyborg.tests.fixtures.bus.broker import Bus
from cyborg.tests.fixtures.drivers import all_drivers
from cyborg.tests.fixtures.hosts.reconciler_host import ConductorDouble
from cyborg.tests.fixtures.hosts.scripted_driver import LONG
from cyborg.tests.fixtures.machine.processes import free_port, start_fork_server, wait_until
from cyborg.tests.unit.agent.report.test_heartbeat import Conductor

DISCOVERY = "5f0d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e"

CARD = "0000:0c:00.0"
HEAVY = ("sqlalchemy", "alembic", "oslo_db", "pecan", "wsme", "openstack", "keystoneauth1")


@pytest.mark.slow
def test_agent_service_discovers_reports_runs_job_and_stops(bus: Bus, tmp_path: Path) -> None:
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
        assert service.wait_ready(LONG)
        # The agent answers calls before its first report is sent.
        conductor.calls.wait_until(("report",))
        agent = make_agent_client(bus.transport, bus.conf)
        (hardware,) = agent.hardware("compute-1")["hardware"]
        assert hardware["address"] == CARD
        assert agent.discovery("compute-1", "fake", DISCOVERY)["status"] == "IN-PROGRESS"
        conductor.calls.wait_until(("discovery_done",))
        assert agent.job("compute-1", job, "program", arguments, LONG)["state"] == "running"
        conductor.calls.wait_until(("job_done",))
        assert agent.job("compute-1", job, "program", arguments, LONG)["state"] == "done"
        service.stop()
        service.stop()
        service.wait()
    reports = [body for name, body in conductor.recorded if name == "report"]
    images = [report.devices[0].deployables[0].bitstream_id for report in reports]
    assert images == [None, arguments["image"]]
    assert reports[0].devices[0].abilities == {Ability.PROGRAMS}
    names = [name for name, _ in conductor.recorded if name in ("report", "job_done")]
    assert names == ["report", "report", "job_done"]
    (done,) = [body for name, body in conductor.recorded if name == "discovery_done"]
    assert (done["discovery_id"], done["drivers"][0]["status"]) == (DISCOVERY, "READY")
    (end,) = [body for name, body in conductor.recorded if name == "job_done"]
    (epoch,) = {body["epoch"] for body in recorded_calls(conductor, "hello")}
    assert (done["epoch"], end.pop("epoch")) == (epoch, epoch)
    assert end == {"job": job, "host": "compute-1", "state": "done", "error": None}
    path = tmp_path / "state" / "agent" / "jobs-compute-1.json"
    checkpoint = json.loads(path.read_text())["data"]
    assert checkpoint["boot_id"] == "boot-1"
    assert recorded_calls(conductor, "hello")[0]["boot_id"] == "boot-1"
    assert checkpoint["jobs"][job]["state"] == "completed"


class DesiredStateConductor(Conductor):
    """A conductor with a desired state."""

    def __init__(self) -> None:
        super().__init__()
        self.desired = ConductorDouble()

    def hello(self, ctxt: Any = None, **fields: Any) -> dict[str, Any]:
        return {**super().hello(ctxt, **fields), "desired_generation": self.desired.generation}

    def get_desired_backends(self, ctxt: Any, host: str, epoch: str) -> Any:
        return self.desired.get_desired_backends(host, epoch)


@pytest.mark.slow
def test_agent_service_desired_backend_over_bus_added_and_removed(bus: Bus, tmp_path: Path) -> None:
    conductor = DesiredStateConductor()
    bus.conf.set_override("host", "compute-1")
    bus.conf.set_override("state_path", str(tmp_path / "state"))
    bus.conf.set_override("allow_reference_drivers", True, group="agent")
    desired = conductor.desired
    desired.set_desired("f1", num_devices=2)
    with bus.serving("conductor", conductor):
        service = AgentService(bus.conf, bus.conductor(), bus.transport, tmp_path)
        service.start()
        assert service.wait_ready(LONG)
        conductor.calls.wait_until(("report_backend_outcomes",))
        agent = make_agent_client(bus.transport, bus.conf)
        assert len(agent.hardware("compute-1", "f1")["hardware"]) == 2
        generation = desired.set_desired("f1", DesiredStatus.ABSENT)
        assert agent.sync_backends("compute-1", generation)["generation"] in (0, 1)
        call_count = len(conductor.calls.calls)
        while len(applied := recorded_calls(conductor, "report_backend_outcomes")) < 2:
            call_count = len(conductor.calls.wait_for(call_count + 1))
        service.stop()
        restarted = AgentService(bus.conf, bus.conductor(), bus.transport, tmp_path)
        call_count = len(conductor.calls.calls)
        restarted.start()
        conductor.calls.wait_for(call_count + 1)
        restarted.stop()
    assert [one["outcomes"] for one in applied] == [
        [{"backend": "f1", "generation": number, "error": None}] for number in (1, 2)
    ]
    names = [
        name for name, _ in conductor.recorded if name in ("report", "report_backend_outcomes")
    ]
    reports = recorded_calls(conductor, "report")
    # The backend may be built before or after the first report.
    first = 0 if reports[0].devices else 1
    assert names[first:][:3] == ["report", "report_backend_outcomes", "report"]
    assert [len(report.devices) for report in reports[first:][:2]] == [2, 0]
    assert {entry.name for entry in reports[0].drivers} == set(all_drivers())
    hellos = recorded_calls(conductor, "hello")
    assert hellos[0]["observed_generation"] == 0
    assert hellos[-1]["drivers"] == [], "nor in the next life"
    path = tmp_path / "state" / "agent" / "backends-compute-1.json"
    state = json.loads(path.read_text())["data"]
    assert state["generation"] == 2


def recorded_calls(conductor: Conductor, name: str) -> list[Any]:
    return [body for method, body in conductor.recorded if method == name]


def test_start_invalid_option_raises_misconfigured(memory_bus: Bus) -> None:
    memory_bus.conf.set_override("enabled_drivers", ["fke"], group="agent")
    service = AgentService(memory_bus.conf, memory_bus.conductor(), memory_bus.transport)
    with pytest.raises(Misconfigured, match="did you mean fake"):
        service.start()
    service.stop()


def test_stop_after_failed_start_stops_what_has_started(
    memory_bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_reconciler: BackendReconciler) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(BackendReconciler, "start", fail)
    memory_bus.conf.set_override("enabled_drivers", ["fake"], group="agent")
    memory_bus.conf.set_override("state_path", str(tmp_path / "state"))
    memory_bus.conf.set_override("timeout", 0.1, group="rpc")
    service = AgentService(memory_bus.conf, memory_bus.conductor(), memory_bus.transport)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="start new thread"):
        service.start()
    running = [one for one in threading.enumerate() if one.name in ("reporter", "backend-fake")]
    started = [one for one in running if one not in before]
    assert len(started) == 2
    service.stop()
    for thread in started:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in started)


def test_start_other_sysfs_root_does_not_watch_uevents(
    memory_bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's uevents are only about its own sysfs."""
    memory_bus.conf.set_override("enabled_drivers", ["generic"], group="agent")
    memory_bus.conf.set_override("state_path", str(tmp_path / "state"))
    memory_bus.conf.set_override("timeout", 0.1, group="rpc")
    service = AgentService(
        memory_bus.conf, memory_bus.conductor(), memory_bus.transport, tmp_path / "sys"
    )
    caplog.set_level("INFO")
    service.start()
    service.stop()
    assert "backends generic" in caplog.text
    assert "Watching uevents" not in caplog.text


@pytest.mark.slow
def test_start_replay_replays_recorded_uevents(memory_bus: Bus, tmp_path: Path) -> None:
    drive = "0000:5e:00.0"
    event = Uevent(0.0, "remove", "pci", f"/devices/pci0000:5d/0000:5d:01.0/{drive}")
    save_capture(replace(captures.load("nvme"), uevents=(event,)), tmp_path / "host.jsonl")
    memory_bus.conf.set_override("enabled_drivers", ["nvme"], group="agent")
    memory_bus.conf.set_override("replay", str(tmp_path / "host.jsonl"), group="agent")
    memory_bus.conf.set_override("state_path", str(tmp_path / "state"))
    memory_bus.conf.set_override("timeout", 0.1, group="rpc")
    service = AgentService(memory_bus.conf, memory_bus.conductor(), memory_bus.transport)
    service.start()
    try:
        assert service.replayed is not None
        sysfs = service.replayed.kernel.sysfs
        wait_until("it is removed", lambda: drive not in sysfs.list_names("bus/pci/devices"))
        assert sysfs.list_names("bus/pci/devices") == ["0000:d9:00.0"]
    finally:
        service.stop()


def run_agent(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from cyborg.cmd.agent import main; sys.exit(main())"
    return start_fork_server().run([sys.executable, "-c", code, *arguments], os.environ)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
def test_agent_command_does_not_import_heavy_modules() -> None:
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


@pytest.mark.slow
def test_agent_command_invalid_rule_exits_with_error(config: Path) -> None:
    with config.open("a") as file:
        file.write("[generic]\ndevices = vendr=8086\n")
    done = run_agent("--config-file", str(config))
    assert done.returncode == 1
    assert "cyborg-agent: [generic] devices: found 'vendr=8086'; expected key=value" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_agent_command_missing_config_file_exits_with_error(tmp_path: Path) -> None:
    done = run_agent("--config-file", str(tmp_path / "none.conf"))
    assert done.returncode == 1
    assert "none.conf" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def not_under_nohup() -> Iterator[None]:
    """Let children receive SIGHUP even if the test run ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.usefixtures("not_under_nohup")
def test_agent_command_signals_without_broker_are_handled(config: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "cyborg.cmd.agent", "--config-file", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        watch = threading.Timer(LONG, process.kill)
        watch.start()
        lines: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "Heartbeat to conductor failed" in line:
                process.send_signal(signal.SIGHUP)
            if "SIGHUP" in line:
                process.send_signal(signal.SIGTERM)
        watch.cancel()
    text = "".join(lines)
    assert process.returncode == 0, text
    assert "has stopped" in text
    # In a container that is told nothing it cannot.
    assert "Watching uevents of pci" in text or "Cannot read uevents" in text
    assert "hunter2" not in text


@pytest.mark.slow
def test_stop_all_threads_hanging_ends_at_one_deadline(
    memory_bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    waits: list[float] = []
    closed: list[str] = []

    class Stuck:
        def stop(self) -> None:
            """Return at once."""

        def join(self, seconds: float) -> bool:
            waits.append(seconds)
            return gate.wait(seconds)

        def running(self) -> list[str]:
            return []

    class Server(Stuck):
        def stop(self) -> None:
            gate.wait(60)
            closed.append("server")

        wait = stop

    monkeypatch.setattr(services, "STOP_TIMEOUT", 1.0)
    service = AgentService(memory_bus.conf, memory_bus.conductor(), memory_bus.transport)
    stuck: Any = Stuck()
    server: Any = Server()
    service._threads = [stuck] * 4
    service._closers = [server.stop, server.wait]
    service.stop()
    assert not closed, "the server is not waited for"
    gate.set()
    assert len(waits) == 4
    assert sum(waits) < 1.1, "not the sum of what each takes"
