# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.inventory.devices import Devices
from cyborg.conductor.placement import publisher as publisher_module
from cyborg.core.inventory.device import Health
from cyborg.db import schema
from cyborg.db.providers import write as store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import (
    Clock,
    make_publisher,
    provider_row,
    provider_uuid,
    report_devices,
)
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.hosts import card

__all__ = ["node", "placement_adapter"]

FAKE = "CUSTOM_FAKE"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_report_is_published_as_nested_providers(engine: sa.Engine, node: Node) -> None:
    report_devices(engine, node, card(0, 16), card(1, 1))
    assert make_publisher(engine, node.placement).run_once() == 2
    children = node.children()
    assert set(children) == {f"{node.name}_0000:00:00.0", f"{node.name}_0000:01:00.0"}
    first = children[f"{node.name}_0000:00:00.0"]
    assert (first["uuid"], first["parent_provider_uuid"]) == (provider_uuid(node), node.uuid)
    inventory = node.inventory(provider_uuid(node))[FAKE]
    assert (inventory["total"], inventory["reserved"], inventory["max_unit"]) == (16, 0, 16)
    assert node.traits(provider_uuid(node)) == {"OWNER_CYBORG", "CUSTOM_FAKE_DEVICE"}
    for row in rows.read(engine, schema.providers):
        assert (row["published_revision"], row["stale_since"], row["owner"]) == (1, None, None)
    assert make_publisher(engine, node.placement).run_once() == 0


def test_unchanged_provider_is_not_written(sqlite_engine: sa.Engine, node: Node) -> None:
    host = report_devices(sqlite_engine, node, card(0), card(1))
    assert make_publisher(sqlite_engine, node.placement).run_once() == 2
    before = {name: child["generation"] for name, child in node.children().items()}
    report_devices(sqlite_engine, node, card(0, serial="other"), card(1), host=host)
    assert make_publisher(sqlite_engine, node.placement).run_once() == 1
    assert {name: child["generation"] for name, child in node.children().items()} == before


@pytest.mark.parametrize(
    "facts",
    [
        {"health": Health.UNHEALTHY},
        {"setup_required": True},
        {"reboot_required": True},
        {"deliverable": False},
    ],
    ids=str,
)
def test_unschedulable_device_is_reserved_in_full(
    sqlite_engine: sa.Engine, node: Node, facts: dict[str, Any]
) -> None:
    host = report_devices(sqlite_engine, node, card(0, 4, **facts))
    make_publisher(sqlite_engine, node.placement).run_once()
    inventory = node.inventory(provider_uuid(node))[FAKE]
    assert (inventory["total"], inventory["reserved"]) == (4, 4)
    report_devices(sqlite_engine, node, card(0, 4), host=host)
    make_publisher(sqlite_engine, node.placement).run_once()
    assert node.inventory(provider_uuid(node))[FAKE]["reserved"] == 0


