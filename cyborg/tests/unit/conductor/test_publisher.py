# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.devices import Devices
from cyborg.core.device import Health
from cyborg.db import schema
from cyborg.db.store import providers as store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.hosts import card
from cyborg.fixtures.publishing import Clock, provider, publisher, tell, uuid

__all__ = ["node", "placement_adapter"]

FAKE = "CUSTOM_FAKE"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_report_becomes_nested_providers(engine: sa.Engine, node: Node) -> None:
    tell(engine, node, card(0, 16), card(1, 1))
    assert publisher(engine, node.placement).run_once() == 2
    children = node.children()
    assert set(children) == {f"{node.name}_0000:00:00.0", f"{node.name}_0000:01:00.0"}
    first = children[f"{node.name}_0000:00:00.0"]
    assert (first["uuid"], first["parent_provider_uuid"]) == (uuid(node), node.uuid)
    inventory = node.inventory(uuid(node))[FAKE]
    assert (inventory["total"], inventory["reserved"], inventory["max_unit"]) == (16, 0, 16)
    assert node.traits(uuid(node)) == {"OWNER_CYBORG", "CUSTOM_FAKE_DEVICE"}
    for row in rows.read(engine, schema.providers):
        assert (row["published"], row["stale_since"], row["owner"]) == (1, None, None)
    assert publisher(engine, node.placement).run_once() == 0


def test_what_has_not_changed_is_not_written(sqlite_engine: sa.Engine, node: Node) -> None:
    host = tell(sqlite_engine, node, card(0), card(1))
    assert publisher(sqlite_engine, node.placement).run_once() == 2
    before = {name: child["generation"] for name, child in node.children().items()}
    tell(sqlite_engine, node, card(0, serial="other"), card(1), host=host)
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    assert {name: child["generation"] for name, child in node.children().items()} == before


@pytest.mark.parametrize(
    "facts",
    [{"health": Health.UNHEALTHY}, {"setup_required": True}, {"reboot_required": True}],
    ids=str,
)
def test_what_cannot_be_used_is_closed(
    sqlite_engine: sa.Engine, node: Node, facts: dict[str, Any]
) -> None:
    host = tell(sqlite_engine, node, card(0, 4, **facts))
    publisher(sqlite_engine, node.placement).run_once()
    inventory = node.inventory(uuid(node))[FAKE]
    assert (inventory["total"], inventory["reserved"]) == (4, 4)
    tell(sqlite_engine, node, card(0, 4), host=host)
    publisher(sqlite_engine, node.placement).run_once()
    assert node.inventory(uuid(node))[FAKE]["reserved"] == 0


def test_a_disabled_device_is_closed_and_opened(sqlite_engine: sa.Engine, node: Node) -> None:
    tell(sqlite_engine, node, card())
    (device,) = rows.read(sqlite_engine, schema.devices)
    devices = Devices(UnitOfWork(sqlite_engine))
    for status, reserved in (("maintaining", 2), ("enabled", 0)):
        devices.set_status(device["uuid"], status)
        assert publisher(sqlite_engine, node.placement).run_once() == 1
        assert node.inventory(uuid(node))[FAKE]["reserved"] == reserved


def test_a_host_that_is_down_is_closed_and_opened(sqlite_engine: sa.Engine, node: Node) -> None:
    tell(sqlite_engine, node, card(0), card(1))
    publish = publisher(sqlite_engine, node.placement)
    publish.run_once()
    (agent,) = rows.read(sqlite_engine, schema.services)
    for since, reserved in ((agent["last_seen_at"], 2), (None, 0)):
        rows.change(sqlite_engine, schema.services, agent["id"], down_since=since)
        with sqlite_engine.begin() as tx:
            store.mark_hosts(tx, [node.name], agent["last_seen_at"])
        assert publish.run_once() == 2
        assert node.inventory(uuid(node, 1))[FAKE]["reserved"] == reserved


