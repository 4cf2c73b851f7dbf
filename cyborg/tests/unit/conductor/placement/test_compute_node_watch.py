# SPDX-License-Identifier: Apache-2.0
"""Compute nodes that Nova deletes and recreates, in a real Placement."""

from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.conductor.placement.compute_nodes import ComputeNodeWatch
from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import publisher_setup, rows
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import Clock, RecordingPlacement
from cyborg.tests.fixtures.databases.services import build
from cyborg.tests.fixtures.hosts.host_time import host_clock_off
from cyborg.tests.fixtures.hosts.hosts import card
from cyborg.tests.fixtures.machine.tiers import sample

__all__ = ["node", "placement_adapter"]


class Env:
    """A host with two published cards, another host, and a watch that has run once."""

    def __init__(self, engine: sa.Engine, node: Node) -> None:
        self.engine, self.node = engine, node
        self.clock = Clock()
        self.other = Node(node.client)
        self.placement = RecordingPlacement(node.client)
        for compute_node, devices in ((node, (card(0), card(1))), (self.other, (card(0),))):
            self.set_traits(compute_node)
            publisher_setup.report_devices(engine, compute_node, *devices)
        self.publisher = publisher_setup.make_publisher(engine, node.placement, self.clock)
        assert self.publisher.run_once() == 3
        self.woken = 0
        self.watch = build(
            ComputeNodeWatch, UnitOfWork(engine), self.placement, self.wake, now=self.clock
        )
        assert self.watch.run_once() == 0

    def wake(self) -> None:
        self.woken += 1

    def set_traits(self, node: Node, *traits: str) -> None:
        """Set the trait of a compute node provider as nova-compute does."""
        summary = node.placement.get(node.uuid)
        assert summary is not None
        node.placement.set_traits(node.uuid, summary.generation, ["COMPUTE_NODE", *traits])

    def delete_compute_service(self) -> None:
        """Delete the compute node with all providers below it, as Nova does."""
        for child in self.node.children().values():
            self.node.placement.delete(child["uuid"])
        self.node.placement.delete(self.node.uuid)

    def start_nova_compute(self) -> None:
        """Recreate the compute node provider, as nova-compute does."""
        self.node.create()
        self.set_traits(self.node)

    def stale(self) -> list[str]:
        """Return the hosts of the providers to be published or verified."""
        return [r["host"] for r in rows.read(self.engine, schema.providers) if r["stale_since"]]


@pytest.fixture
def env(engine: sa.Engine, node: Node) -> Env:
    return Env(engine, node)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine, node: Node) -> Env:
    return Env(sqlite_engine, node)


@pytest.mark.parametrize("new_uuid", sample([False, True], True))
def test_recreated_compute_node_gets_its_providers_in_next_run(env: Env, new_uuid: bool) -> None:
    before = env.node.children()
    env.delete_compute_service()
    assert env.watch.run_once() == 1
    assert env.stale() == [env.node.name] * 2
    assert env.publisher.run_once() == 0
    if new_uuid:
        env.node.uuid = str(uuid4())
    env.start_nova_compute()
    # The verification also ends a retry delay of the publisher.
    assert env.publisher.run_once() == 0
    assert env.watch.run_once() == 1
    assert env.publisher.run_once() == 2
    after = env.node.children()
    assert {name: child["uuid"] for name, child in after.items()} == {
        name: child["uuid"] for name, child in before.items()
    }
    assert env.woken == 2
    assert (env.watch.run_once(), env.stale()) == (0, [])


def test_compute_node_recreated_between_two_runs_is_detected(sqlite_env: Env) -> None:
    sqlite_env.set_traits(
        sqlite_env.node, "COMPUTE_STATUS_DISABLED"
    )  # a write raises the generation
    assert sqlite_env.watch.run_once() == 0
    sqlite_env.delete_compute_service()
    sqlite_env.start_nova_compute()
    assert sqlite_env.watch.run_once() == 1
    assert sqlite_env.publisher.run_once() == 2
    assert len(sqlite_env.node.children()) == 2


def test_missing_compute_node_verifies_all_providers_of_the_host(sqlite_env: Env) -> None:
    """One provider is due; the other providers of the host are missing, too."""
    sqlite_env.delete_compute_service()
    first = publisher_setup.provider_uuid(sqlite_env.node)
    (row,) = rows.read(sqlite_env.engine, schema.providers, uuid=first)
    rows.update(
        sqlite_env.engine,
        schema.providers,
        row["id"],
        revision=row["revision"] + 1,
        stale_since=sqlite_env.clock.now,
    )
    assert sqlite_env.publisher.run_once() == 0
    assert sqlite_env.stale() == [sqlite_env.node.name] * 2


def test_watch_writes_time_of_the_database(env: Env) -> None:
    env.delete_compute_service()
    uow = UnitOfWork(env.engine)
    with host_clock_off(3600.0):
        watch = ComputeNodeWatch(uow, env.placement, env.wake)
        assert watch.run_once() == 0
        env.start_nova_compute()
        assert watch.run_once() == 1
    timestamps = [row["stale_since"] for row in rows.read(env.engine, schema.providers)]
    assert all(timestamp is None or timestamp <= uow.clock() for timestamp in timestamps)


def test_run_without_change_is_one_call_and_no_statement(sqlite_env: Env) -> None:
    sqlite_env.placement.take()
    with sqlite_env.engine.connect() as reader:
        before = reader.scalar(sa.text("SELECT total_changes()"))
        assert sqlite_env.watch.run_once() == 0
        assert reader.scalar(sa.text("SELECT total_changes()")) == before
    assert sqlite_env.placement.take() == ["GET /resource_providers?required=COMPUTE_NODE"]


def test_placement_outage_loses_no_change(sqlite_env: Env) -> None:
    sqlite_env.delete_compute_service()
    sqlite_env.placement.unreachable = True
    with pytest.raises(Unavailable):
        sqlite_env.watch.run_once()
    sqlite_env.placement.unreachable = False
    assert sqlite_env.watch.run_once() == 1
