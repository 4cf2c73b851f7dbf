# SPDX-License-Identifier: Apache-2.0
"""When objects are counted again, and where."""

import logging
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from cyborg.core.errors import Unavailable
from cyborg.db.engine import Reader
from cyborg.db.totals.cache import INLINE_SECONDS, MAX_AGE, SHARE, CountCache
from cyborg.tests.fixtures.databases import rows


class Clock:
    """A clock that each count moves by ``duration``."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.duration = 0.0

    def __call__(self) -> float:
        return self.seconds


class Env:
    """A cache whose counts take as long as the test says."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.clock = Clock()
        self.cache = CountCache(Reader(engine), self.clock)
        sa.event.listen(engine, "before_cursor_execute", self._pass_time)

    def _pass_time(self, connection: sa.Connection, cursor: object, text: str, *_: object) -> None:
        if "FROM providers" in text:
            self.clock.seconds += self.clock.duration

    def read(self, seconds: float = 0.0) -> tuple[int, float]:
        """Return the number of free handles and its age after further seconds."""
        self.clock.seconds += seconds
        counts, age = self.cache.read()
        return counts.count_handles("free"), round(age, 2)

    def close(self) -> None:
        self.cache.stop()
        sa.event.remove(self.engine, "before_cursor_execute", self._pass_time)


@pytest.fixture
def env(sqlite_engine: sa.Engine) -> Iterator[Env]:
    count_env = Env(sqlite_engine)
    yield count_env
    count_env.close()


def test_quick_counts_are_counted_at_each_read(env: Env) -> None:
    env.clock.duration = INLINE_SECONDS
    assert env.read() == (0, 0)
    rows.insert_card(env.engine, handles=3)
    assert env.read(SHARE * INLINE_SECONDS - 1) == (0, SHARE * INLINE_SECONDS - 1 + INLINE_SECONDS)
    assert env.read(1) == (3, 0)


def test_slow_counts_are_counted_in_the_background(env: Env) -> None:
    env.clock.duration = 2.0
    assert env.read() == (0, 0)
    rows.insert_card(env.engine, handles=3)
    assert env.read(SHARE * 2.0 - 3) == (0, SHARE * 2.0 - 1)
    # This read is not slow: it returns the old counts.
    assert env.read(1) == (0, SHARE * 2.0)
    env.cache.stop()
    assert env.read() == (3, 2)


def test_counts_have_a_maximum_age(env: Env) -> None:
    env.clock.duration = 60.0
    assert env.read() == (0, 0)
    rows.insert_card(env.engine, handles=3)
    assert env.read(2 * MAX_AGE) == (3, 0)


def test_outage_in_the_background_keeps_the_counts(
    env: Env, caplog: pytest.LogCaptureFixture
) -> None:
    env.clock.duration = 2.0
    rows.insert_card(env.engine, handles=3)
    assert env.read() == (3, 0)
    with env.engine.begin() as tx:
        tx.exec_driver_sql("ALTER TABLE providers RENAME TO hidden")
    try:
        with caplog.at_level(logging.WARNING):
            assert env.read(MAX_AGE) == (3, MAX_AGE + 2)
            env.cache.stop()
        (line,) = caplog.messages
        assert line.startswith("Cannot count objects, older counts")
        with pytest.raises(Unavailable):
            env.read(MAX_AGE)
    finally:
        with env.engine.begin() as tx:
            tx.exec_driver_sql("ALTER TABLE hidden RENAME TO providers")
