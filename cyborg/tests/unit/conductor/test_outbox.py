# SPDX-License-Identifier: Apache-2.0
import logging
import threading
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.clients.nova import Nova
from cyborg.conductor.binding import EVENT
from cyborg.conductor.outbox import BATCH, Outbox
from cyborg.db import schema
from cyborg.db.store import outbox as store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.fixtures import rows
from cyborg.fixtures.nova import FakeNova
from cyborg.fixtures.options import make_conf

START = datetime(2026, 1, 1)


class Clock:
    """The time of a test: it moves when told."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds


class Bed:
    """An outbox on a real database, a Nova on a real socket, and a clock."""

    def __init__(self, engine: sa.Engine, nova: FakeNova) -> None:
        self.engine, self.nova, self.clock = engine, nova, Clock()
        self.conf = make_conf(conductor={"outbox_attempts": 3}, nova={"request_timeout": 5.0})
        self.uow = UnitOfWork(engine)
        self.outbox = self.another()

    def another(self) -> Outbox:
        return Outbox(
            self.conf,
            self.uow,
            Nova(self.nova.adapter(), 5.0),
            now=self.clock.now,
            clock=self.clock.monotonic,
        )

    def promise(self, *tags: str, server: str = "server-1") -> None:
        events = [
            (server, {"name": "n", "server_uuid": server, "tag": tag, "status": "completed"})
            for tag in tags
        ]
        self.uow.run(lambda tx: store.add(tx, EVENT, events))
        with self.engine.begin() as tx:
            tx.execute(sa.update(schema.outbox).values(next_try_at=self.clock.now()))

    def rows(self) -> list[dict[str, Any]]:
        return rows.read(self.engine, schema.outbox)


@pytest.fixture
def bed(engine: sa.Engine, fake_nova: FakeNova) -> Bed:
    return Bed(engine, fake_nova)


@pytest.fixture
def light(sqlite_engine: sa.Engine, fake_nova: FakeNova) -> Bed:
    """A bed on one database, for what no database does its own way."""
    return Bed(sqlite_engine, fake_nova)


def test_what_is_delivered_is_gone(bed: Bed) -> None:
    bed.promise("a", "b")
    bed.promise("c", server="server-2")
    assert bed.outbox.run_once() == 3
    assert sorted(bed.nova.tags) == ["a", "b", "c"]
    assert bed.rows() == []
    assert bed.outbox.run_once() == 0


def test_more_than_one_batch_goes_in_one_run(bed: Bed) -> None:
    bed.promise(*(str(n) for n in range(BATCH + 5)))
    assert bed.outbox.run_once() == BATCH + 5
    assert [len(call["events"]) for call in bed.nova.calls] == [BATCH, 5]


def test_no_host_yet_and_no_such_instance_are_fine(light: Bed) -> None:
    light.nova.codes = {"a": 422, "b": 404}
    light.promise("a", "b", "c")
    assert light.outbox.run_once() == 3
    assert light.rows() == []


def test_one_event_that_fails_is_tried_again_alone(bed: Bed) -> None:
    bed.nova.codes = {"b": 500}
    bed.promise("a", "b")
    assert bed.outbox.run_once() == 1
    (row,) = bed.rows()
    assert (row["attempts"], row["state"], row["owner"]) == (1, "pending", None)
    assert "500" in row["error"]
    assert bed.outbox.run_once() == 0
    assert len(bed.nova.calls) == 1
    bed.nova.codes = {}
    bed.clock.seconds = 2
    assert bed.outbox.run_once() == 1
    assert bed.nova.tags == ["a", "b", "b"]


def test_a_nova_that_fails_is_asked_later_and_later_then_no_more(bed: Bed) -> None:
    bed.nova.status, bed.nova.body = 500, {}
    bed.promise("a", "b")
    waits = []
    for _ in range(3):
        before = bed.clock.now()
        assert bed.outbox.run_once() == 0
        waits.append((bed.rows()[0]["next_try_at"] - before).total_seconds())
        bed.clock.seconds += 400
    assert 0.5 <= waits[0] <= 1.5
    assert 1.0 <= waits[1] <= 3.0
    assert {(row["state"], row["attempts"]) for row in bed.rows()} == {("dead", 3)}
    assert all("Nova answered 500" in row["error"] for row in bed.rows())
    bed.nova.status, bed.nova.body = 200, None
    assert bed.outbox.run_once() == 0


def test_a_nova_that_hangs_keeps_nothing_leased(light: Bed) -> None:
    light.nova.hang = threading.Event()
    light.outbox = Outbox(
        light.conf,
        light.uow,
        Nova(light.nova.adapter(), 0.2),
        now=light.clock.now,
        clock=light.clock.monotonic,
    )
    light.promise("a")
    assert light.outbox.run_once() == 0
    (row,) = light.rows()
    assert (row["owner"], row["lease_until"], row["attempts"]) == (None, None, 1)
    assert "did not answer" in row["error"]


def test_an_instance_that_nova_refuses_stops_no_other(light: Bed) -> None:
    light.nova.refused_servers = {"server-2"}
    light.promise("a", server="server-1")
    light.promise("b", server="server-2")
    light.promise("c", server="server-3")
    assert light.outbox.run_once() == 2
    assert [row["subject"] for row in light.rows()] == ["server-2"]


def test_two_conductors_deliver_once(bed: Bed) -> None:
    bed.promise("a", "b")
    until = bed.clock.now() + timedelta(seconds=60)
    taken = bed.uow.run(
        lambda tx: store.lease(tx, EVENT, owner="other", now=bed.clock.now(), until=until, limit=1)
    )
    assert [row["payload"]["tag"] for row in taken] == ["a"]
    assert bed.outbox.run_once() == 1
    assert bed.nova.tags == ["b"]


def test_what_a_killed_conductor_leased_is_delivered_when_the_lease_ends(bed: Bed) -> None:
    bed.promise("a")
    until = bed.clock.now() + timedelta(seconds=60)
    bed.uow.run(
        lambda tx: store.lease(tx, EVENT, owner="killed", now=bed.clock.now(), until=until, limit=9)
    )
    bed.clock.seconds = 59
    assert bed.another().run_once() == 0
    bed.clock.seconds = 61
    assert bed.another().run_once() == 1


def test_a_lease_that_passed_on_deletes_nothing(bed: Bed) -> None:
    bed.promise("a")
    (row,) = bed.rows()
    assert bed.uow.run(lambda tx: store.done(tx, "late", [row["id"]])) == 0
    assert bed.uow.run(lambda tx: store.failed(tx, "late", {row["id"]: None}, "x", START)) == 0
    assert bed.rows()[0]["state"] == "pending"


def test_nova_away_is_said_once_a_minute(light: Bed, caplog: pytest.LogCaptureFixture) -> None:
    light.nova.status, light.nova.body = 503, {}
    light.conf.set_override("outbox_attempts", 100, group="conductor")
    with caplog.at_level(logging.WARNING):
        for n in range(4):
            light.promise(f"a{n}")
            light.outbox.run_once()
            light.clock.seconds += 20
    assert len([r for r in caplog.records if "events for Nova wait" in r.getMessage()]) == 2
