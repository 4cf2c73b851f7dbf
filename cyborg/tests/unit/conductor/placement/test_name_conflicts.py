# SPDX-License-Identifier: Apache-2.0
"""A provider of another client has the name of a provider of Cyborg."""

from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.core import naming
from cyborg.db import schema
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import (
    Clock,
    make_publisher,
    provider_row,
    provider_uuid,
    report_devices,
)
from cyborg.tests.fixtures.hosts.hosts import card

__all__ = ["node", "placement_adapter"]

FAKE = "CUSTOM_FAKE"


def create_conflicting_provider(node: Node, *, has_owner_trait: bool, below: bool = True) -> str:
    """Create a provider with the name of the card; return its uuid."""
    other = str(uuid4())
    name = naming.provider_name(node.name, "0000:00:00.0")
    generation = node.placement.create(other, name, node.uuid if below else None)
    node.placement.ensure_classes([FAKE])
    generation = node.placement.set_inventories(other, generation, {FAKE: {"total": 2}})
    if has_owner_trait:
        node.placement.set_traits(other, generation, [naming.OWNER_TRAIT])
    return other


def test_provider_of_earlier_installation_is_replaced(
    sqlite_engine: sa.Engine, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    other = create_conflicting_provider(node, has_owner_trait=True)
    report_devices(sqlite_engine, node, card())
    assert make_publisher(sqlite_engine, node.placement).run_once() == 1
    assert [child["uuid"] for child in node.children().values()] == [provider_uuid(node)]
    assert f"{other} had the same name" in caplog.text
    (counter,) = rows.read(sqlite_engine, schema.self_heal_counters)
    assert (counter["kind"], counter["count"]) == ("drift_repaired", 1)


def test_allocated_provider_of_earlier_installation_is_replaced_after_release(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    other = create_conflicting_provider(node, has_owner_trait=True)
    consumer = node.allocate(other, FAKE)
    report_devices(sqlite_engine, node, card())
    clock = Clock()
    publish = make_publisher(sqlite_engine, node.placement, clock)
    assert publish.run_once() == 0
    assert node.inventory(other)[FAKE]["reserved"] == 2
    assert other in provider_row(sqlite_engine)["error"]
    node.client.delete(f"/allocations/{consumer}")
    clock.now += timedelta(minutes=2)
    assert publish.run_once() == 1
    assert [child["uuid"] for child in node.children().values()] == [provider_uuid(node)]


@pytest.mark.parametrize(
    ("has_owner_trait", "below", "reason"),
    [
        (False, True, f"no trait {naming.OWNER_TRAIT}"),
        (True, False, "the parent none instead of"),
        (False, False, "the parent none instead of"),
    ],
)
def test_foreign_provider_with_same_name_is_reported_and_kept(
    sqlite_engine: sa.Engine, node: Node, has_owner_trait: bool, below: bool, reason: str
) -> None:
    other = create_conflicting_provider(node, has_owner_trait=has_owner_trait, below=below)
    before = node.placement.get(other)
    report_devices(sqlite_engine, node, card(), card(1))
    assert make_publisher(sqlite_engine, node.placement).run_once() == 1
    assert node.placement.get(other) == before
    first, second = rows.read(sqlite_engine, schema.providers)
    assert f"{other} has the name" in first["error"]
    assert reason in first["error"]
    assert "rename or delete it" in first["error"]
    assert second["error"] is None


def test_conflicting_name_of_renamed_provider_is_recovered(
    sqlite_engine: sa.Engine, node: Node
) -> None:
    host = report_devices(sqlite_engine, node, card())
    publish = make_publisher(sqlite_engine, node.placement)
    assert publish.run_once() == 1
    node.placement.rename(provider_uuid(node), f"{node.name}-aside", node.uuid)
    create_conflicting_provider(node, has_owner_trait=True)
    report_devices(sqlite_engine, node, card(0, 3), host=host)
    assert publish.run_once() == 1
    assert [child["uuid"] for child in node.children().values()] == [provider_uuid(node)]
    assert node.inventory(provider_uuid(node))[FAKE]["total"] == 3
