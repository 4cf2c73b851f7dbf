# SPDX-License-Identifier: Apache-2.0
"""The health check stays current, also while its check of the database hangs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sqlalchemy as sa

from cyborg.api import health as module
from cyborg.api.health import FIRST_WAIT_TIMEOUT, STALE_SECONDS, WAIT_TIMEOUT, Health
from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.db.engine import Reader
from cyborg.tests.fixtures.databases.counting import count_statements


class Database:
    """A fake reader whose check can be blocked."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.check_started = threading.Event()
        self.can_respond = threading.Event()
        self.can_respond.set()

    def check(self, seconds: float) -> None:
        self.check_started.set()
        assert self.can_respond.wait(120)
        if self.error is not None:
            raise self.error


def _health(database: Any, now: list[float]) -> Health:
    return Health(database, lambda: now[0])


def test_check_queries_database_once_a_second(sqlite_engine: sa.Engine) -> None:
    now = [0.0]
    health = Health(Reader(sqlite_engine), lambda: now[0])
    with count_statements(sqlite_engine) as statements:
        assert [health.check()[0] for _ in range(5)] == [True] * 5
        now[0] = 1.5
        assert health.check()[1]["conductor"] == "unknown"
    assert len(statements) == 2


def test_check_without_tables_is_unhealthy(sqlite_engine: sa.Engine) -> None:
    schema.metadata.drop_all(sqlite_engine)
    healthy, body = Health(Reader(sqlite_engine)).check()
    assert not healthy
    assert body["database"] == "unavailable"
    assert "cyborg-dbsync" in body["reason"]


def test_check_hanging_is_unhealthy_when_result_is_stale(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(module, "WAIT_TIMEOUT", 0.01)
    database, now = Database(), [0.0]
    health = _health(database, now)
    assert health.check()[0]
    database.can_respond.clear()
    database.check_started.clear()
    now[0] = 2.0
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(health.check)
        assert database.check_started.wait(120)
        assert health.check()[0], "the last result is 2 s old"
        now[0] = STALE_SECONDS + 0.5
        healthy, body = health.check()
        assert (healthy, body["database"]) == (False, "unavailable")
        assert "has not responded for" in body["reason"]
        database.can_respond.set()
        pending.result(120)
    now[0] += 2.0
    assert health.check()[0]


def test_check_with_stale_result_waits_for_concurrent_check() -> None:
    database, now = Database(), [0.0]
    health = _health(database, now)
    assert health.check()[0]
    now[0] = 100.0
    database.can_respond.clear()
    database.check_started.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(health.check)
        assert database.check_started.wait(120)
        second = pool.submit(health.check)
        threading.Timer(0.2, database.can_respond.set).start()
        assert (first.result(120)[0], second.result(120)[0]) == (True, True)


def test_first_checks_wait_for_first_result() -> None:
    database, now = Database(), [0.0]
    health = _health(database, now)
    database.can_respond.clear()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(health.check)
        assert database.check_started.wait(120)
        others = [pool.submit(health.check) for _ in range(3)]
        threading.Timer(0.2, database.can_respond.set).start()
        assert [probe.result(120)[0] for probe in (first, *others)] == [True] * 4


def test_check_wait_is_limited(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_TIMEOUT", 0.1)
    assert WAIT_TIMEOUT <= FIRST_WAIT_TIMEOUT <= 5
    database, now = Database(), [0.0]
    health = _health(database, now)
    database.can_respond.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(health.check)
        assert database.check_started.wait(120)
        assert not health.check()[0]
        assert not first.done(), "the answer of the database is not waited for"
        database.can_respond.set()
        assert first.result(120)[0]


def test_check_failure_does_not_block_later_checks() -> None:
    database, now = Database(), [0.0]
    health = _health(database, now)
    for error in (Unavailable("unavailable"), RuntimeError("unexpected")):
        database.error = error
        assert not health.check()[0]
        now[0] += 2.0
    database.error = None
    assert health.check()[0]
