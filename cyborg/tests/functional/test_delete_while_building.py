# SPDX-License-Identifier: Apache-2.0
"""A server is deleted while it builds, on a full provider: the next server boots.

The fake Nova uses HTTP, Placement is real, the conductor is complete except for agents.
"""

import logging
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.wiring import Conductor, build_conductor
from cyborg.core.errors import CyborgError, NoHandle
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.testing.fake_nova import FakeNova, serve_nova
from cyborg.tests.fixtures.databases import orphan_setup, rows
from cyborg.tests.fixtures.databases.interleave import Race
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.databases.publisher_setup import PublishedCard
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["node", "placement_adapter"]


class Cloud(PublishedCard):
    """One host with one card, Placement, a fake Nova, and conductors on one database."""

    def __init__(self, engine: sa.Engine, node: Node, nova: FakeNova, count: int = 1) -> None:
        super().__init__(engine, node, count)
        self.nova = nova
        self.conductor = self.make_conductor()

    def make_conductor(self, placement: Placement | None = None, **options: Any) -> Conductor:
        """Return one more conductor."""
        conf = make_conf(conductor=options)
        uow = UnitOfWork(self.engine)
        nova = Nova(self.nova.adapter(), 5.0)
        agents: Any = None
        return build_conductor(conf, uow, agents, placement or self.node.placement, nova)

    def schedule(self, project: str = "project-1") -> str:
        """Create a server with an allocation of one unit, as nova-api and the scheduler do."""
        instance = str(uuid4())
        self.nova.add_server(instance, None, "BUILD")
        self.allocate(instance, project)
        return instance

    def bind(self, instance: str, conductor: Conductor | None = None) -> str:
        """POST and PATCH, and DELETE if the PATCH fails, as nova-conductor does."""
        arqs = (conductor or self.conductor).arqs
        (arq,) = arqs.create("fpga", "project-1")["arqs"]
        try:
            arqs.bind([self.make_bind(arq["uuid"], instance)], None)
        except CyborgError:
            arqs.delete([arq["uuid"]], None, None, True)
            raise
        return str(arq["uuid"])

    def delete_while_building(self, instance: str) -> None:
        """Delete the server and its allocation and leave its ARQ, as Nova does."""
        del self.nova.servers[instance]
        self.node.deallocate(instance)

    def orphan(self, instance: str) -> str:
        """Insert a bound ARQ that has been suspected for a day; return its uuid."""
        long_ago = timeutils.utcnow() - timedelta(days=1)
        uuid = rows.insert_arq(
            self.engine,
            self.profile,
            state="Bound",
            hostname=self.node.name,
            device_rp_uuid=self.provider,
            instance_uuid=instance,
            instance_slot=0,
            updated_at=long_ago,
            orphan_since=long_ago,
        )
        (row,) = rows.read(self.engine, schema.arqs, uuid=uuid)
        free = rows.read(self.engine, schema.attach_handles, arq_id=None)
        rows.update(self.engine, schema.attach_handles, free[0]["id"], arq_id=row["id"])
        return uuid

    def prepared(self) -> None:
        """Mark the handles of the host as needing cleaning."""
        for row in rows.read(self.engine, schema.attach_handles):
            rows.update(self.engine, schema.attach_handles, row["id"], needs_cleaning=True)


@pytest.fixture
def nova() -> Iterator[FakeNova]:
    with serve_nova(FakeNova()) as fake:
        yield fake


@pytest.fixture
def cloud(engine: sa.Engine, node: Node, nova: FakeNova) -> Cloud:
    return Cloud(engine, node, nova)


@pytest.fixture
def sqlite_cloud(sqlite_engine: sa.Engine, node: Node, nova: FakeNova) -> Cloud:
    """Return a cloud on SQLite, for behaviour independent of the database."""
    return Cloud(sqlite_engine, node, nova)


