# SPDX-License-Identifier: Apache-2.0
"""Counting everything, on each kind of database."""

from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.core.deed import Deed
from cyborg.core.liveness import judge
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.read import deeds as reading
from cyborg.db.read import totals
from cyborg.db.read.totals import Totals
from cyborg.db.store import deeds
from cyborg.fixtures import rows

NOW = datetime(2026, 4, 1)
LATE, DOWN = NOW - timedelta(seconds=30), NOW - timedelta(seconds=70)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def read(engine: sa.Engine) -> Totals:
    with engine.connect() as connection:
        return totals.read(connection, now=NOW, late_before=LATE, down_before=DOWN)


def test_nothing_is_counted_as_nothing(engine: sa.Engine) -> None:
    found = read(engine)
    assert (found.requests, found.handles, found.devices, found.services) == ({}, {}, {}, {})
    assert (found.outbox, found.jobs, found.deeds) == ([], [], [])
    assert (found.providers, found.oldest_stale, found.oldest_bind_started) == (0, None, None)


def test_everything_is_counted_in_nine_statements(engine: sa.Engine) -> None:
    card = rows.card(engine, handles=5)
    rows.card(engine, address="0000:02:00.0", handles=0, status="maintaining", health="unhealthy")
    (sick,) = rows.read(engine, schema.devices, health="unhealthy")
    rows.change(engine, schema.devices, sick["id"], health_since=ago(60))
    profile = rows.profile(engine)
    ids = {}
    for name, values in {
        "initial": {},
        "bound": {"state": "Bound"},
        "lost": {"state": "Bound", "orphan_since": NOW, "owner_known": False},
        "started": {"state": "BindStarted", "updated_at": ago(50)},
        "newer": {"state": "BindStarted", "updated_at": ago(5)},
    }.items():
        uuid = rows.request(engine, profile, **values)
        ids[name] = rows.read(engine, schema.requests, uuid=uuid)[0]["id"]
    handles = rows.read(engine, schema.attach_handles, deployable_id=card.deployable_id)
    for handle, changed in zip(
        handles,
        (
            {"request_id": ids["bound"]},
            {"request_id": ids["started"], "prepared": True},
            {"prepared": True},
            {"draining": True},
        ),
        strict=False,
    ):
        rows.change(engine, schema.attach_handles, handle["id"], **changed)
    for n, seconds in enumerate((0, 29, 30, 69, 70, 1000)):
        agent = rows.agent(engine, host=f"h{n}")
        rows.change(engine, schema.services, agent, last_seen_at=ago(seconds))
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
    rows.change(engine, schema.providers, first["id"], stale_since=ago(40), error="refused")
    # It is compared with Placement again, and that is all.
    rows.change(engine, schema.providers, second["id"], stale_since=ago(50), audited=True)

    with counting(engine) as counted:
        found = read(engine)
    assert len(counted) == 9
    assert found.requests == {"Initial": 1, "Bound": 2, "BindStarted": 2}
    assert (found.orphans_suspected, found.owners_unknown) == (1, 1)
    assert found.oldest_bind_started == ago(50)
    assert found.handles == {"owned": 2, "dirty": 1, "draining": 1, "free": 1}
    assert found.devices == {("enabled", "ok"): 1, ("maintaining", "unhealthy"): 1}
    assert found.unhealthy == [
        {"host": "compute-1", "address": "0000:02:00.0", "health_since": ago(60)}
    ]
    assert found.services == {
        ("cyborg-agent", "up"): 2,
        ("cyborg-agent", "late"): 2,
        ("cyborg-agent", "down"): 2,
    }
    assert [tuple(row.values()) for row in found.outbox] == [
        ("nova-event", "dead", 1, ago(90)),
        ("nova-event", "pending", 2, ago(20)),
    ]
    assert found.jobs == [{"kind": "prepare", "count": 3, "overdue": 1, "oldest": ago(9)}]
    assert (found.providers, found.providers_stale, found.providers_failing) == (2, 1, 1)
    assert found.oldest_stale == ago(40)


@pytest.mark.parametrize("seconds", [0, 29.999, 30, 69.999, 70, 500])
def test_liveness_is_judged_as_the_api_does(sqlite_engine: sa.Engine, seconds: float) -> None:
    agent = rows.agent(sqlite_engine)
    rows.change(sqlite_engine, schema.services, agent, last_seen_at=ago(seconds))
    # Ten seconds between hellos, late after two that are missed, down after six.
    state = judge(ago(seconds), NOW, 10.0, 2, 6)
    assert read(sqlite_engine).services == {("cyborg-agent", str(state)): 1}


def test_deeds_add_up(engine: sa.Engine) -> None:
    for n, at in ((2, ago(20)), (0, NOW), (3, ago(10))):
        with counting(engine) as counted, engine.begin() as tx:
            deeds.add(tx, Deed.ORPHANS_FREED, n, at)
        assert len(counted) == bool(n)
    with engine.begin() as tx:
        deeds.add(tx, Deed.JOBS_UNDONE, 1, NOW)
    with engine.connect() as connection:
        assert reading.find(connection) == [
            {"kind": "jobs_undone", "count": 1, "last_at": NOW},
            {"kind": "orphans_freed", "count": 5, "last_at": ago(10)},
        ]


def test_a_turn_is_one_conductors(engine: sa.Engine) -> None:
    def turn(before: datetime, now: datetime) -> bool:
        with engine.begin() as tx:
            return deeds.take_turn(tx, Deed.RECONCILED, before, now)

    assert turn(ago(300), NOW)
    assert not turn(ago(300), NOW)
    assert turn(NOW, NOW + timedelta(seconds=300))
    (row,) = rows.read(engine, schema.deeds)
    assert (row["count"], row["last_at"]) == (2, NOW + timedelta(seconds=300))
