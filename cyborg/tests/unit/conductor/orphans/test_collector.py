# SPDX-License-Identifier: Apache-2.0
"""Rounds of the orphan collector, with a real Placement and each kind of database."""

import logging
from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa

from cyborg.clients.nova import Nova
from cyborg.conductor.binding.binder import (
    INCOMPLETE_CONSUMER_PROJECT,
    InstanceAllocations,
    OwnerResolver,
)
from cyborg.conductor.orphans import collector as module
from cyborg.conductor.orphans import release
from cyborg.conductor.orphans.collector import OrphanCollector, RoundStats
from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.testing.fake_nova import FakeNova
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.orphan_setup import GRACE, INTERVAL, START, Env
from cyborg.tests.fixtures.databases.placement import Node, node, placement_adapter
from cyborg.tests.fixtures.machine.log_lines import texts_of
from cyborg.tests.fixtures.machine.options import make_conf

__all__ = ["node", "placement_adapter"]


@pytest.fixture
def env(engine: sa.Engine, node: Node) -> Env:
    return Env(engine, node)


@pytest.fixture
def sqlite_env(sqlite_engine: sa.Engine, node: Node) -> Env:
    """An env on SQLite, for behaviour that is the same on all databases."""
    return Env(sqlite_engine, node)


def test_orphan_is_suspected_and_released_after_grace_period(
    env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    card = env.add_card()
    bound_arq, orphan = env.add_bound_arq(card), env.add_bound_arq(card)
    env.run_after()
    assert env.row(orphan)["orphan_since"] is None
    env.deallocate(orphan)
    env.run_after()
    suspected = env.row(orphan)
    assert (suspected["state"], suspected["orphan_since"]) == ("Bound", env.now)
    assert suspected["updated_at"] == START - timedelta(days=1)
    env.run_after(GRACE - 1)
    assert env.row(orphan)["state"] == "Bound"
    env.run_after(INTERVAL)
    assert texts_of(caplog.records, logging.WARNING) == [
        f"[provider={card.provider} arq={orphan} instance={suspected['instance_uuid']}] Orphaned "
        "ARQ was unbound: its instance has had no allocation on the resource provider since "
        f"{suspected['orphan_since']}"
    ]
    freed = env.row(orphan)
    assert (freed["state"], freed["instance_uuid"], freed["device_rp_uuid"]) == (
        "Unbound",
        None,
        None,
    )
    assert freed["orphan_since"] is None
    assert env.handles(orphan) == []
    assert (env.row(bound_arq)["state"], len(env.handles(bound_arq))) == ("Bound", 1)
    counts = env.self_heal_counts()
    assert (counts["orphans_suspected"], counts["orphans_released"], counts["orphan_scans"]) == (
        1,
        1,
        4,
    )


def test_restored_allocation_clears_suspicion(env: Env) -> None:
    orphan = env.add_bound_arq(env.add_card(), allocated=False)
    env.run_after()
    assert env.row(orphan)["orphan_since"] == env.now
    env.allocate(orphan)
    assert env.run_after().cleared == 1
    assert env.row(orphan)["orphan_since"] is None
    env.deallocate(orphan)
    env.run_after(GRACE)
    # A new suspicion starts a new grace period.
    assert (env.row(orphan)["state"], env.row(orphan)["orphan_since"]) == ("Bound", env.now)


def test_bind_is_suspected_in_next_round(sqlite_env: Env) -> None:
    """The grace period starts with that round, not later."""
    orphan = sqlite_env.add_bound_arq(sqlite_env.add_card(), allocated=False, updated_at=START)
    sqlite_env.run_after()
    assert sqlite_env.row(orphan)["orphan_since"] == sqlite_env.now
    sqlite_env.run_after(GRACE)
    assert sqlite_env.row(orphan)["state"] == "Unbound"
    assert sqlite_env.now - START <= timedelta(seconds=GRACE + 2 * INTERVAL)


def test_arq_bound_after_query_is_not_suspected(sqlite_env: Env) -> None:
    orphan = sqlite_env.add_bound_arq(
        sqlite_env.add_card(), allocated=False, updated_at=START + timedelta(seconds=301)
    )
    sqlite_env.run_after()
    assert sqlite_env.row(orphan)["orphan_since"] is None


def test_unknown_allocations_change_nothing(sqlite_env: Env) -> None:
    """If Placement is unavailable or lacks the provider, nothing is suspected or released."""
    card = sqlite_env.add_card()
    orphan = sqlite_env.add_bound_arq(card, allocated=False, orphan_since=START - timedelta(days=1))
    unknown = rows.insert_card(sqlite_env.engine, sqlite_env.node.name, "0000:77:00.0")
    hidden = sqlite_env.add_bound_arq(
        unknown, allocated=False, orphan_since=START - timedelta(days=1)
    )
    sqlite_env.placement.unreachable = True
    with pytest.raises(Unavailable):
        sqlite_env.run_after()
    assert {sqlite_env.row(uuid)["state"] for uuid in (orphan, hidden)} == {"Bound"}
    sqlite_env.placement.unreachable = False
    assert sqlite_env.run_after().released == 1
    assert (sqlite_env.row(orphan)["state"], sqlite_env.row(hidden)["state"]) == (
        "Unbound",
        "Bound",
    )


def test_each_provider_is_queried_once_for_any_page_size(
    sqlite_env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", 2)
    cards = [sqlite_env.add_card(n, handles=5) for n in range(3)]
    bound_arqs = [sqlite_env.add_bound_arq(card) for card in cards for _ in range(5)]
    stats = sqlite_env.run_after()
    assert stats.checked == len(bound_arqs)
    assert sorted(sqlite_env.placement.queries) == sorted(card.provider for card in cards)
    assert (stats.suspected, stats.released) == (0, 0)
    for uuid in bound_arqs[::2]:
        sqlite_env.deallocate(uuid)
    assert sqlite_env.run_after().suspected == len(bound_arqs[::2])
    assert sqlite_env.run_after(GRACE).released == len(bound_arqs[::2])
    assert {sqlite_env.row(uuid)["state"] for uuid in bound_arqs[::2]} == {"Unbound"}
    assert {sqlite_env.row(uuid)["state"] for uuid in bound_arqs[1::2]} == {"Bound"}


def test_round_without_findings_executes_four_statements(sqlite_env: Env) -> None:
    card = sqlite_env.add_card(handles=12)
    for _ in range(12):
        sqlite_env.add_bound_arq(card)
    sqlite_env.run_after()
    with count_statements(sqlite_env.engine) as counted:
        sqlite_env.run_after()
    assert len(counted) == 4, counted.statements  # the turn, two for expiry, one page


@pytest.mark.parametrize("change", ["allocated", "unbound", "rebound"])
def test_change_just_before_release_prevents_it(env: Env, change: str) -> None:
    """The second query is the last moment for a concurrent change."""
    card = env.add_card()
    orphan = env.add_bound_arq(card, allocated=False, orphan_since=START - timedelta(days=1))
    id_ = env.row(orphan)["id"]

    def change_concurrently() -> None:
        if len(env.placement.queries) < 2:
            return
        env.placement.before_answer = lambda: None
        if change == "allocated":
            env.allocate(orphan)
        elif change == "unbound":
            rows.update(env.engine, schema.arqs, id_, state="Unbound", orphan_since=None)
        else:
            rows.update(
                env.engine,
                schema.arqs,
                id_,
                instance_uuid=str(uuid4()),
                orphan_since=None,
            )

    env.placement.before_answer = change_concurrently
    assert env.run_after().released == 0
    assert len(env.placement.queries) == 2
    assert env.row(orphan)["state"] == ("Unbound" if change == "unbound" else "Bound")
    assert len(env.handles(orphan)) == 1
    assert "orphans_released" not in env.self_heal_counts()


def test_round_runs_in_one_conductor_only(env: Env) -> None:
    env.add_bound_arq(env.add_card())
    other = env.new_collector()
    assert env.collector.run_once() is not None
    assert other.run_once() is None
    env.now += timedelta(seconds=INTERVAL - 1)
    assert (env.collector.run_once(), other.run_once()) == (None, None)
    env.now += timedelta(seconds=1)
    assert other.run_once() is not None
    assert env.collector.run_once() is None
    assert len(env.placement.queries) == 2


def test_grace_period_of_zero_only_reports(sqlite_engine: sa.Engine, node: Node) -> None:
    env = Env(sqlite_engine, node, orphan_grace=0.0)
    orphan = env.add_bound_arq(env.add_card(), allocated=False)
    env.run_after()
    for _ in range(3):
        assert env.run_after(10 * GRACE).released == 0
    assert env.row(orphan)["state"] == "Bound"
    assert env.row(orphan)["orphan_since"] == START + timedelta(seconds=INTERVAL)


def test_round_without_nova_checks_nothing(sqlite_env: Env) -> None:
    orphan = sqlite_env.add_bound_arq(sqlite_env.add_card(), allocated=False)
    conf = make_conf(nova={"send_events": False})
    collector = OrphanCollector(
        conf, UnitOfWork(sqlite_env.engine), sqlite_env.placement, now=lambda: sqlite_env.now
    )
    assert collector.run_once() == RoundStats()
    assert (sqlite_env.placement.queries, sqlite_env.row(orphan)["orphan_since"]) == ([], None)
    # A grace period set by the operator counts without Nova, too.
    conf.set_override("orphan_grace", 60.0, group="conductor")
    sqlite_env.now += timedelta(seconds=INTERVAL)
    collector.run_once()
    assert sqlite_env.row(orphan)["orphan_since"] == sqlite_env.now


def test_lost_placement_database_releases_nothing(
    sqlite_env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    card = sqlite_env.add_card(handles=30)
    since = START - timedelta(days=1)
    orphans = [
        sqlite_env.add_bound_arq(card, allocated=False, orphan_since=since) for _ in range(21)
    ]
    assert sqlite_env.run_after().released == 0
    assert "21 of 21 bound ARQs have no allocation" in caplog.text
    assert {sqlite_env.row(uuid)["state"] for uuid in orphans} == {"Bound"}
    sqlite_env.allocate(orphans[0])
    assert sqlite_env.run_after().released == 20


def test_owner_is_assigned_from_placement(env: Env) -> None:
    card = env.add_card()
    owned, incomplete, absent, verified = (
        env.add_bound_arq(card, allocated=False, owner_verified=False, project_id="admins")
        for _ in range(4)
    )
    env.allocate(owned, "project-2")
    env.allocate(incomplete, INCOMPLETE_CONSUMER_PROJECT)
    env.allocate(verified, "project-3")
    rows.update(env.engine, schema.arqs, env.row(verified)["id"], owner_verified=True)
    assert env.run_after().owners_assigned == 1
    assert [
        (env.row(uuid)["project_id"], bool(env.row(uuid)["owner_verified"]))
        for uuid in (owned, incomplete, absent, verified)
    ] == [("project-2", True), ("admins", False), ("admins", False), ("admins", True)]
    assert env.self_heal_counts()["owners_verified"] == 1


def test_find_allocations_returns_project_and_providers(sqlite_env: Env) -> None:
    uuid = sqlite_env.add_bound_arq(sqlite_env.add_card())
    resolver = OwnerResolver(sqlite_env.placement)
    row = sqlite_env.row(uuid)
    found = resolver.find_allocations(row["instance_uuid"])
    assert found == InstanceAllocations("project-1", {row["device_rp_uuid"]: 1})
    assert resolver.find_allocations(str(uuid4())) == InstanceAllocations()


def test_expired_unbound_arqs_are_deleted(engine: sa.Engine, node: Node) -> None:
    env = Env(engine, node, unbound_ttl=3600.0)
    card = env.add_card()
    old, young = START - timedelta(seconds=7200), START - timedelta(seconds=60)
    deleted = [
        rows.insert_arq(engine, env.profile, state=state, created_at=old, **values)
        for state, values in (
            ("Initial", {}),
            ("Unbound", {"updated_at": old}),
            ("BindFailed", {"updated_at": old}),
        )
    ]
    bound_arqs = [
        env.add_bound_arq(card, updated_at=old),
        rows.insert_arq(engine, env.profile, created_at=young),
        rows.insert_arq(engine, env.profile, created_at=old, state="Unbound", updated_at=young),
    ]
    assert env.run_after().expired == 3
    left = {row["uuid"] for row in rows.read(engine, schema.arqs)}
    assert left == set(bound_arqs)
    assert left.isdisjoint(deleted)
    assert env.self_heal_counts()["unbound_expired"] == 3


def test_arqs_expire_after_a_day_by_default(sqlite_env: Env) -> None:
    day = timedelta(days=1)
    young, old = (
        rows.insert_arq(sqlite_env.engine, sqlite_env.profile, created_at=START - age)
        for age in (day - timedelta(seconds=INTERVAL), day)
    )
    assert sqlite_env.run_after().expired == 1
    assert [row["uuid"] for row in rows.read(sqlite_env.engine, schema.arqs)] == [young] != [old]
    sqlite_env.run_after()
    assert rows.read(sqlite_env.engine, schema.arqs) == []


def test_ttl_of_zero_keeps_arqs(sqlite_engine: sa.Engine, node: Node) -> None:
    env = Env(sqlite_engine, node, unbound_ttl=0.0)
    uuid = rows.insert_arq(sqlite_engine, env.profile, created_at=START - timedelta(days=3650))
    env.run_after()
    assert env.row(uuid)["state"] == "Initial"


def test_dropped_arqs_are_deleted_in_minutes_while_nova_builds_nothing(
    engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(engine, node, Nova(fake_nova.adapter()))
    young = START + timedelta(seconds=2 * INTERVAL + 60)
    dropped, late, building, unowned = (
        rows.insert_arq(engine, env.profile, created_at=created_at, project_id=project)
        for project, created_at in (("a", START), ("a", young), ("b", START), (None, START))
    )
    server = str(uuid4())
    fake_nova.add_server(server, None, "BUILD", tenant_id="b")
    fake_nova.add_server(str(uuid4()), "h", tenant_id="a")
    fake_nova.add_server(str(uuid4()), None, "SHELVED_OFFLOADED", tenant_id="a")
    fake_nova.is_admin = False
    assert env.run_after(INTERVAL + 1).expired == 0
    fake_nova.is_admin, fake_nova.status = True, 503
    assert env.run_after().expired == 0
    fake_nova.status = 200
    left = [{late, building, unowned}, {building, unowned}, {unowned}]
    for expected in left:
        assert env.run_after().expired == 1
        assert {row["uuid"] for row in rows.read(engine, schema.arqs)} == expected
        fake_nova.servers[server]["status"] = "SHELVED_OFFLOADED"
        fake_nova.servers[server]["OS-EXT-STS:task_state"] = "spawning"
        if expected is left[1]:
            fake_nova.servers[server]["status"] = "ERROR"
    assert dropped not in set.union(*left)


def test_projects_that_always_build_do_not_hide_dropped_arqs_of_others(
    engine: sa.Engine, node: Node, fake_nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "MAX_PROJECTS", 2)
    env = Env(engine, node, Nova(fake_nova.adapter()))
    for project in "abcd":
        rows.insert_arq(engine, env.profile, created_at=START, project_id=project)
    for server, project in (("1", "a"), ("2", "b")):
        fake_nova.add_server(server, None, "BUILD", tenant_id=project)
    assert [env.run_after(INTERVAL + 1).expired for _ in range(3)] == [0, 2, 0]
    fake_nova.servers["1"]["status"] = "ACTIVE"  # queried again after the last project
    assert env.run_after().expired == 1
    assert [row["project_id"] for row in rows.read(engine, schema.arqs)] == ["b"]


def test_dropped_arqs_are_kept_without_nova_and_with_a_ttl_of_zero(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(sqlite_engine, node, Nova(fake_nova.adapter()), dropped_ttl=0)
    rows.insert_arq(sqlite_engine, env.profile, created_at=START, project_id="a")
    assert env.run_after(3600).expired == 0
    env.nova = None
    env.collector = env.new_collector()
    assert env.run_after().expired == 0


def test_dropped_arqs_are_deleted_with_an_unbound_ttl_of_zero(
    sqlite_engine: sa.Engine, node: Node, fake_nova: FakeNova
) -> None:
    env = Env(sqlite_engine, node, Nova(fake_nova.adapter()), unbound_ttl=0)
    for project in ("a", None):
        rows.insert_arq(sqlite_engine, env.profile, created_at=START, project_id=project)
    assert env.run_after(3600).expired == 1
    assert [row["project_id"] for row in rows.read(sqlite_engine, schema.arqs)] == [None]


@pytest.mark.parametrize("nova", ["away", "there"])
def test_failed_arq_expires_only_without_its_instance(
    engine: sa.Engine, node: Node, fake_nova: FakeNova, nova: str
) -> None:
    """A hard reboot of a server reads its ARQs, and Nova fails with an empty list."""
    env = Env(engine, node, Nova(fake_nova.adapter()))
    old = START - timedelta(days=2)
    existing, deleted_instance = str(uuid4()), str(uuid4())
    fake_nova.add_server(existing, env.node.name, "ERROR")
    bound_arq, deleted = (
        rows.insert_arq(
            engine,
            env.profile,
            state="BindFailed",
            instance_uuid=instance,
            hostname=env.node.name,
            created_at=old,
        )
        for instance in (existing, deleted_instance)
    )
    if nova == "away":
        fake_nova.status = 503
        assert env.run_after().expired == 0
        assert {env.row(uuid)["updated_at"] for uuid in (bound_arq, deleted)} == {None}
        return
    assert env.run_after().expired == 1
    assert [row["uuid"] for row in rows.read(engine, schema.arqs)] == [bound_arq] != [deleted]
    assert env.row(bound_arq)["updated_at"] == env.now
    # Its age starts again, so that Nova is not queried in each round.
    queries = len(fake_nova.requested_paths)
    env.run_after()
    assert len(fake_nova.requested_paths) == queries
    fake_nova.servers.clear()
    assert env.run_after(86400).expired == 1


def test_orphan_with_prepared_handle_enqueues_cleaning(sqlite_env: Env) -> None:
    orphan = sqlite_env.add_bound_arq(
        sqlite_env.add_card(), allocated=False, orphan_since=START - timedelta(seconds=GRACE)
    )
    (handle,) = sqlite_env.handles(orphan)
    rows.update(sqlite_env.engine, schema.attach_handles, handle["id"], needs_cleaning=True)
    assert sqlite_env.run_after().released == 1
    (after,) = rows.read(sqlite_env.engine, schema.attach_handles, id=handle["id"])
    (job,) = rows.read(sqlite_env.engine, schema.jobs)
    assert (after["arq_id"], bool(after["needs_cleaning"]), after["job_id"]) == (
        None,
        True,
        job["id"],
    )
    assert (job["kind"], sqlite_env.woken) == ("release", 1)


def test_stopped_collector_releases_nothing(sqlite_env: Env) -> None:
    orphan = sqlite_env.add_bound_arq(
        sqlite_env.add_card(), allocated=False, orphan_since=START - timedelta(days=1)
    )
    sqlite_env.collector.stop()
    assert sqlite_env.run_after() == RoundStats()
    assert sqlite_env.row(orphan)["state"] == "Bound"
