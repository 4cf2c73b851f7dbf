# SPDX-License-Identifier: Apache-2.0
"""Tests of total counts, on each kind of database."""

from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.hosts import evaluate
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db import schema
from cyborg.db.binding import accelerators
from cyborg.db.totals import read as reading
from cyborg.db.totals import read as totals
from cyborg.db.totals import write as self_heal
from cyborg.db.totals.read import Counts, Totals
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements

NOW = datetime(2026, 4, 1)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def read(engine: sa.Engine) -> Totals:
    with engine.connect() as connection:
        return totals.read(connection, now=NOW)


def count(engine: sa.Engine) -> Counts:
    with engine.connect() as connection:
        return totals.count(connection)


def test_totals_of_an_empty_database_are_empty(engine: sa.Engine) -> None:
    assert count(engine) == Counts({}, 0, 0, {}, {}, {}, {}, {}, {}, 0, {}, 0)
    totals = read(engine)
    assert (totals.services, totals.hosts_cordoned, totals.unhealthy) == ({}, 0, [])
    assert (totals.outbox, totals.jobs, totals.self_heal_actions) == ([], [], [])
    assert (totals.oldest_stale, totals.oldest_bind_started) == (None, None)


def test_totals_need_sixteen_statements(engine: sa.Engine) -> None:
    card = rows.insert_card(engine, handles=5)
    rows.insert_card(
        engine, address="0000:02:00.0", handles=2, status="maintaining", health="unhealthy"
    )
    (unhealthy,) = rows.read(engine, schema.devices, health="unhealthy")
    rows.update(engine, schema.devices, unhealthy["id"], health_since=ago(60))
    profile = rows.insert_profile(engine)
    ids = {}
    arqs: dict[str, dict[str, Any]] = {
        "initial": {},
        "bound": {"state": "Bound"},
        "lost": {"state": "Bound", "orphan_since": NOW, "owner_verified": False},
        "started": {"state": "BindStarted", "updated_at": ago(50)},
        "newer": {"state": "BindStarted", "updated_at": ago(5)},
    }
    for name, values in arqs.items():
        uuid = rows.insert_arq(engine, profile, **values)
        ids[name] = rows.read(engine, schema.arqs, uuid=uuid)[0]["id"]
    handles = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)
    for handle, changed in zip(
        handles,
        (
            {"arq_id": ids["bound"]},
            {"arq_id": ids["started"], "needs_cleaning": True},
            {"needs_cleaning": True},
            {"draining": True},
        ),
        strict=False,
    ):
        rows.update(engine, schema.attach_handles, handle["id"], **changed)
    for n, seconds in enumerate((0, 29, 30, 69, 70, 1000)):
        agent = rows.insert_agent(engine, host=f"h{n}")
        rows.update(engine, schema.services, agent, **rows.heartbeat(ago(seconds)))
    message: dict[str, Any] = {"kind": "nova-event", "subject": "s", "payload": {}}
    rows.insert(engine, schema.outbox, **message, created_at=ago(10))
    rows.insert(engine, schema.outbox, **message, created_at=ago(20))
    rows.insert(engine, schema.outbox, **message, created_at=ago(90), state="dead")
    job: dict[str, Any] = {"kind": "prepare", "host": "h", "subject": "s", "arguments": {}}
    rows.insert(engine, schema.jobs, **job, created_at=ago(9), deadline=ago(-1))
    rows.insert(engine, schema.jobs, **job, created_at=ago(8), deadline=ago(1))
    rows.insert(engine, schema.jobs, **job, created_at=ago(7), deadline=None)
    rows.insert(engine, schema.jobs, **job, created_at=ago(99), state="done", deadline=ago(9))
    first, second = rows.read(engine, schema.providers)
    rows.update(engine, schema.providers, first["id"], stale_since=ago(40), error="refused")
    # The second provider is only due for verification.
    rows.update(engine, schema.providers, second["id"], stale_since=ago(50), verify_only=True)

    for n, offer in enumerate(("offered", "offered", None)):
        found = rows.insert_card(engine, address=f"hgx:{n}", handles=0)
        device_set = {"device_set": {"kind": "fabric"}, "set_size": 4, "offer": offer}
        rows.update(engine, schema.deployables, found.deployable_id, **device_set)

    with count_statements(engine) as counted:
        totals, counts = read(engine), count(engine)
    assert len(counted) == 16
    assert counts.arqs == {"Initial": 1, "Bound": 2, "BindStarted": 2}
    assert (counts.orphans_suspected, counts.owners_unverified) == (1, 1)
    assert totals.oldest_bind_started == ago(50)
    assert counts.handles == {
        ("FPGA", "owned"): 2,
        ("FPGA", "dirty"): 1,
        ("FPGA", "draining"): 1,
        ("FPGA", "free"): 1,
        ("FPGA", "cordoned"): 2,
    }
    assert counts.count_handles("owned") == 2
    assert counts.devices == {("enabled", "ok"): 4, ("maintaining", "unhealthy"): 1}
    # A new set has no offer yet.
    assert counts.device_sets == {("fabric", 4, "offered"): 2, ("fabric", 4, "withheld"): 1}
    assert totals.unhealthy == [
        {"host": "compute-1", "address": "0000:02:00.0", "health_since": ago(60)}
    ]
    assert totals.services == {
        ("cyborg-agent", "up"): 2,
        ("cyborg-agent", "late"): 2,
        ("cyborg-agent", "down"): 2,
    }
    assert [tuple(row.values()) for row in totals.outbox] == [
        ("nova-event", "dead", 1, ago(90)),
        ("nova-event", "pending", 2, ago(20)),
    ]
    assert totals.jobs == [{"kind": "prepare", "count": 3, "overdue": 1, "oldest": ago(9)}]
    assert (counts.providers, totals.providers_stale, totals.providers_failing) == (5, 1, 1)
    assert totals.oldest_stale == ago(40)


