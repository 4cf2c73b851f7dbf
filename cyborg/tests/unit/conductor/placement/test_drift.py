# SPDX-License-Identifier: Apache-2.0
"""Changes of other clients to the providers of Cyborg in a real Placement."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.placement.publisher import Publisher
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db import schema
from cyborg.db.providers import write as store
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import (
    Clock,
    make_publisher,
    make_verifier,
    provider_row,
    provider_uuid,
    report_devices,
)
from cyborg.tests.fixtures.hosts.hosts import Host, card, make_hosts

__all__ = ["node", "placement_adapter"]

FAKE = "CUSTOM_FAKE"
OTHER = "CUSTOM_SOMEBODYS"


class Env:
    """A published card of four units, and the repairs counted in the database."""

    def __init__(self, engine: sa.Engine, node: Node) -> None:
        self.engine = engine
        self.node = node
        self.clock = Clock()
        self.uuid = provider_uuid(node)
        self.path = f"/resource_providers/{self.uuid}"
        self.publish: Publisher = make_publisher(engine, node.placement, self.clock)
        self.verifier = make_verifier(engine, node.placement, self.clock)
        self.host: Host = report_devices(engine, node, card(0, 4))
        assert self.publish.run_once() == 1
        self.before = self.provider_state()

    def provider_state(self) -> tuple[Any, ...]:
        """Return the provider in Placement without its generation."""
        children = {
            name: (child["uuid"], child["parent_provider_uuid"])
            for name, child in self.node.children().items()
        }
        return children, self.node.inventory(self.uuid), self.node.placement.traits(self.uuid)

    def verify(self) -> int:
        """Verify the provider as after ``placement_verify_interval``; repair a difference."""
        self.clock.now += timedelta(minutes=10)
        self.verifier.run_once()
        return self.publish.run_once()

    def repair_count(self) -> int:
        """Return the number of counted repairs."""
        return sum(
            r["count"]
            for r in rows.read(
                self.engine, schema.self_heal_counters, kind=CorrectiveAction.DRIFT_REPAIRED
            )
        )

    def put(self, path: str, **body: Any) -> None:
        """Write to the provider as another client, with the current generation."""
        summary = self.node.placement.get(self.uuid)
        assert summary is not None
        generation = {"resource_provider_generation": summary.generation}
        answer = self.node.client.put(f"{self.path}{path}", json=generation | body)
        assert answer.status_code == 200, answer.text

    def inventory(self, **fields: Any) -> dict[str, Any]:
        """Return the current inventories with some fields changed."""
        inventory: Mapping[str, Any] = self.node.inventory(self.uuid)[FAKE]
        return {FAKE: {**inventory, **fields}}


@pytest.fixture
def env(sqlite_engine: sa.Engine, node: Node) -> Env:
    return Env(sqlite_engine, node)


@pytest.fixture
def any_env(engine: sa.Engine, node: Node) -> Env:
    return Env(engine, node)


def delete(env: Env) -> None:
    assert env.node.client.delete(env.path).status_code == 204


def change(**fields: Any) -> Callable[[Env], None]:
    return lambda env: env.put("/inventories", inventories=env.inventory(**fields))


def drop_inventory(env: Env) -> None:
    assert env.node.client.delete(f"{env.path}/inventories").status_code == 204


def replace_class(env: Env) -> None:
    env.node.placement.ensure_classes([OTHER])
    env.put("/inventories", inventories={OTHER: {"total": 9}})


def drop_trait(env: Env) -> None:
    env.put("/traits", traits=["CUSTOM_FAKE_DEVICE"])


def add_trait(env: Env) -> None:
    env.node.placement.ensure_traits([OTHER])
    env.put("/traits", traits=["CUSTOM_FAKE_DEVICE", "OWNER_CYBORG", OTHER])


def rename(env: Env) -> None:
    env.node.placement.rename(env.uuid, f"{env.node.name}-other", env.node.uuid)


def move_below_another(env: Env) -> None:
    other = Node(env.node.client)
    (name,) = env.node.children()
    env.node.placement.rename(env.uuid, name, other.uuid)


def move_out(env: Env) -> None:
    (name,) = env.node.children()
    env.node.placement.rename(env.uuid, name, None)


@pytest.mark.parametrize(
    ("change_provider", "description"),
    [
        (delete, "it was missing"),
        (change(total=5), f"{FAKE} had total 5, not 4"),
        (change(reserved=4), f"{FAKE} had reserved 4, not 0"),
        (change(allocation_ratio=16.0), f"{FAKE} had allocation_ratio 16, not 1"),
        (change(max_unit=1), f"{FAKE} had max_unit 1, not 4"),
        (drop_inventory, f"inventory of {FAKE} was missing"),
        (replace_class, f"inventory of {OTHER} was unexpected"),
        (drop_trait, "traits were missing: OWNER_CYBORG"),
        (add_trait, f"traits were unexpected: {OTHER}"),
        (rename, "its name was"),
        (move_below_another, "its parent was"),
        (move_out, "its parent was None"),
    ],
)
def test_drift_is_repaired_logged_and_counted(
    env: Env,
    change_provider: Callable[[Env], None],
    description: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    change_provider(env)
    assert env.provider_state() != env.before
    with caplog.at_level(logging.WARNING, "cyborg.conductor.placement.publisher"):
        assert env.verify() == 1
    assert env.provider_state() == env.before
    assert description in caplog.text
    assert provider_row(env.engine)["name"] in caplog.text
    assert env.repair_count() == 1
    assert env.verify() == 0
    assert env.repair_count() == 1
    row = provider_row(env.engine)
    assert (row["stale_since"], row["verify_only"], row["error"]) == (None, False, None)


def test_agent_restart_verifies_providers(any_env: Env) -> None:
    delete(any_env)
    any_env.host.epoch = str(uuid4())
    any_env.host.generation = 0
    any_env.host.hello(make_hosts(any_env.engine))
    assert any_env.publish.run_once() == 1
    assert (any_env.provider_state(), any_env.repair_count()) == (any_env.before, 1)


def test_own_changes_are_not_reported_as_drift(
    any_env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    """A change during a scheduled verification is no drift, in either order."""
    for count in (5, 6):
        if count == 5:
            with any_env.engine.begin() as tx:
                store.schedule_verification_of_hosts(tx, [any_env.node.name], any_env.clock.now)
        report_devices(any_env.engine, any_env.node, card(0, count), host=any_env.host)
        if count == 6:
            with any_env.engine.begin() as tx:
                store.schedule_verification_of_hosts(tx, [any_env.node.name], any_env.clock.now)
        assert any_env.publish.run_once() == 1
        assert any_env.node.inventory(any_env.uuid)[FAKE]["total"] == count
    assert any_env.repair_count() == 0
    assert "Repaired drift" not in caplog.text


def test_scheduled_verification_keeps_published_revision(any_env: Env) -> None:
    revision = provider_row(any_env.engine)["revision"]
    with any_env.engine.begin() as tx:
        assert store.schedule_verification_of_hosts(tx, [any_env.node.name], any_env.clock.now) == 1
    row = provider_row(any_env.engine)
    assert (row["verify_only"], row["revision"], row["published_revision"]) == (
        True,
        revision,
        revision,
    )


def test_allocated_foreign_inventory_is_reserved_until_released(env: Env) -> None:
    """Another client adds and allocates inventory that the device does not have."""
    env.node.placement.ensure_classes([OTHER])
    env.put("/inventories", inventories=env.inventory() | {OTHER: {"total": 9}})
    consumer = env.node.allocate(env.uuid, OTHER)
    assert env.verify() == 0
    inventories = env.node.inventory(env.uuid)
    assert (inventories[OTHER]["reserved"], inventories[FAKE]["reserved"]) == (9, 1)
    assert OTHER in (provider_row(env.engine)["error"] or "")
    assert env.node.client.delete(f"/allocations/{consumer}").status_code == 204
    env.clock.now += timedelta(minutes=2)
    assert env.publish.run_once() == 1
    assert (env.provider_state(), env.repair_count()) == (env.before, 1)


def test_changed_resource_class_with_allocation_is_reserved(env: Env) -> None:
    consumer = env.node.allocate(env.uuid, FAKE)
    part = card(0, 4).deployables[0]
    other = replace(part, resource_class=OTHER)
    report_devices(env.engine, env.node, card(0, deployables=(other,)), host=env.host)
    assert env.publish.run_once() == 0
    inventories = env.node.inventory(env.uuid)
    assert (inventories[FAKE]["reserved"], inventories[OTHER]["reserved"]) == (4, 1)
    assert env.node.client.delete(f"/allocations/{consumer}").status_code == 204
    env.clock.now += timedelta(minutes=2)
    assert env.publish.run_once() == 1
    assert set(env.node.inventory(env.uuid)) == {OTHER}
    assert env.repair_count() == 0


def test_removed_provider_with_new_allocations_stays_reserved(env: Env) -> None:
    """Reserved and kept while there are allocations, deleted after the last is released."""
    report_devices(env.engine, env.node, host=env.host)
    consumers = [env.node.allocate(env.uuid, FAKE) for _ in range(2)]
    assert env.publish.run_once() == 0
    assert env.node.inventory(env.uuid)[FAKE]["reserved"] == 4
    assert "still has allocations; reserved in full" in provider_row(env.engine)["error"]
    # Another client removes the reservation and allocates one more unit.
    env.put("/inventories", inventories=env.inventory(reserved=0))
    consumers.append(env.node.allocate(env.uuid, FAKE))
    env.clock.now += timedelta(minutes=2)
    assert env.publish.run_once() == 0
    assert env.node.inventory(env.uuid)[FAKE]["reserved"] == 4
    for consumer in consumers:
        assert env.node.client.delete(f"/allocations/{consumer}").status_code == 204
        env.clock.now += timedelta(minutes=2)
        env.publish.run_once()
    assert not env.node.children()
    assert not rows.read(env.engine, schema.providers)
