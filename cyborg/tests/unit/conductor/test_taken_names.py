# SPDX-License-Identifier: Apache-2.0
"""A provider that somebody else made bears the name of one of ours."""

from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.core import names
from cyborg.db import schema
from cyborg.fixtures import rows
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.hosts import card
from cyborg.fixtures.publishing import Clock, provider, publisher, tell, uuid

__all__ = ["node", "placement_adapter"]

FAKE = "CUSTOM_FAKE"


def squat(node: Node, *, ours: bool, below: bool = True) -> str:
    """Make a provider of our card's name; return its uuid."""
    other = str(uuid4())
    name = names.provider_name(node.name, "0000:00:00.0")
    generation = node.placement.create(other, name, node.uuid if below else None)
    node.placement.ensure_classes([FAKE])
    generation = node.placement.set_inventories(other, generation, {FAKE: {"total": 2}})
    if ours:
        node.placement.set_traits(other, generation, [names.OWNER_TRAIT])
    return other


def test_one_of_an_earlier_installation_makes_room(
    sqlite_engine: sa.Engine, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    other = squat(node, ours=True)
    tell(sqlite_engine, node, card())
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    assert [child["uuid"] for child in node.children().values()] == [uuid(node)]
    assert f"{other} had its name" in caplog.text
    (deed,) = rows.read(sqlite_engine, schema.deeds)
    assert (deed["kind"], deed["count"]) == ("drift_repaired", 1)


def test_not_while_it_is_allocated(sqlite_engine: sa.Engine, node: Node) -> None:
    other = squat(node, ours=True)
    consumer = node.allocate(other, FAKE)
    tell(sqlite_engine, node, card())
    clock = Clock()
    publish = publisher(sqlite_engine, node.placement, clock)
    assert publish.run_once() == 0
    assert node.inventory(other)[FAKE]["reserved"] == 2
    assert other in provider(sqlite_engine)["error"]
    node.client.delete(f"/allocations/{consumer}")
    clock.now += timedelta(minutes=2)
    assert publish.run_once() == 1
    assert [child["uuid"] for child in node.children().values()] == [uuid(node)]


@pytest.mark.parametrize(("ours", "below"), [(False, True), (True, False), (False, False)])
def test_anybody_elses_is_left_and_told(
    sqlite_engine: sa.Engine, node: Node, ours: bool, below: bool
) -> None:
    other = squat(node, ours=ours, below=below)
    before = node.placement.get(other)
    tell(sqlite_engine, node, card(), card(1))
    assert publisher(sqlite_engine, node.placement).run_once() == 1
    assert node.placement.get(other) == before
    first, second = rows.read(sqlite_engine, schema.providers)
    assert f"{other} has the name" in first["error"]
    assert "rename or delete it" in first["error"]
    assert second["error"] is None


def test_the_name_is_taken_while_ours_has_another(sqlite_engine: sa.Engine, node: Node) -> None:
    host = tell(sqlite_engine, node, card())
    publish = publisher(sqlite_engine, node.placement)
    assert publish.run_once() == 1
    node.placement.rename(uuid(node), f"{node.name}-aside", node.uuid)
    squat(node, ours=True)
    tell(sqlite_engine, node, card(0, 3), host=host)
    assert publish.run_once() == 1
    assert [child["uuid"] for child in node.children().values()] == [uuid(node)]
    assert node.inventory(uuid(node))[FAKE]["total"] == 3
