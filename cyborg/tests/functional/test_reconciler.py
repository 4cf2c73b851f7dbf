# SPDX-License-Identifier: Apache-2.0
"""ARQs that Nova leaks, from the agent's report to the released device, with a real Placement."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.binder import OwnerResolver
from cyborg.conductor.inventory.devices import Devices
from cyborg.conductor.orphans.collector import OrphanCollector, RoundStats
from cyborg.core.errors import NoHandle, Unavailable
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import Clock, PublishedCard
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["node", "placement_adapter"]


class UnreachablePlacement:
    """An unreachable Placement."""

    def allocations_of(self, consumer: str) -> tuple[str | None, dict[str, int]]:
        raise Unavailable("Placement is away")


class Cloud(PublishedCard):
    """A host with a published card, the actions of Nova, and the services of a conductor."""

    def __init__(self, engine: sa.Engine, node: Node) -> None:
        super().__init__(engine, node, 2)
        self.clock = Clock()
        self.conf = make_conf()
        uow = UnitOfWork(engine)
        self.requests = Arqs(self.conf, uow, owners=OwnerResolver(node.placement))
        self.blind = Arqs(self.conf, uow, owners=OwnerResolver(UnreachablePlacement()))  # type: ignore[arg-type]
        self.reconciler = OrphanCollector(self.conf, uow, node.placement, now=self.clock)

    def boot(self, project: str) -> str:
        """Boot a server with one device as Nova does; return its uuid."""
        instance = str(uuid4())
        self.allocate(instance, project)
        self.bind(self.requests, self.create(project), instance)
        return instance

    def create(self, project: str) -> str:
        (arq,) = self.requests.create("fpga", project)["arqs"]
        return str(arq["uuid"])

    def bind(self, requests: Arqs, uuid: str, instance: str, **caller: Any) -> None:
        requests.bind([self.make_bind(uuid, instance)], None, **caller)

    def round(self, seconds: float = 300) -> RoundStats:
        self.clock.now += timedelta(seconds=seconds)
        tally = self.reconciler.run_once()
        assert tally is not None
        return tally

    def of(self, instance: str) -> dict[str, Any]:
        (row,) = rows.read(self.engine, schema.arqs, instance_uuid=instance)
        return row


@pytest.fixture
def cloud(engine: sa.Engine, node: Node) -> Cloud:
    return Cloud(engine, node)


@pytest.mark.parametrize("caller", [{}, {"instance_project": "project-1"}])
def test_server_in_build_gets_its_device_after_a_cordon(
    cloud: Cloud, caller: dict[str, str]
) -> None:
    """With the calls of Nova's conductor: the allocation, then the cordon, then the bind.

    Nova calls with the token of the server's owner, whose project is that of the instance.
    """
    building, late = str(uuid4()), str(uuid4())
    cloud.allocate(building, "project-1")
    (device,) = rows.read(cloud.engine, schema.devices)
    build(Devices, UnitOfWork(cloud.engine)).set_status(device["uuid"], "maintaining")
    cloud.bind(cloud.requests, cloud.create("project-1"), building, **caller)
    assert cloud.of(building)["state"] == "Bound"
    with pytest.raises(NoHandle, match="under maintenance"):
        cloud.bind(cloud.requests, cloud.create("project-1"), late, **caller)
    with pytest.raises(Unavailable, match="before its device was cordoned: Placement is away"):
        cloud.bind(cloud.blind, cloud.create("project-1"), str(uuid4()), **caller)


def test_leaked_device_is_released_and_offered_again(cloud: Cloud) -> None:
    stays, leaked = cloud.boot("project-1"), cloud.boot("project-2")
    assert len(cloud.list_bound()) == 2
    leaked_arq = cloud.of(leaked)["uuid"]
    cloud.round(3600)
    cloud.node.deallocate(leaked)
    assert cloud.round().suspected == 1
    assert cloud.of(leaked)["state"] == "Bound"
    assert cloud.round().released == 0
    assert cloud.round().released == 1
    (row,) = rows.read(cloud.engine, schema.arqs, uuid=leaked_arq)
    assert (row["state"], row["instance_uuid"], row["project_id"]) == ("Unbound", None, "project-2")
    assert cloud.of(stays)["state"] == "Bound"
    assert len(cloud.list_bound()) == 1
    counts = {
        row["kind"]: row["count"] for row in rows.read(cloud.engine, schema.self_heal_counters)
    }
    assert (counts["orphans_suspected"], counts["orphans_released"]) == (1, 1)
    cloud.boot("project-3")
    assert len(cloud.list_bound()) == 2


def test_arq_whose_allocation_returns_stays_bound(cloud: Cloud) -> None:
    instance = cloud.boot("project-1")
    cloud.round(3600)
    cloud.node.deallocate(instance)
    cloud.round()
    assert cloud.of(instance)["orphan_since"] == cloud.clock.now
    cloud.allocate(instance, "project-1")
    assert cloud.round(3600) == RoundStats(checked=1, cleared=1)
    assert cloud.round(3600) == RoundStats(checked=1)
    assert (cloud.of(instance)["state"], cloud.of(instance)["orphan_since"]) == ("Bound", None)


def test_arq_bound_by_administrator_belongs_to_the_instances_project(cloud: Cloud) -> None:
    instance = str(uuid4())
    cloud.allocate(instance, "project-1")
    cloud.bind(cloud.requests, cloud.create("admins"), instance)
    row = cloud.of(instance)
    assert (row["project_id"], bool(row["owner_verified"])) == ("project-1", True)


def test_unknown_owner_is_resolved_later(cloud: Cloud) -> None:
    instance = str(uuid4())
    cloud.bind(cloud.blind, cloud.create("admins"), instance)
    assert not cloud.of(instance)["owner_verified"]
    assert cloud.round().owners_assigned == 0
    cloud.allocate(instance, "project-1")
    assert cloud.round().owners_assigned == 1
    row = cloud.of(instance)
    assert (row["project_id"], bool(row["owner_verified"])) == ("project-1", True)
