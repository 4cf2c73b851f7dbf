# SPDX-License-Identifier: Apache-2.0
"""PCIe ports of a running guest are counted before the bind of a device that the agent attaches."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.conductor.attachments import ports
from cyborg.conductor.attachments.devices import MAX_PORT_COUNTS
from cyborg.conductor.attachments.ports import GuestPorts, PortCount
from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter

__all__ = ["node", "placement_adapter"]


class Agents:
    """The agent of the host, or one that does not answer.

    It answers a call of the guests ``silent`` after ``answer`` is set.
    """

    def __init__(self, env: Env) -> None:
        self.env = env
        self.asked: list[tuple[str, str]] = []
        self.error: Unavailable | None = None
        self.silent: set[str] = set()
        self.answer = threading.Event()

    def count_free_ports(self, host: str, instance: str) -> dict[str, Any]:
        """Answer as ``AgentEndpoint`` does."""
        self.asked.append((host, instance))
        if instance in self.silent:
            assert self.answer.wait(60)
        if self.error is not None:
            raise self.error
        return {"free": self.env.guests.count_free_ports(instance)}


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova) -> Env:
    env = Env(sqlite_engine, node, fake_nova, abilities=("prepares", "sanitises"), live=True)
    with sqlite_engine.begin() as tx:
        tx.execute(sa.update(schema.attach_handles).values(type="VFIO"))
    return env


@pytest.fixture
def agents(env: Env) -> Iterator[Agents]:
    agents: Any = Agents(env)
    env.devices.ports = GuestPorts(agents)
    yield agents
    agents.answer.set()


def attach(env: Env) -> dict[str, Any]:
    """Attach to the running guest, and wait for the end."""
    env.attach(mode="live")
    env.settle()
    (row,) = env.rows()
    return row


def claims(env: Env) -> int:
    """Return the number of handles that were ever claimed."""
    return len(rows.read(env.engine, schema.custody_records, event="claimed"))


def test_guest_without_a_free_port_claims_no_device(env: Env, agents: Agents) -> None:
    env.hypervisor.ports = 0
    before = claims(env)
    row = attach(env)
    assert env.check() == "error"
    assert f"server {env.instance} has 0 free PCIe root ports, and needs 1: set" in row["error"]
    assert claims(env) == before
    assert agents.asked == [(env.node.name, env.instance)]


def test_guest_with_a_free_port_gets_the_device(env: Env, agents: Agents) -> None:
    env.hypervisor.ports = 1
    assert attach(env)["state"] == "attached"
    assert env.hypervisor.count(env.instance) == 1
    assert len(agents.asked) == 1


def test_guest_without_pcie_gets_the_device(env: Env, agents: Agents) -> None:
    assert attach(env)["state"] == "attached"
    assert len(agents.asked) == 1


def test_agent_that_does_not_answer_counts_before_it_plugs(env: Env, agents: Agents) -> None:
    agents.error, env.hypervisor.ports = Unavailable("no cyborg-agent listens"), 0
    before = claims(env)
    row = attach(env)
    assert env.check() == "error"
    assert "0 free PCIe root ports, and needs 1" in row["error"]
    assert claims(env) == before + 1


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the conductor not wait for an answer."""
    monkeypatch.setattr(ports, "ANSWER_SECONDS", 0.0)


@pytest.mark.usefixtures("no_wait")
def test_silent_agent_delays_its_own_attachment_only(env: Env, agents: Agents) -> None:
    other = env.add_server()
    agents.silent = {env.instance}
    env.attach(mode="live")
    env.runner.run_once()
    env.attach(mode="live", instance_uuid=other)
    for _ in range(2):
        env.runner.run_once()
        env.now += timedelta(seconds=1)
    steps = {row["instance_uuid"]: row["step"] for row in env.working()}
    assert steps.pop(env.instance) == "bind"
    assert steps.get(other) != "bind"
    env.settle()
    found = rows.read(env.engine, schema.attachments)
    assert {row["state"] for row in found} == {"attached"}, "without the answer"
    assert len(agents.asked) == 2


@pytest.mark.usefixtures("no_wait")
def test_late_answer_counts(env: Env, agents: Agents) -> None:
    agents.silent = {env.instance}
    env.hypervisor.ports = 0
    before = claims(env)
    env.attach(mode="live")
    env.runner.run_once()
    (call,) = (thread for thread in threading.enumerate() if thread.name == "ports")
    agents.answer.set()
    call.join(60)
    env.settle()
    (row,) = env.rows()
    assert "0 free PCIe root ports, and needs 1" in row["error"]
    assert (claims(env), len(agents.asked)) == (before, 1)


@pytest.mark.usefixtures("no_wait")
def test_conductor_that_takes_over_asks_again_or_binds(env: Env, agents: Agents) -> None:
    agents.silent = {env.instance}
    env.attach(mode="live")
    for _ in range(MAX_PORT_COUNTS):
        env.runner.run_once()
        assert env.working()[0]["step"] == "bind"
        env.devices.ports = GuestPorts(agents)  # type: ignore[arg-type]
        env.now += timedelta(seconds=1)
    assert len(agents.asked) == MAX_PORT_COUNTS
    env.settle()
    (row,) = env.rows()
    assert row["state"] == "attached"
    assert len(agents.asked) == MAX_PORT_COUNTS


def test_number_of_asked_agents_is_limited(
    env: Env, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "MAX_COUNTS", 0)
    assert attach(env)["state"] == "attached"
    assert agents.asked == []


def test_agents_that_have_not_answered_in_time_count_for_the_limit(
    env: Env, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "MAX_COUNTS", 1)
    agents.silent.add(env.instance)
    assert attach(env)["state"] == "attached"
    counts = env.devices.ports
    assert counts is not None
    assert counts.count("another", env.node.name, env.instance) == PortCount(None)
    assert len(agents.asked) == 1


def test_device_of_another_type_is_not_asked_for(env: Env, agents: Agents) -> None:
    """It may be one of conventional PCI, which needs no such port."""
    with env.engine.begin() as tx:
        tx.execute(sa.update(schema.attach_handles).values(type="PCI"))
    assert attach(env)["state"] == "attached"
    assert agents.asked == []


def test_next_boot_has_no_guest_to_ask(env: Env, agents: Agents) -> None:
    with env.engine.begin() as tx:
        tx.execute(sa.update(schema.attach_handles).values(type="PCI"))
    env.hypervisor.ports = 0
    env.attach()
    env.settle()
    assert agents.asked == []