def test_what_is_gone_is_deleted(sqlite_engine: sa.Engine, node: Node) -> None:
    host = tell(sqlite_engine, node, card())
    publisher(sqlite_engine, node.placement).run_once()
    tell(sqlite_engine, node, host=host)
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    assert not node.children()
    assert not rows.read(sqlite_engine, schema.providers)
    tell(sqlite_engine, node, card(), host=host)
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    assert len(node.children()) == 1


def test_what_is_gone_but_allocated_is_closed_and_kept(
    sqlite_engine: sa.Engine, node: Node, clock: Clock
) -> None:
    host = tell(sqlite_engine, node, card(0, 4))
    publish = publisher(sqlite_engine, node.placement, clock)
    publish.run_once()
    consumer = node.allocate(uuid(node), FAKE)
    tell(sqlite_engine, node, host=host)
    assert publish.run_once() == 0
    assert node.inventory(uuid(node))[FAKE]["reserved"] == 4
    assert "allocations" in provider(sqlite_engine)["error"]
    assert publish.run_once() == 0
    node.client.delete(f"/allocations/{consumer}")
    clock.now += timedelta(minutes=2)
    assert publish.run_once() == 1
    assert not node.children()


def test_a_vanished_bound_device_is_reserved_in_full(sqlite_engine: sa.Engine, node: Node) -> None:
    host = tell(sqlite_engine, node, card(0, 4))
    publisher(sqlite_engine, node.placement).run_once()
    node.allocate(uuid(node), FAKE)
    rows.request(sqlite_engine, rows.profile(sqlite_engine))
    handle = rows.read(sqlite_engine, schema.attach_handles)[0]
    (request,) = rows.read(sqlite_engine, schema.requests)
    rows.change(sqlite_engine, schema.attach_handles, handle["id"], request_id=request["id"])
    tell(sqlite_engine, node, host=host)
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    inventory = node.inventory(uuid(node))[FAKE]
    assert (inventory["total"], inventory["reserved"]) == (1, 1)


def test_parts_within_parts_nest_and_go_in_order(sqlite_engine: sa.Engine, node: Node) -> None:
    part = card().deployables[0]
    inner = replace(part, address="a-inner", parent="b-outer")
    outer = replace(part, address="b-outer")
    host = tell(sqlite_engine, node, card(deployables=(inner, outer)))
    publish = publisher(sqlite_engine, node.placement)
    assert publish.run_once() == 2
    children = node.children()
    above = children[f"{node.name}_b-outer"]
    assert children[f"{node.name}_a-inner"]["parent_provider_uuid"] == above["uuid"]
    tell(sqlite_engine, node, host=host)
    assert publish.run_once() == 2
    assert not node.children()


def test_drift_is_repaired(sqlite_engine: sa.Engine, node: Node) -> None:
    host = tell(sqlite_engine, node, card())
    publisher(sqlite_engine, node.placement).run_once()
    (child,) = node.children().values()
    node.client.delete(f"/resource_providers/{uuid(node)}/traits")
    node.client.put(
        f"/resource_providers/{uuid(node)}",
        json={"name": f"{node.name}-other", "parent_provider_uuid": None},
    )
    host.epoch = str(uuid4())
    tell(sqlite_engine, node, card(), host=host)
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    assert {c["uuid"] for c in node.children().values()} == {child["uuid"]}
    assert set(node.children()) == {child["name"]}
    assert "OWNER_CYBORG" in node.traits(uuid(node))


def test_a_deleted_tree_is_made_again(sqlite_engine: sa.Engine, node: Node) -> None:
    host = tell(sqlite_engine, node, card())
    publisher(sqlite_engine, node.placement).run_once()
    for each in (uuid(node), node.uuid):
        assert node.client.delete(f"/resource_providers/{each}").status_code == 204
    node.make()
    tell(sqlite_engine, node, card(serial="touched"), host=host)
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    assert len(node.children()) == 1
