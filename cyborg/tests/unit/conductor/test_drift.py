# SPDX-License-Identifier: Apache-2.0
"""What somebody else does to our providers in a real Placement, one thing at a time."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.publisher import Publisher
from cyborg.core.deed import Deed
from cyborg.db import schema
from cyborg.db.store import providers as store
from cyborg.fixtures import rows
from cyborg.fixtures.embedded import Node, node, placement_adapter
from cyborg.fixtures.hosts import Host, card, rooms
from cyborg.fixtures.publishing import Clock, provider, publisher, tell, uuid

__all__ = ["node", "placement_adapter"]

FAKE = "CUSTOM_FAKE"
OTHER = "CUSTOM_SOMEBODYS"


class Bed:
    """A published card of four units, and what the database says of the repairs."""

    def __init__(self, engine: sa.Engine, node: Node) -> None:
        self.engine = engine
        self.node = node
        self.clock = Clock()
        self.uuid = uuid(node)
        self.path = f"/resource_providers/{self.uuid}"
        self.publish: Publisher = publisher(engine, node.placement, self.clock)
        self.host: Host = tell(engine, node, card(0, 4))
        assert self.publish.run_once() == 1
        self.before = self.look()

    def look(self) -> tuple[Any, ...]:
        """Return all that Placement has of the provider, but for its generation."""
        children = {
            name: (child["uuid"], child["parent_provider_uuid"])
            for name, child in self.node.children().items()
        }
        return children, self.node.inventory(self.uuid), self.node.placement.traits(self.uuid)

    def audit(self) -> int:
        """Let the time of an audit pass."""
        later = self.clock.now + timedelta(minutes=10)
        with self.engine.begin() as tx:
            store.mark_old(tx, later, self.clock.now, 10)
        return self.publish.run_once()

    def repaired(self) -> int:
        """Return how many repairs were counted."""
        return sum(
            r["count"] for r in rows.read(self.engine, schema.deeds, kind=Deed.DRIFT_REPAIRED)
        )

    def put(self, path: str, **body: Any) -> None:
        """Write to the provider as somebody else, with the generation of this moment."""
        known = self.node.placement.get(self.uuid)
        assert known is not None
        guard = {"resource_provider_generation": known.generation}
        answer = self.node.client.put(f"{self.path}{path}", json=guard | body)
        assert answer.status_code == 200, answer.text

    def inventory(self, **fields: Any) -> dict[str, Any]:
        """Return the inventories as they are, with some fields of ours changed."""
        mine: Mapping[str, Any] = self.node.inventory(self.uuid)[FAKE]
        return {FAKE: {**mine, **fields}}


@pytest.fixture
def bed(sqlite_engine: sa.Engine, node: Node) -> Bed:
    return Bed(sqlite_engine, node)


@pytest.fixture
def any_bed(engine: sa.Engine, node: Node) -> Bed:
    return Bed(engine, node)


def delete(bed: Bed) -> None:
    assert bed.node.client.delete(bed.path).status_code == 204


def change(**fields: Any) -> Callable[[Bed], None]:
    return lambda bed: bed.put("/inventories", inventories=bed.inventory(**fields))


def drop_inventory(bed: Bed) -> None:
    assert bed.node.client.delete(f"{bed.path}/inventories").status_code == 204


def replace_class(bed: Bed) -> None:
    bed.node.placement.ensure_classes([OTHER])
    bed.put("/inventories", inventories={OTHER: {"total": 9}})


def drop_trait(bed: Bed) -> None:
    bed.put("/traits", traits=["CUSTOM_FAKE_DEVICE"])


def add_trait(bed: Bed) -> None:
    bed.node.placement.ensure_traits([OTHER])
    bed.put("/traits", traits=["CUSTOM_FAKE_DEVICE", "OWNER_CYBORG", OTHER])


def rename(bed: Bed) -> None:
    bed.node.placement.rename(bed.uuid, f"{bed.node.name}-other", bed.node.uuid)


def move_below_another(bed: Bed) -> None:
    other = Node(bed.node.client)
    (name,) = bed.node.children()
    bed.node.placement.rename(bed.uuid, name, other.uuid)


def move_out(bed: Bed) -> None:
    (name,) = bed.node.children()
    bed.node.placement.rename(bed.uuid, name, None)


@pytest.mark.parametrize(
    ("disturb", "told"),
    [
        (delete, "it was missing"),
        (change(total=5), f"{FAKE} had total 5, not 4"),
        (change(reserved=4), f"{FAKE} had reserved 4, not 0"),
        (change(allocation_ratio=16.0), f"{FAKE} had allocation_ratio 16, not 1"),
        (change(max_unit=1), f"{FAKE} had max_unit 1, not 4"),
        (drop_inventory, f"inventory of {FAKE} was missing"),
        (replace_class, f"inventory of {OTHER} was not ours"),
        (drop_trait, "traits were missing: OWNER_CYBORG"),
        (add_trait, f"traits were not ours: {OTHER}"),
        (rename, "its name was"),
        (move_below_another, "its parent was"),
        (move_out, "its parent was None"),
    ],
)
def test_it_is_repaired_said_and_counted(
    bed: Bed, disturb: Callable[[Bed], None], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    disturb(bed)
    assert bed.look() != bed.before
    with caplog.at_level(logging.WARNING, "cyborg.conductor.publisher"):
        assert bed.audit() == 1
    assert bed.look() == bed.before
    assert told in caplog.text
    assert provider(bed.engine)["name"] in caplog.text
    assert bed.repaired() == 1
    assert bed.audit() == 1
    assert bed.repaired() == 1
    row = provider(bed.engine)
    assert (row["stale_since"], row["audited"], row["error"]) == (None, False, None)


def test_a_new_life_of_the_agent_compares_too(any_bed: Bed) -> None:
    delete(any_bed)
    any_bed.host.epoch = str(uuid4())
    any_bed.host.generation = 0
    any_bed.host.hello(rooms(any_bed.engine))
    assert any_bed.publish.run_once() == 1
    assert (any_bed.look(), any_bed.repaired()) == (any_bed.before, 1)


def test_what_changed_here_is_nobody_elses_doing(
    any_bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    """An audit that meets a change is none; nor is a change that meets an audit."""
    for count in (5, 6):
        if count == 5:
            with any_bed.engine.begin() as tx:
                store.audit_host(tx, any_bed.node.name, any_bed.clock.now)
        tell(any_bed.engine, any_bed.node, card(0, count), host=any_bed.host)
        if count == 6:
            with any_bed.engine.begin() as tx:
                store.audit_host(tx, any_bed.node.name, any_bed.clock.now)
        assert any_bed.publish.run_once() == 1
        assert any_bed.node.inventory(any_bed.uuid)[FAKE]["total"] == count
    assert any_bed.repaired() == 0
    assert "somebody else" not in caplog.text


def test_an_audit_leaves_published_what_is_in_sync(any_bed: Bed) -> None:
    revision = provider(any_bed.engine)["revision"]
    with any_bed.engine.begin() as tx:
        assert store.audit_host(tx, any_bed.node.name, any_bed.clock.now) == 1
    row = provider(any_bed.engine)
    assert (row["audited"], row["revision"], row["published"]) == (True, revision, revision)


def test_a_class_that_is_allocated_is_closed_until_it_is_free(bed: Bed) -> None:
    """Somebody offers, and sells, what the device does not have."""
    bed.node.placement.ensure_classes([OTHER])
    bed.put("/inventories", inventories=bed.inventory() | {OTHER: {"total": 9}})
    consumer = bed.node.allocate(bed.uuid, OTHER)
    assert bed.audit() == 0
    kept = bed.node.inventory(bed.uuid)
    assert (kept[OTHER]["reserved"], kept[FAKE]["reserved"]) == (9, 1)
    assert OTHER in (provider(bed.engine)["error"] or "")
    assert bed.node.client.delete(f"/allocations/{consumer}").status_code == 204
    bed.clock.now += timedelta(minutes=2)
    assert bed.publish.run_once() == 1
    assert (bed.look(), bed.repaired()) == (bed.before, 1)


def test_our_own_class_that_changes_under_an_allocation(bed: Bed) -> None:
    consumer = bed.node.allocate(bed.uuid, FAKE)
    part = card(0, 4).deployables[0]
    other = replace(part, resource_class=OTHER)
    tell(bed.engine, bed.node, card(0, deployables=(other,)), host=bed.host)
    assert bed.publish.run_once() == 0
    kept = bed.node.inventory(bed.uuid)
    assert (kept[FAKE]["reserved"], kept[OTHER]["reserved"]) == (4, 1)
    assert bed.node.client.delete(f"/allocations/{consumer}").status_code == 204
    bed.clock.now += timedelta(minutes=2)
    assert bed.publish.run_once() == 1
    assert set(bed.node.inventory(bed.uuid)) == {OTHER}
    assert bed.repaired() == 0


def test_allocations_added_to_a_provider_whose_device_is_gone(bed: Bed) -> None:
    """Closed and kept, whatever is allocated of it and how often, and deleted when all are gone."""
    tell(bed.engine, bed.node, host=bed.host)
    consumers = [bed.node.allocate(bed.uuid, FAKE) for _ in range(2)]
    assert bed.publish.run_once() == 0
    assert bed.node.inventory(bed.uuid)[FAKE]["reserved"] == 4
    assert "has allocations: closed" in provider(bed.engine)["error"]
    # Somebody opens it again and sells one more.
    bed.put("/inventories", inventories=bed.inventory(reserved=0))
    consumers.append(bed.node.allocate(bed.uuid, FAKE))
    bed.clock.now += timedelta(minutes=2)
    assert bed.publish.run_once() == 0
    assert bed.node.inventory(bed.uuid)[FAKE]["reserved"] == 4
    for consumer in consumers:
        assert bed.node.client.delete(f"/allocations/{consumer}").status_code == 204
        bed.clock.now += timedelta(minutes=2)
        bed.publish.run_once()
    assert not bed.node.children()
    assert not rows.read(bed.engine, schema.providers)
