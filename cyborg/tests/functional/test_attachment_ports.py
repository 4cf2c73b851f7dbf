# SPDX-License-Identifier: Apache-2.0
"""PCIe ports of a running guest are counted before the bind of a device that the agent attaches."""

from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.attachment_setup import Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter

__all__ = ["node", "placement_adapter"]


class Agents:
    """The agent of the host, or one that does not answer."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.asked: list[tuple[str, str]] = []
        self.error: Unavailable | None = None

    def count_free_ports(self, host: str, instance: str) -> dict[str, Any]:
        """Answer as ``AgentEndpoint`` does."""
        self.asked.append((host, instance))
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
def agents(env: Env) -> Agents:
    agents: Any = Agents(env)
    env.devices.agents = agents
    return agents  # type: ignore[no-any-return]


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
