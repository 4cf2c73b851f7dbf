# SPDX-License-Identifier: Apache-2.0
"""What Nova leaks, from the agent's report to the free device, with a real Placement."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.owners import Owners
from cyborg.conductor.reconciler import Reconciler, Tally
from cyborg.conductor.requests import Requests
from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import publishing, rows
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.hosts import card
from cyborg.fixtures.options import make_conf
from cyborg.fixtures.publishing import Clock

__all__ = ["node", "placement_adapter"]

GROUPS = ({"resources:CUSTOM_FAKE": "1", "trait:CUSTOM_FAKE_DEVICE": "required"},)


class Away:
    """A Placement that does not answer."""

    def consumer_project(self, consumer: str) -> str | None:
        raise Unavailable("Placement is away")


class Cloud:
    """A host whose card is published, Nova's part, and a conductor's."""

    def __init__(self, engine: sa.Engine, node: Node) -> None:
        self.engine, self.node = engine, node
        self.clock = Clock()
        self.conf = make_conf()
        uow = UnitOfWork(engine)
        publishing.tell(engine, node, card(count=2))
        publishing.publisher(engine, node.placement).run_once()
        rows.profile(engine, groups=GROUPS)
        self.provider = publishing.uuid(node)
        self.requests = Requests(self.conf, uow, owners=Owners(node.placement))
        self.blind = Requests(self.conf, uow, owners=Owners(Away()))  # type: ignore[arg-type]
        self.reconciler = Reconciler(self.conf, uow, node.placement, now=self.clock)

    def boot(self, project: str) -> str:
        """Do what Nova does for a server with one device; return its uuid."""
        instance = str(uuid4())
        self.allocate(instance, project)
        self.bind(self.requests, self.create(project), instance)
        return instance

    def create(self, project: str) -> str:
        (made,) = self.requests.create("fpga", project)["arqs"]
        return str(made["uuid"])

    def bind(self, requests: Requests, uuid: str, instance: str, **caller: Any) -> None:
        wish = {
            "request": uuid,
            "hostname": self.node.name,
            "device_rp_uuid": self.provider,
            "instance_uuid": instance,
        }
        requests.patch([wish], "bind", None, **caller)

    def allocate(self, instance: str, project: str) -> None:
        body = {
            "allocations": {self.provider: {"resources": {"CUSTOM_FAKE": 1}}},
            "project_id": project,
            "user_id": "u",
            "consumer_generation": None,
            "consumer_type": "INSTANCE",
        }
        answer = self.node.client.put(f"/allocations/{instance}", json=body)
        assert answer.status_code == 204, answer.text

    def deallocate(self, instance: str) -> None:
        assert self.node.client.delete(f"/allocations/{instance}").status_code == 204

    def round(self, seconds: float = 300) -> Tally:
        self.clock.now += timedelta(seconds=seconds)
        tally = self.reconciler.run_once()
        assert tally is not None
        return tally

    def of(self, instance: str) -> dict[str, Any]:
        (row,) = rows.read(self.engine, schema.requests, instance_uuid=instance)
        return row

    def owned(self) -> int:
        handles = rows.read(self.engine, schema.attach_handles)
        return sum(handle["request_id"] is not None for handle in handles)


@pytest.fixture
def cloud(engine: sa.Engine, node: Node) -> Cloud:
    return Cloud(engine, node)


def test_a_device_that_nova_leaked_is_sold_again(cloud: Cloud) -> None:
    stays, leaked = cloud.boot("project-1"), cloud.boot("project-2")
    assert cloud.owned() == 2
    lost = cloud.of(leaked)["uuid"]
    cloud.round(3600)
    cloud.deallocate(leaked)
    assert cloud.round().suspected == 1
    assert cloud.of(leaked)["state"] == "Bound"
    assert cloud.round().freed == 0
    assert cloud.round().freed == 1
    (row,) = rows.read(cloud.engine, schema.requests, uuid=lost)
    assert (row["state"], row["instance_uuid"], row["project_id"]) == ("Unbound", None, "project-2")
    assert cloud.of(stays)["state"] == "Bound"
    assert cloud.owned() == 1
    deeds = {row["kind"]: row["count"] for row in rows.read(cloud.engine, schema.deeds)}
    assert (deeds["orphans_suspected"], deeds["orphans_freed"]) == (1, 1)
    cloud.boot("project-3")
    assert cloud.owned() == 2


def test_a_server_whose_allocation_returns_keeps_its_device(cloud: Cloud) -> None:
    instance = cloud.boot("project-1")
    cloud.round(3600)
    cloud.deallocate(instance)
    cloud.round()
    assert cloud.of(instance)["orphan_since"] == cloud.clock.now
    cloud.allocate(instance, "project-1")
    assert cloud.round(3600) == Tally(judged=1, recovered=1)
    assert cloud.round(3600) == Tally(judged=1)
    assert (cloud.of(instance)["state"], cloud.of(instance)["orphan_since"]) == ("Bound", None)


def test_what_an_administrator_binds_is_the_instances_projects(cloud: Cloud) -> None:
    instance = str(uuid4())
    cloud.allocate(instance, "project-1")
    cloud.bind(cloud.requests, cloud.create("admins"), instance)
    row = cloud.of(instance)
    assert (row["project_id"], bool(row["owner_known"])) == ("project-1", True)


def test_whose_it_is_may_be_settled_later(cloud: Cloud) -> None:
    instance = str(uuid4())
    cloud.bind(cloud.blind, cloud.create("admins"), instance)
    assert not cloud.of(instance)["owner_known"]
    assert cloud.round().settled == 0
    cloud.allocate(instance, "project-1")
    assert cloud.round().settled == 1
    row = cloud.of(instance)
    assert (row["project_id"], bool(row["owner_known"])) == ("project-1", True)