def test_next_bind_succeeds_within_the_same_call(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    leaked = cloud.schedule()
    orphan = cloud.bind(leaked)
    cloud.delete_while_building(leaked)
    instance = cloud.schedule()
    request = cloud.bind(instance)
    assert cloud.list_bound() == {request: instance}
    # The orphan is deleted: its instance does not exist, and no other service would delete it.
    assert [row["uuid"] for row in rows.read(cloud.engine, schema.arqs)] == [request]
    counts = {
        row["kind"]: row["count"] for row in rows.read(cloud.engine, schema.self_heal_counters)
    }
    assert counts["orphans_released"] == 1
    assert texts_of(caplog.records, logging.WARNING) == [
        f"[provider={cloud.provider} arq={orphan} instance={leaked}] Orphaned ARQ was deleted: its "
        "instance no longer exists and has no allocation on the resource provider"
    ]


def test_handle_that_needs_cleaning_serves_the_first_retry(sqlite_cloud: Cloud) -> None:
    leaked = sqlite_cloud.schedule()
    sqlite_cloud.bind(leaked)
    sqlite_cloud.prepared()
    sqlite_cloud.delete_while_building(leaked)
    instance = sqlite_cloud.schedule()
    with pytest.raises(NoHandle, match="handle is being cleaned"):
        sqlite_cloud.bind(instance)
    (job,) = rows.read(sqlite_cloud.engine, schema.jobs)
    assert job["kind"] == "release"
    (handle,) = rows.read(sqlite_cloud.engine, schema.attach_handles)
    # Do what the completion of the job does; other tests cover it.
    rows.update(
        sqlite_cloud.engine, schema.attach_handles, handle["id"], needs_cleaning=False, job_id=None
    )
    assert sqlite_cloud.list_bound() == {}
    request = sqlite_cloud.bind(instance)
    assert sqlite_cloud.list_bound() == {request: instance}


def test_all_orphans_of_the_provider_are_released(
    sqlite_engine: sa.Engine, node: Node, nova: FakeNova
) -> None:
    cloud = Cloud(sqlite_engine, node, nova, count=4)
    servers = [cloud.schedule() for _ in range(4)]
    bound_arq = cloud.bind(servers[0])
    for server in servers[1:]:
        cloud.bind(server)
        cloud.delete_while_building(server)
    following = [cloud.schedule() for _ in range(3)]
    arqs_by_instance = {cloud.bind(one): one for one in following}
    assert cloud.list_bound() == {bound_arq: servers[0], **arqs_by_instance}
    # One query for all of them.
    assert len([path for path in nova.requested_paths if "all_tenants" in path]) == 1


@pytest.mark.parametrize(
    "case",
    ["allocated", "exists", "not admin", "nova away", "placement away", "no grace", "closed"],
)
def test_arq_of_possibly_existing_instance_is_never_released(
    sqlite_cloud: Cloud, case: str
) -> None:
    first = sqlite_cloud.schedule()
    bound_arq = sqlite_cloud.bind(first)
    conductor = sqlite_cloud.conductor
    if case == "allocated":
        second = str(uuid4())
    else:
        sqlite_cloud.node.deallocate(first)
        second = sqlite_cloud.schedule()
    if case != "exists":
        del sqlite_cloud.nova.servers[first]
    if case == "not admin":
        sqlite_cloud.nova.is_admin = False
    elif case == "nova away":
        sqlite_cloud.nova.status = 503
    elif case == "placement away":
        placement = orphan_setup.RecordingPlacement(sqlite_cloud.node.client)
        placement.unreachable = True
        conductor = sqlite_cloud.make_conductor(placement)
    elif case == "no grace":
        conductor = sqlite_cloud.make_conductor(orphan_grace=0.0)
    elif case == "closed":
        (device,) = rows.read(sqlite_cloud.engine, schema.devices)
        rows.update(sqlite_cloud.engine, schema.devices, device["id"], status="maintaining")
    with pytest.raises(NoHandle):
        sqlite_cloud.bind(second, conductor)
    assert sqlite_cloud.list_bound() == {bound_arq: first}
    assert bool(sqlite_cloud.nova.requested_paths) == (case in ("exists", "not admin", "nova away"))


@pytest.mark.parametrize("at", ["arqs.id DESC", "DELETE FROM arqs", "INTO self_heal_counters"])
def test_two_conductors_release_the_same_orphans(
    engine: sa.Engine, node: Node, nova: FakeNova, at: str
) -> None:
    cloud = Cloud(engine, node, nova, count=2)
    for leaked in [cloud.schedule(), cloud.schedule()]:
        cloud.bind(leaked)
        cloud.delete_while_building(leaked)
    first, second = cloud.schedule(), cloud.schedule()
    other = cloud.make_conductor()
    race = Race(engine, lambda: cloud.bind(first), at, lambda: cloud.bind(second, other))
    assert race.reached
    assert (race.first, race.second) == (None, None)
    assert sorted(cloud.list_bound().values()) == sorted([first, second])
    counts = {row["kind"]: row["count"] for row in rows.read(engine, schema.self_heal_counters)}
    assert counts["orphans_released"] == 2


def test_bind_after_concurrent_orphan_release_takes_a_free_handle(
    sqlite_engine: sa.Engine, node: Node, nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bind is rejected before the release, and finds no orphans after it."""
    cloud = Cloud(sqlite_engine, node, nova, count=2)
    for leaked in [cloud.schedule(), cloud.schedule()]:
        cloud.bind(leaked)
        cloud.delete_while_building(leaked)
    first, second = cloud.schedule(), cloud.schedule()
    other = cloud.make_conductor()
    check = other.arqs.binder.orphans
    assert check is not None
    release_at = check.release_at

    def release_late(providers: Sequence[str]) -> bool:
        cloud.bind(first)
        return release_at(providers)

    monkeypatch.setattr(check, "release_at", release_late)
    cloud.bind(second, other)
    assert sorted(cloud.list_bound().values()) == sorted([first, second])


def test_orphan_found_by_the_collector_is_deleted_with_its_instance(
    sqlite_engine: sa.Engine, node: Node, nova: FakeNova
) -> None:
    """Nova no longer has the server: no service would delete an Unbound ARQ."""
    sqlite_cloud = Cloud(sqlite_engine, node, nova, count=3)
    leaked, migrated, running = (str(uuid4()) for _ in range(3))
    sqlite_cloud.nova.add_server(migrated, "elsewhere")
    sqlite_cloud.nova.add_server(running, sqlite_cloud.node.name)
    orphans = {name: sqlite_cloud.orphan(name) for name in (leaked, migrated, running)}
    tally = sqlite_cloud.conductor.orphan_collector.run_once()
    assert tally is not None
    assert (tally.released, tally.in_use) == (2, 1)
    states = {row["uuid"]: row["state"] for row in rows.read(sqlite_cloud.engine, schema.arqs)}
    assert states == {orphans[migrated]: "Unbound", orphans[running]: "Bound"}
    assert sqlite_cloud.list_bound() == {orphans[running]: running}


@pytest.mark.parametrize("spent_on", ["a failed bind", "another orphan"])
def test_collector_keeps_orphan_whose_instance_was_not_queried(
    sqlite_engine: sa.Engine,
    node: Node,
    nova: FakeNova,
    monkeypatch: pytest.MonkeyPatch,
    spent_on: str,
) -> None:
    """The number of queries in a round is limited: the others wait for the next round."""
    monkeypatch.setattr("cyborg.conductor.orphans.collector.MAX_QUERIES", 1)
    sqlite_cloud = Cloud(sqlite_engine, node, nova, count=2)
    other, running = str(uuid4()), str(uuid4())
    for instance in (other, running):
        nova.add_server(instance, node.name)
    if spent_on == "another orphan":
        sqlite_cloud.orphan(other)
    else:
        long_ago = timeutils.utcnow() - timedelta(days=2)
        failed = {"state": "BindFailed", "hostname": node.name, "instance_uuid": other}
        rows.insert_arq(sqlite_engine, sqlite_cloud.profile, **failed, updated_at=long_ago)
    sqlite_cloud.orphan(running)
    before = sqlite_cloud.list_bound()
    tally = sqlite_cloud.conductor.orphan_collector.run_once()
    assert tally is not None
    assert (tally.released, tally.in_use) == (0, 1)
    assert sqlite_cloud.list_bound() == before


@pytest.mark.parametrize("trouble", ["away", "not admin"])
def test_orphan_of_an_unknown_instance_is_kept_unbound(sqlite_cloud: Cloud, trouble: str) -> None:
    request = sqlite_cloud.orphan(str(uuid4()))
    sqlite_cloud.nova.is_admin = trouble == "away"
    sqlite_cloud.nova.status = 503 if trouble == "away" else 200
    tally = sqlite_cloud.conductor.orphan_collector.run_once()
    assert tally is not None
    assert tally.released == 1
    (row,) = rows.read(sqlite_cloud.engine, schema.arqs)
    assert (row["uuid"], row["state"]) == (request, "Unbound")
