# SPDX-License-Identifier: Apache-2.0
"""What an agent answers."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.agent.backend import Backend
from cyborg.agent.checkpoint import Checkpoint
from cyborg.agent.endpoint import Agent
from cyborg.agent.jobs import Jobs
from cyborg.core.errors import Invalid, NotFound
from cyborg.core.report import BackendStatus
from cyborg.fixtures.drivers import LONG, Able, Puppet, Told, card

DISCOVERY = "5f0d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e"

SECOND = "0000:02:00.0"


@pytest.fixture
def drivers() -> list[Puppet]:
    return [Able("b0", [card()]), Puppet("b1", [card(SECOND, "b1")])]


@pytest.fixture
def outcomes() -> Told:
    return Told()


@pytest.fixture
def ended() -> Told:
    return Told()


@pytest.fixture
def agent(drivers: list[Puppet], outcomes: Told, ended: Told, tmp_path: Path) -> Iterator[Agent]:
    found = Told()
    running = [Backend(driver, 3600, 3600, found) for driver in drivers]
    for backend in running:
        backend.start()
    found.wait_for(2)
    boot = tmp_path / "boot_id"
    boot.write_text("boot-1")
    jobs = Jobs(running, Checkpoint(tmp_path / "jobs.json", boot), 8, ended)
    yield Agent("h", running, outcomes, jobs, lambda wanted: wanted - 1)
    jobs.stop()
    assert jobs.join(LONG)
    for backend in running:
        backend.stop()
        assert backend.join(LONG)


def test_a_discovery_of_all(agent: Agent, drivers: list[Puppet], outcomes: Told) -> None:
    drivers[1].error = RuntimeError("no")
    answer = agent.discovery(None, driver=None, discovery_id=DISCOVERY)
    assert answer == {"status": "IN-PROGRESS", "discovery_id": DISCOVERY}
    told = {state.name: (id_, state.status) for id_, state in outcomes.wait_for(2)}
    assert told == {"b0": (DISCOVERY, BackendStatus.READY), "b1": (DISCOVERY, BackendStatus.ERROR)}


@pytest.mark.parametrize(("driver", "meant"), [("b1", {"b1"}), ("able", {"b0"})])
def test_a_discovery_of_some(agent: Agent, outcomes: Told, driver: str, meant: set[str]) -> None:
    agent.discovery(None, driver=driver, discovery_id=DISCOVERY)
    assert {state.name for _, state in outcomes.wait_for(len(meant))} == meant


def test_a_discovery_without_a_name_gets_one(agent: Agent, drivers: list[Puppet]) -> None:
    uuid.UUID(agent.discovery(None)["discovery_id"])
    drivers[0].wait_for(2)


def test_hardware(agent: Agent) -> None:
    both = agent.hardware(None)["hardware"]
    assert [(h["address"], h["driver"], h["acc_specs"]["num"]) for h in both] == [
        ("0000:01:00.0", "b0", 1),
        (SECOND, "b1", 1),
    ]
    states = agent.hardware(None)["backends"]
    assert [(s["name"], s["status"]) for s in states] == [("b0", "READY"), ("b1", "READY")]
    assert agent.hardware(None, driver="b1") == {"hardware": both[1:], "backends": states[1:]}


JOB = "5d1f1c5e-8a36-4d1c-9a40-0e6d8f3f6f5b"
ARGUMENTS = {
    "items": [{"backend": "b0", "device": "c", "deployable": "c", "handle": "h1", "accel": {}}],
    "instance": "i1",
    "image": None,
    "cancels": [],
}


def test_a_job(agent: Agent, ended: Told) -> None:
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
def test_a_malformed_job_is_refused(
    agent: Agent, job: str, kind: str, arguments: Any, seconds: float
) -> None:
    with pytest.raises(Invalid):
        agent.job(None, job, kind, arguments, seconds)


def test_a_driver_that_is_not_there(agent: Agent) -> None:
    for ask in (agent.discovery, agent.hardware):
        with pytest.raises(NotFound, match="host h has no backend or driver 'b9'; it has b0, b1"):
            ask(None, driver="b9")


def test_a_nudge(agent: Agent) -> None:
    assert agent.wanted(None, 7) == {"revision": 6}
    for wrong in (-1, "7", None, True):
        with pytest.raises(Invalid, match="revision must be a whole number"):
            agent.wanted(None, wrong)  # type: ignore[arg-type]
