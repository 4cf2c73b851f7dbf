# SPDX-License-Identifier: Apache-2.0
"""What an agent answers."""

import uuid
from collections.abc import Iterator

import pytest

from cyborg.agent.backend import Backend
from cyborg.agent.endpoint import Agent
from cyborg.core.errors import NotFound
from cyborg.core.report import BackendStatus
from cyborg.fixtures.drivers import LONG, Puppet, Told, card

SECOND = "0000:02:00.0"


@pytest.fixture
def drivers() -> list[Puppet]:
    return [Puppet("b0", [card()]), Puppet("b1", [card(SECOND, "b1")])]


@pytest.fixture
def outcomes() -> Told:
    return Told()


@pytest.fixture
def agent(drivers: list[Puppet], outcomes: Told) -> Iterator[Agent]:
    found = Told()
    running = [Backend(driver, 3600, 3600, found) for driver in drivers]
    for backend in running:
        backend.start()
    found.wait_for(2)
    yield Agent("h", running, outcomes)
    for backend in running:
        backend.stop()
        assert backend.join(LONG)


def test_a_discovery_of_all(agent: Agent, drivers: list[Puppet], outcomes: Told) -> None:
    drivers[1].error = RuntimeError("no")
    answer = agent.discovery(None, driver=None, discovery_id="d1")
    assert answer == {"status": "IN-PROGRESS", "discovery_id": "d1"}
    told = {state.name: (id_, state.status) for id_, state in outcomes.wait_for(2)}
    assert told == {"b0": ("d1", BackendStatus.READY), "b1": ("d1", BackendStatus.ERROR)}


@pytest.mark.parametrize(("driver", "meant"), [("b1", {"b1"}), ("puppet", {"b0", "b1"})])
def test_a_discovery_of_some(agent: Agent, outcomes: Told, driver: str, meant: set[str]) -> None:
    agent.discovery(None, driver=driver, discovery_id="d1")
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
    assert agent.hardware(None, driver="b1") == {"hardware": both[1:]}


def test_a_driver_that_is_not_there(agent: Agent) -> None:
    for ask in (agent.discovery, agent.hardware):
        with pytest.raises(NotFound, match="host h has no backend or driver 'b9'; it has b0, b1"):
            ask(None, driver="b9")
