# SPDX-License-Identifier: Apache-2.0
import logging
import threading

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from cyborg.clients.nova import Nova
from cyborg.conductor.notifications.outbox import BATCH, MAX_EVENT_DELAY, create_nova_worker
from cyborg.db import schema
from cyborg.db.outbox import write as store
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.databases.outbox import START, Env, env, sqlite_env
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.threads.failures import compute_delay

__all__ = ["env", "sqlite_env"]

DEFAULT = make_conf().conductor.outbox_attempts


def test_delivered_events_are_deleted(env: Env) -> None:
    env.add_events("a", "b")
    env.add_events("c", server="server-2")
    assert env.outbox.run_once() == 3
    assert sorted(env.nova.tags) == ["a", "b", "c"]
    assert env.rows() == []
    assert env.outbox.run_once() == 0


def test_run_delivers_several_batches(env: Env) -> None:
    env.add_events(*(str(n) for n in range(BATCH + 5)))
    assert env.outbox.run_once() == BATCH + 5
    assert [len(call["events"]) for call in env.nova.calls] == [BATCH, 5]


def test_final_status_codes_end_an_event(sqlite_env: Env) -> None:
    sqlite_env.nova.codes = {"a": 422, "b": 404}
    sqlite_env.add_events("a", "b", "c")
    assert sqlite_env.outbox.run_once() == 3
    assert sqlite_env.rows() == []


def test_failed_event_is_retried_alone(env: Env) -> None:
    env.nova.codes = {"b": 500}
    env.add_events("a", "b")
    assert env.outbox.run_once() == 1
    (row,) = env.rows()
    assert (row["attempts"], row["state"], row["owner"]) == (1, "pending", None)
    assert "500" in row["error"]
    assert env.outbox.run_once() == 0
    assert len(env.nova.calls) == 1
    env.nova.codes = {}
    env.clock.seconds = 2
    assert env.outbox.run_once() == 1
    assert env.nova.tags == ["a", "b", "b"]


def test_failing_events_are_retried_with_increasing_delays_then_dead(env: Env) -> None:
    env.nova.status, env.nova.body = 500, {}
    env.add_events("a", "b")
    waits = []
    for _ in range(3):
        start = env.clock.now()
        assert env.outbox.run_once() == 0
        waits.append((env.rows()[0]["next_try_at"] - start).total_seconds())
        env.clock.seconds += 400
    assert 0.5 <= waits[0] <= 1.5
    assert 1.0 <= waits[1] <= 3.0
    assert {(row["state"], row["attempts"]) for row in env.rows()} == {("dead", 3)}
    assert all("Nova answered 500" in row["error"] for row in env.rows())
    env.nova.status, env.nova.body = 200, None
    assert env.outbox.run_once() == 0


def test_nova_timeout_releases_the_lease(sqlite_env: Env) -> None:
    sqlite_env.nova.hang = threading.Event()
    sqlite_env.outbox = create_nova_worker(
        sqlite_env.conf,
        sqlite_env.uow,
        Nova(sqlite_env.nova.adapter(), 0.2),
        now=sqlite_env.clock.now,
        clock=sqlite_env.clock.monotonic,
    )
    sqlite_env.add_events("a")
    assert sqlite_env.outbox.run_once() == 0
    (row,) = sqlite_env.rows()
    assert (row["owner"], row["lease_until"], row["attempts"]) == (None, None, 1)
    assert "did not answer" in row["error"]


def test_rejected_instance_does_not_delay_others(sqlite_env: Env) -> None:
    sqlite_env.nova.refused_servers = {"server-2"}
    sqlite_env.add_events("a", server="server-1")
    sqlite_env.add_events("b", server="server-2")
    sqlite_env.add_events("c", server="server-3")
    assert sqlite_env.outbox.run_once() == 2
    assert [row["subject"] for row in sqlite_env.rows()] == ["server-2"]


def test_lost_lease_changes_nothing(env: Env) -> None:
    env.add_events("a")
    (row,) = env.rows()
    assert env.uow.run(lambda tx: store.delete_delivered(tx, "late", [row["id"]])) == 0
    assert (
        env.uow.run(lambda tx: store.record_failure(tx, "late", {row["id"]: None}, "x", START)) == 0
    )
    assert env.rows()[0]["state"] == "pending"


def test_nova_outage_is_logged_once_a_minute(
    sqlite_env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    sqlite_env.nova.status, sqlite_env.nova.body = 503, {}
    sqlite_env.conf.set_override("outbox_attempts", 100, group="conductor")
    with caplog.at_level(logging.WARNING):
        for n in range(4):
            sqlite_env.add_events(f"a{n}")
            sqlite_env.outbox.run_once()
            sqlite_env.clock.seconds += 20
    assert len([r for r in caplog.records if "messages to Nova: " in r.getMessage()]) == 2


@given(st.lists(st.floats(0.0, 1.0), min_size=DEFAULT - 1, max_size=DEFAULT - 1))
def test_retries_last_longer_than_nova_waits(draws: list[float]) -> None:
    """nova-compute waits 300 s for an event; this holds for all random delays."""
    pauses = [compute_delay(n, MAX_EVENT_DELAY, draw) for n, draw in enumerate(draws)]
    assert sum(pauses) >= 360
    assert max(pauses) <= 45


def test_undeliverable_event_is_dead_after_six_minutes_by_default(sqlite_env: Env) -> None:
    sqlite_env.conf.clear_override("outbox_attempts", group="conductor")
    sqlite_env.nova.status, sqlite_env.nova.body = 503, {}
    sqlite_env.add_events("a")
    for _ in range(DEFAULT):
        (row,) = sqlite_env.rows()
        assert row["state"] == "pending"
        sqlite_env.clock.seconds = (row["next_try_at"] - START).total_seconds()
        sqlite_env.outbox.run_once()
    (row,) = sqlite_env.rows()
    assert (row["state"], row["attempts"]) == ("dead", DEFAULT)
    assert sqlite_env.clock.seconds >= 360


def test_add_all_is_one_statement(sqlite_engine: sa.Engine) -> None:
    with count_statements(sqlite_engine) as count, sqlite_engine.begin() as tx:
        store.add_all(tx, [])
        first, second = ("one", "s", {"a": 1}), ("other", "t", {"b": [2]})
        store.add_all(tx, [store.Message(*first), store.Message(*second)])
    assert [text.split()[0] for text in count.statements] == ["INSERT"]
    messages = rows.read(sqlite_engine, schema.outbox)
    assert [(row["kind"], row["subject"], row["payload"]) for row in messages] == [
        ("one", "s", {"a": 1}),
        ("other", "t", {"b": [2]}),
    ]


def test_delivery_of_one_event_executes_three_statements(
    sqlite_engine: sa.Engine, sqlite_env: Env
) -> None:
    """One boot costs a query, a lease and a delete; no second query follows."""
    sqlite_env.add_events("a")
    with count_statements(sqlite_engine) as count:
        assert sqlite_env.outbox.run_once() == 1
    verbs = [text.split()[0] for text in count.statements]
    assert verbs == ["SELECT", "UPDATE", "DELETE"]