def test_device_in_maintenance_is_reserved_until_enabled(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    report_devices(sqlite_engine, node, card())
    (device,) = rows.read(sqlite_engine, schema.devices)
    devices = build(Devices, UnitOfWork(sqlite_engine))
    for status, reserved in (("maintaining", 2), ("enabled", 0)):
        devices.set_status(device["uuid"], status)
        assert make_publisher(sqlite_engine, node.placement).run_once() == 1
        assert node.inventory(provider_uuid(node))[FAKE]["reserved"] == reserved


def test_host_down_reserves_its_devices_until_up(sqlite_engine: sa.Engine, node: Node) -> None:
    report_devices(sqlite_engine, node, card(0), card(1))
    publish = make_publisher(sqlite_engine, node.placement)
    publish.run_once()
    (agent,) = rows.read(sqlite_engine, schema.services)
    for since, reserved in ((agent["last_seen_at"], 2), (None, 0)):
        rows.update(sqlite_engine, schema.services, agent["id"], down_since=since)
        with sqlite_engine.begin() as tx:
            store.mark_stale_of_hosts(tx, [node.name], agent["last_seen_at"])
        assert publish.run_once() == 2
        assert node.inventory(provider_uuid(node, 1))[FAKE]["reserved"] == reserved


def test_removed_device_is_deleted(sqlite_engine: sa.Engine, node: Node) -> None:
    host = report_devices(sqlite_engine, node, card())
    make_publisher(sqlite_engine, node.placement).run_once()
    report_devices(sqlite_engine, node, host=host)
    assert make_publisher(sqlite_engine, node.placement).run_once() == 1
    assert not node.children()
    assert not rows.read(sqlite_engine, schema.providers)
    report_devices(sqlite_engine, node, card(), host=host)
    assert make_publisher(sqlite_engine, node.placement).run_once() == 1
    assert len(node.children()) == 1


def test_removed_device_with_allocation_is_kept_reserved(
    sqlite_engine: sa.Engine, node: Node, clock: Clock
) -> None:
    host = report_devices(sqlite_engine, node, card(0, 4))
    publish = make_publisher(sqlite_engine, node.placement, clock)
    publish.run_once()
    consumer = node.allocate(provider_uuid(node), FAKE)
    report_devices(sqlite_engine, node, host=host)
    assert publish.run_once() == 0
    assert node.inventory(provider_uuid(node))[FAKE]["reserved"] == 4
    assert "allocations" in provider_row(sqlite_engine)["error"]
    assert publish.run_once() == 0
    node.client.delete(f"/allocations/{consumer}")
    clock.now += timedelta(minutes=2)
    assert publish.run_once() == 1
    assert not node.children()


def test_unreported_bound_device_is_reserved_in_full(sqlite_engine: sa.Engine, node: Node) -> None:
    host = report_devices(sqlite_engine, node, card(0, 4))
    make_publisher(sqlite_engine, node.placement).run_once()
    node.allocate(provider_uuid(node), FAKE)
    rows.insert_arq(sqlite_engine, rows.insert_profile(sqlite_engine))
    handle = rows.read(sqlite_engine, schema.attach_handles)[0]
    (request,) = rows.read(sqlite_engine, schema.arqs)
    rows.update(sqlite_engine, schema.attach_handles, handle["id"], arq_id=request["id"])
    report_devices(sqlite_engine, node, host=host)
    assert make_publisher(sqlite_engine, node.placement).run_once() == 1
    inventory = node.inventory(provider_uuid(node))[FAKE]
    assert (inventory["total"], inventory["reserved"]) == (1, 1)


def test_nested_deployables_are_published_and_deleted_in_order(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    deployable = card().deployables[0]
    inner = replace(deployable, address="a-inner", parent="b-outer")
    outer = replace(deployable, address="b-outer")
    host = report_devices(sqlite_engine, node, card(deployables=(inner, outer)))
    publish = make_publisher(sqlite_engine, node.placement)
    assert publish.run_once() == 2
    children = node.children()
    parent = children[f"{node.name}_b-outer"]
    assert children[f"{node.name}_a-inner"]["parent_provider_uuid"] == parent["uuid"]
    report_devices(sqlite_engine, node, host=host)
    assert publish.run_once() == 2
    assert not node.children()


def test_drift_is_repaired(sqlite_engine: sa.Engine, node: Node) -> None:
    host = report_devices(sqlite_engine, node, card())
    make_publisher(sqlite_engine, node.placement).run_once()
    (child,) = node.children().values()
    node.client.delete(f"/resource_providers/{provider_uuid(node)}/traits")
    node.client.put(
        f"/resource_providers/{provider_uuid(node)}",
        json={"name": f"{node.name}-other", "parent_provider_uuid": None},
    )
    host.epoch = str(uuid4())
    report_devices(sqlite_engine, node, card(), host=host)
    assert make_publisher(sqlite_engine, node.placement).run_once() == 1
    assert {c["uuid"] for c in node.children().values()} == {child["uuid"]}
    assert set(node.children()) == {child["name"]}
    assert "OWNER_CYBORG" in node.traits(provider_uuid(node))


def test_deleted_tree_is_recreated(sqlite_engine: sa.Engine, node: Node) -> None:
    host = report_devices(sqlite_engine, node, card())
    make_publisher(sqlite_engine, node.placement).run_once()
    for uuid in (provider_uuid(node), node.uuid):
        assert node.client.delete(f"/resource_providers/{uuid}").status_code == 204
    node.create()
    report_devices(sqlite_engine, node, card(serial="touched"), host=host)
    assert make_publisher(sqlite_engine, node.placement).run_once() == 1
    assert len(node.children()) == 1


def test_run_that_takes_long_ends_and_is_continued(
    sqlite_engine: sa.Engine, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While reports make providers stale all the time, a run would otherwise never end."""
    report_devices(sqlite_engine, node, card(0), card(1))
    monkeypatch.setattr(publisher_module, "BATCH", 1)
    monkeypatch.setattr(publisher_module, "MAX_RUN", 0.0)
    publish = make_publisher(sqlite_engine, node.placement)
    assert [(publish.run_once(), publish.unfinished) for _ in range(3)] == [
        (1, True),
        (1, True),
        (0, False),
    ]
