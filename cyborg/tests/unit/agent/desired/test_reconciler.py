# SPDX-License-Identifier: Apache-2.0
"""Reconciliation of backends while the agent runs."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.drivers.desired_state import DesiredStatus
from cyborg.core.inventory.report import BackendStatus
from cyborg.tests.fixtures.hosts.reconciler_host import (
    EPOCH,
    ConductorDouble,
    ReconcilerHost,
    StartHost,
    section,
)
from cyborg.tests.fixtures.hosts.scripted_driver import LONG
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.fixtures.machine.tiers import sample

TWO = "[agent]\nenabled_backends = f0, f1\n[f0]\ndriver = fake\n[f1]\ndriver = fake\n"
TWO += "address = 0000:20:00.0\nnum_devices = 3\n"


def cards(host: ReconcilerHost, name: str) -> int:
    backend = host.registry.get(name)
    assert backend is not None
    assert backend.snapshot.state.status is BackendStatus.READY
    return len(backend.snapshot.devices)


@pytest.mark.slow
def test_reconcile_adds_changes_and_removes_backend(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host()
    assert host.reconcile_to(conductor.set_desired("f1", num_devices=2)) == {"f1": None}
    assert conductor.calls.calls[0] == ("h", EPOCH)
    first = host.registry[0]
    assert cards(host, "f1") == 2, "it has discovered before it is taken in"
    assert host.reconcile_to(conductor.set_desired("f1", num_devices=5)) == {"f1": None}
    assert cards(host, "f1") == 5
    assert first.join(LONG), "the old one has ended"
    last = host.registry[0]
    assert host.reconcile_to(conductor.set_desired("f1", DesiredStatus.ABSENT)) == {"f1": None}
    assert host.names() == []
    assert last.join(LONG)


@pytest.mark.slow
def test_reconcile_unchanged_backend_keeps_running(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host()
    host.reconcile_to(conductor.set_desired("f1"))
    running = host.registry[0]
    assert host.reconcile_to(conductor.set_desired("f2", address="0000:20:00.0")) == {
        "f1": None,
        "f2": None,
    }
    assert host.registry[0] is running
    host.reconcile_to(conductor.set_desired("f1", DesiredStatus.DISABLED))
    assert host.registry[0] is running, "closing it to requests is the conductor's"
    host.reconcile_to(conductor.set_desired("f1", DesiredStatus.DISABLED))
    assert host.registry[0] is not running, "the same once more is a reload"


@pytest.mark.slow
def test_reconcile_options_override_config_file(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host(f"{TWO}[late]\ndriver = fake\nnum_handles = 3\naddress = 0000:40:00.0\n")
    host.reconcile_to(conductor.set_desired("f1", num_handles="2"))
    assert (host.driver("f1").options["num_devices"], cards(host, "f1")) == (3, 3)
    assert host.driver("f1").options["num_handles"] == 2
    assert host.names() == ["f0", "f1"]
    host.reconcile_to(conductor.set_desired("late"))
    assert host.driver("late").options["num_handles"] == 3, "its section, configured or not"
    assert host.reconcile_to(conductor.set_desired("f0", driver="generic")) == {
        "f1": None,
        "late": None,
        "f0": None,
    }
    assert host.driver("f0").options["devices"] == [], "the section is another driver's"
    host.reconcile_to(conductor.remove_desired("f1"))
    assert host.driver("f1").options["num_handles"] == 16, "as the file says, again"


MALFORMED = '{"generation": 1, "backends": [{}]}'
FAILING: list[tuple[dict[str, Any], str]] = [
    ({"num_devices": -1}, "[f1] num_devices: found -1; expected 0 to 4096"),
    ({"num_devces": 2}, "config: the driver has no option 'num_devces'; did you mean"),
    ({"num_devices": "many"}, "config: num_devices: found 'many'; expected a value of type int"),
    ({"fail": "out of smoke"}, "out of smoke"),
    ({"setup": "fail"}, "setup: configured to fail: setup of the host"),
    ({"driver": "fke"}, "found 'fke' (did you mean fake?); expected one of the drivers of"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("desired", "error"),
    [
        # Options that are refused at once: one proof of the default tier is that of the driver.
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in FAILING[:-2]),
        *FAILING[-2:],
    ],
)
def test_reconcile_failed_change_keeps_old_backend(
    start_host: StartHost, conductor: ConductorDouble, desired: dict[str, Any], error: str
) -> None:
    host = start_host(TWO)
    host.reconcile_to(conductor.set_desired("f1", num_devices=2))
    running = list(host.registry)
    outcomes = host.reconcile_to(conductor.set_desired("f1", **desired))
    assert str(outcomes["f1"]).startswith(error)
    assert list(host.registry) == running
    outcomes = host.reconcile_to(conductor.set_desired("f0", DesiredStatus.DISABLED))
    assert str(outcomes["f1"]).startswith(error), "told each time, and not tried again"
    assert host.registry[1] is running[1]
    record = json.loads(host.path.read_text())["data"]["backends"][0]
    assert record["applied"]["config"] == {"num_devices": 2}
    restarted = start_host(TWO)
    assert restarted.driver("f1").options["num_devices"] == 2
    host_comes_back = restarted.reconcile_to(conductor.set_desired("f1", num_devices=2))
    assert host_comes_back["f1"] is None


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", [{"hang": 2.0}, {"setup": "hang"}])
def test_reconcile_change_times_out_keeps_old_backend(
    start_host: StartHost, conductor: ConductorDouble, behaviour: dict[str, Any], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    host = start_host(section("f1", gate=gate), timeout=0.2)
    host.reconcile_to(conductor.set_desired("f1"))
    running = host.registry[0]
    outcomes = host.reconcile_to(conductor.set_desired("f1", **behaviour))
    step = "setup" if "setup" in behaviour else "discovery"
    assert outcomes == {"f1": f"{step} takes longer than 0.2 s"}
    assert host.registry[0] is running
    gate.touch()


@pytest.mark.slow
def test_reconcile_change_runs_setup_but_restart_does_not(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    text = section("f1", journal=journal)
    host = start_host(text)
    host.reconcile_to(conductor.set_desired("f1", setup="ok"))
    host.reconcile_to(conductor.set_desired("f1", setup="ok"))
    assert journal.read_text().splitlines() == ['{"act": "setup"}'] * 2
    host = start_host(text)
    assert host.names() == ["f1"]
    assert len(journal.read_text().splitlines()) == 2


@pytest.mark.slow
def test_start_uses_state_file_without_conductor(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host(TWO)
    host.reconcile_to(conductor.set_desired("f1", DesiredStatus.ABSENT))
    host.reconcile_to(conductor.set_desired("f5", num_devices=4, address="0000:50:00.0"))
    conductor.unreachable = True
    call_count = len(conductor.calls.calls)
    host = start_host(TWO)
    assert host.names() == ["f0", "f5"]
    assert host.driver("f5").options["num_devices"] == 4
    assert len(conductor.calls.calls) == call_count
    host.reconciler.request(conductor.generation)
    conductor.calls.wait_for(call_count + 1)
    conductor.unreachable = False
    assert host.reconcile_to(conductor.generation) == {"f1": None, "f5": None}, "told in each life"


@pytest.mark.slow
def test_restart_before_outcome_reported_reports_again(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host()
    generation = conductor.set_desired("f1", fail="no smoke")
    host.reconciler.acknowledge = lambda *_: None  # type: ignore[method-assign]
    host.reconcile_to(generation)
    assert host.reconciler.reported_generation == 0
    host = start_host()
    assert host.state_file.generation == generation
    assert host.reconciler.reported_generation == 0, "nobody has heard of it in this life"
    assert host.reconcile_to(generation) == {"f1": "no smoke"}
    assert host.reconciler.reported_generation == generation


@pytest.mark.slow
def test_start_saved_driver_missing_fails_discovery(
    start_host: StartHost, conductor: ConductorDouble, caplog: pytest.LogCaptureFixture
) -> None:
    host = start_host()
    host.reconcile_to(conductor.set_desired("f1"))
    host.reconcile_to(conductor.set_desired("f2", address="0000:20:00.0"))
    body = json.loads(host.path.read_text())["data"]
    body["backends"][0]["applied"]["driver"] = "gone"
    host.path.write_text(json.dumps(body))
    host = start_host()
    assert host.names() == ["f1", "f2"]
    with pytest.raises(Exception, match="found 'gone'; expected one of the drivers of"):
        host.driver("f1").discover()
    (line,) = [text for text in texts_of(caplog.records) if "from saved state" in text]
    assert re.match(r"\[driver=\S+ backend=f1\] Failed to create backend from saved state: ", line)


@pytest.mark.slow
@pytest.mark.parametrize("damage", sample(["{", "", "[]", MALFORMED], "{", MALFORMED))
def test_start_malformed_state_file_is_quarantined(
    start_host: StartHost, conductor: ConductorDouble, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = start_host()
    host.reconcile_to(conductor.set_desired("f1"))
    host.path.write_text(damage)
    host = start_host()
    assert (host.names(), host.state_file.generation) == ([], 0)
    aside = host.path.with_name("backends-h.json.broken")
    assert aside.read_text() == damage
    assert f"is moved to {aside}" in caplog.text
    assert host.reconcile_to(conductor.generation) == {"f1": None}
    assert host.names() == ["f1"]


@pytest.mark.slow
def test_reconcile_state_file_unwritable_applies_change(
    start_host: StartHost,
    conductor: ConductorDouble,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    (tmp_path / "agent").write_text("in the way")
    host = start_host()
    assert host.reconcile_to(conductor.set_desired("f1")) == {"f1": None}
    assert "Cannot persist desired state to" in caplog.text
    assert host.reconcile_to(conductor.set_desired("f1", num_devices=2)) == {"f1": None}
    assert cards(host, "f1") == 2
    (tmp_path / "agent").unlink()


@pytest.mark.slow
def test_request_during_round_runs_one_more(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host()
    first = conductor.set_desired("f1")
    conductor.block()
    host.reconciler.request(first)
    conductor.calls.wait_for(1)
    for number in range(2, 5):
        conductor.set_desired("f1", num_devices=number)
        host.reconciler.request(conductor.generation)
    conductor.unblock()
    host.reported.wait_until((conductor.generation,))
    assert len(conductor.calls.calls) == 2
    assert cards(host, "f1") == 4
    assert host.reconciler.request(conductor.generation) == conductor.generation
    assert len(conductor.calls.calls) == 2, "nothing is asked for what has been reached"


def test_request_from_many_threads_reaches_latest_generation(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host()

    def request_repeatedly() -> None:
        for _ in range(50):
            host.reconciler.request(conductor.generation)

    threads = [threading.Thread(target=request_repeatedly) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1, 6):
        conductor.set_desired("f1", num_devices=number)
    for thread in threads:
        thread.join(LONG)
    host.reconcile_to(conductor.generation)
    assert cards(host, "f1") == 5
    assert host.names() == ["f1"]


@pytest.mark.slow
def test_acknowledge_rejected_reports_again(
    start_host: StartHost, conductor: ConductorDouble
) -> None:
    host = start_host()
    generation = conductor.set_desired("f1")
    host.reconcile_to(generation)
    host.reconciler.acknowledge(generation, False)
    host.reconciler.request(generation)
    host.reported.wait_for(2)
    assert host.reported.calls == [(generation,), (generation,)]


def test_request_repeat_reports_again(start_host: StartHost, conductor: ConductorDouble) -> None:
    host = start_host()
    generation = conductor.set_desired("f1")
    host.reconcile_to(generation)
    running, call_count = host.registry[0], len(conductor.calls.calls)
    host.reconciler.request(generation)
    host.reconciler.request(generation, repeat=True)
    assert len(conductor.calls.wait_for(call_count + 1)) == call_count + 1, (
        "a hello's answer is no question"
    )
    assert len(host.reported.wait_for(2)) == 2
    assert host.registry[0] is running


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agent", "oslo_x", "sock"])
def test_reconcile_reserved_name_fails(
    start_host: StartHost, conductor: ConductorDouble, name: str
) -> None:
    host = start_host("[agent]\nexternal_driver_dir = /nowhere\nexternal_drivers = sock\n")
    (error,) = host.reconcile_to(conductor.set_desired(name)).values()
    assert name in str(error)
    assert host.names() == []


@pytest.mark.parametrize("nonsense", [7, {}, {"generation": 3, "backends": [{"backend": "f0"}]}])
def test_reconcile_malformed_answer_changes_nothing(
    start_host: StartHost,
    conductor: ConductorDouble,
    caplog: pytest.LogCaptureFixture,
    nonsense: Any,
) -> None:
    host = start_host(TWO)
    conductor.malformed_answer = nonsense
    running = list(host.registry)
    host.reconciler.request(3)
    conductor.calls.wait_for(1)
    host.reconcile_to(conductor.set_desired("f9", DesiredStatus.ABSENT))
    assert list(host.registry) == running
    assert (
        "Cannot fetch desired state, retrying after the next heartbeat: malformed desired state"
        in caplog.text
    )


@pytest.mark.slow
def test_stop_during_hanging_setup_ends(
    start_host: StartHost, conductor: ConductorDouble, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    host = start_host(section("f1", gate=gate))
    host.reconciler.request(conductor.set_desired("f1", setup="hang"))
    conductor.calls.wait_for(1)
    host.stop()
    assert host.names() == []
    assert not host.path.exists(), "what was not done is not remembered"
    gate.touch()
