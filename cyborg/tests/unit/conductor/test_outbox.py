# SPDX-License-Identifier: Apache-2.0
import logging
import threading

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from cyborg.clients.nova import Nova
from cyborg.conductor.outbox import BATCH, LONGEST_PAUSE, Outbox
from cyborg.core.backoff import pause
from cyborg.db import schema
from cyborg.db.counting import counting
from cyborg.db.store import outbox as store
from cyborg.fixtures import rows
from cyborg.fixtures.options import make_conf
from cyborg.fixtures.outbox import START, Bed, bed, light

__all__ = ["bed", "light"]

DEFAULT = make_conf().conductor.outbox_attempts


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
    assert len([r for r in caplog.records if "messages for Nova wait" in r.getMessage()]) == 2


@given(st.lists(st.floats(0.0, 1.0), min_size=DEFAULT - 1, max_size=DEFAULT - 1))
def test_an_event_is_tried_for_longer_than_nova_waits(draws: list[float]) -> None:
    """nova-compute waits 300 s for an event, whatever dice are thrown."""
    pauses = [pause(n, LONGEST_PAUSE, draw) for n, draw in enumerate(draws)]
    assert sum(pauses) >= 360
    assert max(pauses) <= 45


def test_an_event_that_nobody_takes_dies_by_the_default_after_six_minutes(light: Bed) -> None:
    light.conf.clear_override("outbox_attempts", group="conductor")
    light.nova.status, light.nova.body = 503, {}
    light.promise("a")
    for _ in range(DEFAULT):
        (row,) = light.rows()
        assert row["state"] == "pending"
        light.clock.seconds = (row["next_try_at"] - START).total_seconds()
        light.outbox.run_once()
    (row,) = light.rows()
    assert (row["state"], row["attempts"]) == ("dead", DEFAULT)
    assert light.clock.seconds >= 360


def test_messages_of_all_kinds_are_one_statement(sqlite_engine: sa.Engine) -> None:
    with counting(sqlite_engine) as count, sqlite_engine.begin() as tx:
        store.add_all(tx, [])
        store.add_all(tx, [("one", "s", {"a": 1}), ("other", "t", {"b": [2]})])
    assert [text.split()[0] for text in count.statements] == ["INSERT"]
    found = rows.read(sqlite_engine, schema.outbox)
    assert [(row["kind"], row["subject"], row["payload"]) for row in found] == [
        ("one", "s", {"a": 1}),
        ("other", "t", {"b": [2]}),
    ]


def test_an_event_alone_takes_three_statements(sqlite_engine: sa.Engine, light: Bed) -> None:
    """What a boot costs here: look, lease, delete, and no second look when the first had all."""
    light.promise("a")
    with counting(sqlite_engine) as count:
        assert light.outbox.run_once() == 1
    words = [text.split()[0] for text in count.statements]
    assert words == ["SELECT", "UPDATE", "DELETE"]