@pytest.mark.parametrize(
    ("table", "changed"),
    [
        (schema.devices, {}),
        (schema.devices, {"status": "maintaining"}),
        (schema.devices, {"health": "unknown"}),
        (schema.devices, {"health": "unhealthy"}),
        (schema.devices, {"cordoned": True}),
        (schema.devices, {"setup_required": True}),
        (schema.devices, {"failing": True}),
        (schema.devices, {"deliverable": False}),
        (schema.devices, {"draining": True}),
        (schema.deployables, {"draining": True}),
        (schema.services, {"down_since": NOW}),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "handle",
    [{}, {"needs_cleaning": True}, {"draining": True}, {"draining": True, "needs_cleaning": True}],
    ids=str,
)
def test_handles_without_an_owner_are_counted_by_the_state_of_their_accelerators(
    sqlite_engine: sa.Engine, table: sa.Table, changed: dict[str, Any], handle: dict[str, Any]
) -> None:
    card = rows.insert_card(sqlite_engine, handles=1)
    agent = rows.insert_agent(sqlite_engine, card.host)
    ids = {"devices": card.device_id, "deployables": card.deployable_id, "services": agent}
    rows.update(sqlite_engine, table, ids[table.name], **{"host": card.host, **changed})
    (row,) = rows.read(sqlite_engine, schema.attach_handles)
    rows.update(sqlite_engine, schema.attach_handles, row["id"], address="0", **handle)
    with sqlite_engine.connect() as connection:
        (shown,) = accelerators.find(connection)
    assert count(sqlite_engine).handles == {("FPGA", shown["state"]): 1}


@pytest.mark.parametrize("seconds", [0, 29.999, 30, 69.999, 70, 500])
def test_totals_and_core_agree_on_liveness(sqlite_engine: sa.Engine, seconds: float) -> None:
    agent = rows.insert_agent(sqlite_engine)
    rows.update(sqlite_engine, schema.services, agent, **rows.heartbeat(ago(seconds)))
    times = rows.heartbeat(ago(seconds))
    state = evaluate(times["late_at"], times["down_at"], NOW)
    assert read(sqlite_engine).services == {("cyborg-agent", str(state)): 1}


def test_self_heal_counters_add_up(engine: sa.Engine) -> None:
    for n, at in ((2, ago(20)), (0, NOW), (3, ago(10))):
        with count_statements(engine) as counted, engine.begin() as tx:
            self_heal.increment(tx, CorrectiveAction.ORPHANS_RELEASED, n, at)
        assert len(counted) == bool(n)
    with engine.begin() as tx:
        self_heal.increment(tx, CorrectiveAction.JOBS_UNDONE, 1, NOW)
    with engine.connect() as connection:
        assert reading.find_self_heal(connection) == [
            {"kind": "jobs_undone", "count": 1, "last_at": NOW},
            {"kind": "orphans_released", "count": 5, "last_at": ago(10)},
        ]


def test_acquire_turn_succeeds_once_per_interval(engine: sa.Engine) -> None:
    def acquire(cutoff: datetime, now: datetime) -> bool:
        with engine.begin() as tx:
            return self_heal.acquire_turn(tx, CorrectiveAction.ORPHAN_SCANS, cutoff, now)

    assert acquire(ago(300), NOW)
    assert not acquire(ago(300), NOW)
    assert acquire(NOW, NOW + timedelta(seconds=300))
    (row,) = rows.read(engine, schema.self_heal_counters)
    assert (row["count"], row["last_at"]) == (2, NOW + timedelta(seconds=300))
