# SPDX-License-Identifier: Apache-2.0
"""The RPC endpoint of the agent."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.backends.backend import Backend
from cyborg.agent.endpoint import AgentEndpoint
from cyborg.agent.jobs.checkpoint import MAX_PENDING, Checkpoint
from cyborg.agent.jobs.queue import JobQueue
from cyborg.core.errors import Invalid, NotFound, Unavailable
from cyborg.core.inventory.report import BackendStatus
from cyborg.tests.fixtures.hosts.scripted_driver import (
    LONG,
    CallRecorder,
    ScriptedDriver,
    ScriptedWorkDriver,
    card,
)

DISCOVERY = "5f0d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e"

SECOND = "0000:02:00.0"


@pytest.fixture
def drivers() -> list[ScriptedDriver]:
    return [ScriptedWorkDriver("b0", [card()]), ScriptedDriver("b1", [card(SECOND, "b1")])]


@pytest.fixture
def outcomes() -> CallRecorder:
    return CallRecorder()


@pytest.fixture
def ended() -> CallRecorder:
    return CallRecorder()


@pytest.fixture
def agent(
    drivers: list[ScriptedDriver], outcomes: CallRecorder, ended: CallRecorder, tmp_path: Path
) -> Iterator[AgentEndpoint]:
    recorder = CallRecorder()
    running = [Backend(driver, 3600, 3600, recorder) for driver in drivers]
    for backend in running:
        backend.start()
    recorder.wait_for(2)
    boot = tmp_path / "boot_id"
    boot.write_text("boot-1")
    jobs = JobQueue(running, Checkpoint(tmp_path / "jobs.json", boot), 8, ended)
    yield AgentEndpoint("h", running, outcomes, jobs, lambda generation: generation - 1)
    jobs.stop()
    assert jobs.join(LONG)
    for backend in running:
        backend.stop()
        assert backend.join(LONG)


def test_discovery_without_driver_selects_all_backends(
    agent: AgentEndpoint, drivers: list[ScriptedDriver], outcomes: CallRecorder
) -> None:
    drivers[1].error = RuntimeError("no")
    answer = agent.discovery(None, driver=None, discovery_id=DISCOVERY)
    assert answer == {"status": "IN-PROGRESS", "discovery_id": DISCOVERY}
    outcome_by_name = {state.name: (id_, state.status) for id_, state in outcomes.wait_for(2)}
    assert outcome_by_name == {
        "b0": (DISCOVERY, BackendStatus.READY),
        "b1": (DISCOVERY, BackendStatus.ERROR),
    }


@pytest.mark.parametrize(("driver", "expected"), [("b1", {"b1"}), ("able", {"b0"})])
def test_discovery_of_driver_selects_its_backends(
    agent: AgentEndpoint, outcomes: CallRecorder, driver: str, expected: set[str]
) -> None:
    agent.discovery(None, driver=driver, discovery_id=DISCOVERY)
    assert {state.name for _, state in outcomes.wait_for(len(expected))} == expected


def test_discovery_without_id_returns_new_uuid(
    agent: AgentEndpoint, drivers: list[ScriptedDriver]
) -> None:
    uuid.UUID(agent.discovery(None)["discovery_id"])
    drivers[0].wait_for(2)


def test_hardware_returns_devices_and_states(agent: AgentEndpoint) -> None:
    hardware = agent.hardware(None)["hardware"]
    assert [(h["address"], h["driver"], h["acc_specs"]["num"]) for h in hardware] == [
        ("0000:01:00.0", "b0", 1),
        (SECOND, "b1", 1),
    ]
    states = agent.hardware(None)["backends"]
    assert [(s["name"], s["status"]) for s in states] == [("b0", "READY"), ("b1", "READY")]
    assert agent.hardware(None, driver="b1") == {"hardware": hardware[1:], "backends": states[1:]}


JOB = "5d1f1c5e-8a36-4d1c-9a40-0e6d8f3f6f5b"
ARGUMENTS = {
    "items": [{"backend": "b0", "device": "c", "deployable": "c", "handle": "h1", "accel": {}}],
    "instance": "i1",
    "image": None,
    "cancels": [],
}


def test_job_returns_status(agent: AgentEndpoint, ended: CallRecorder) -> None:
    job = str(uuid.uuid4())
    running = {"state": "running", "error": None}
    assert agent.job(None, job, "prepare", ARGUMENTS, 60.0) == running
    assert ended.wait_for() == [(job, "done", None)]
    assert agent.job(None, job, "prepare", ARGUMENTS, 60.0) == {"state": "done", "error": None}


@pytest.mark.parametrize(
    ("job", "kind", "arguments", "seconds"),
    [
        ("7", "prepare", ARGUMENTS, 60),
        (JOB, "levitate", ARGUMENTS, 60),
        (JOB, "prepare", None, 60),
        (JOB, "prepare", {"items": []}, 60),
        (JOB, "prepare", {**ARGUMENTS, "items": [{"backend": 7}]}, 60),
        (JOB, "program", ARGUMENTS, 60),
        (JOB, "prepare", ARGUMENTS, -1),
    ],
)
def test_job_malformed_raises_invalid(
    agent: AgentEndpoint, job: str, kind: str, arguments: Any, seconds: float
) -> None:
    with pytest.raises(Invalid):
        agent.job(None, job, kind, arguments, seconds)


def test_discovery_unknown_driver_raises_not_found(agent: AgentEndpoint) -> None:
    for ask in (agent.discovery, agent.hardware):
        with pytest.raises(NotFound, match="host h has no backend or driver 'b9'; it has b0, b1"):
            ask(None, driver="b9")


def test_wanted_returns_reported_generation(agent: AgentEndpoint) -> None:
    assert agent.sync_backends(None, 7) == {"generation": 6}
    for wrong in (-1, "7", None, True):
        with pytest.raises(Invalid, match="generation: invalid value"):
            agent.sync_backends(None, wrong)  # type: ignore[arg-type]


def test_count_free_ports_of_a_host_without_live_attach_is_unknown(agent: AgentEndpoint) -> None:
    assert agent.count_free_ports(None, DISCOVERY) == {"free": None}
    with pytest.raises(Invalid, match="instance"):
        agent.count_free_ports(None, "7")


def test_discovery_too_many_undelivered_outcomes_raises_unavailable(
    drivers: list[ScriptedDriver], outcomes: CallRecorder, tmp_path: Path
) -> None:
    waiting = [MAX_PENDING - 1]
    idle = [Backend(driver, 3600, 3600) for driver in drivers]
    boot = tmp_path / "boot_id"
    boot.write_text("boot-1")
    jobs = JobQueue([], Checkpoint(tmp_path / "jobs.json", boot), 8, outcomes)
    agent = AgentEndpoint(
        "h", idle, outcomes, jobs, lambda generation: generation, lambda: waiting[0]
    )
    with pytest.raises(Unavailable, match="retry when some have ended"):
        agent.discovery(None, discovery_id=DISCOVERY)
    assert agent.discovery(None)["status"] == "IN-PROGRESS", "nobody waits for its outcome"
    waiting[0] = MAX_PENDING - 3
    agent.discovery(None, discovery_id=DISCOVERY)
    with pytest.raises(Unavailable):
        agent.discovery(None, discovery_id=DISCOVERY)
    for backend in idle:
        backend.stop()
        backend.start()
    assert len(outcomes.wait_for(2)) == 2
    agent.discovery(None, discovery_id=DISCOVERY)
