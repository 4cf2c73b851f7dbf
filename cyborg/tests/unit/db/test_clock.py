# SPDX-License-Identifier: Apache-2.0
"""Tests of DatabaseClock: the database's time, measured and extrapolated by a monotonic clock."""

import ast
import contextlib
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from oslo_utils import timeutils

import cyborg
from cyborg.core.errors import Unavailable
from cyborg.db import schema
from cyborg.db.clock import INTERVAL, MAX_AGE, MAX_ERROR, MAX_HOLD, DatabaseClock
from cyborg.db.engine import Reader
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.databases.counting import count_statements
from cyborg.tests.fixtures.hosts.host_time import host_clock_off

PACKAGES = ("conductor", "db", "api", "standalone", "wsgi", "cmd", "clients", "rpc")
WALL_CLOCKS = {"utcnow", "utcnow_ts", "now", "today", "time", "time_ns"}
TIME_MODULES = {"time", "timeutils", "datetime", "date"}


class Monotonic:
    """Fake monotonic clock; each reading advances it by ``step`` seconds."""

    def __init__(self, seconds: float = 5000.0) -> None:
        self.seconds, self.step = seconds, 0.0

    def __call__(self) -> float:
        self.seconds += self.step
        return self.seconds


@pytest.fixture
def monotonic() -> Monotonic:
    return Monotonic()


@pytest.fixture
def clock(engine: sa.Engine, monotonic: Monotonic) -> DatabaseClock:
    return DatabaseClock(Reader(engine).connect, monotonic)


def test_clock_returns_the_database_time_and_needs_one_statement(
    engine: sa.Engine, clock: DatabaseClock, monotonic: Monotonic
) -> None:
    with count_statements(engine, clock=True) as count:
        first = clock()
        assert len(count) == 1
        monotonic.seconds += 3600
        assert clock() == first + timedelta(hours=1)
        assert len(count) == 1
    # The servers of a test run on this machine.
    assert abs(first - timeutils.utcnow()) < timedelta(seconds=30)


def test_columns_default_to_the_database_time(engine: sa.Engine) -> None:
    # The clock of the host is off by an hour.
    with host_clock_off(3600):
        clock = UnitOfWork(engine).clock
        earlier = clock()
        rows.insert_card(engine)
        (device,) = rows.read(engine, schema.devices)
        rows.update(engine, schema.devices, device["id"], model="other")
        later = clock()
    (changed,) = rows.read(engine, schema.devices)
    error = timedelta(seconds=clock.error + 0.001)
    assert earlier - error <= device["created_at"] <= changed["updated_at"] <= later + error
    assert device["health_since"] >= earlier - error


def test_step_of_the_host_clock_has_no_effect(clock: DatabaseClock) -> None:
    earlier = clock()
    with host_clock_off(86400):
        assert clock() == earlier
        clock.measure()
        assert abs(clock() - earlier) < timedelta(seconds=30)


def test_sample_of_a_long_round_trip_is_rejected(
    sqlite_engine: sa.Engine, monotonic: Monotonic
) -> None:
    clock = DatabaseClock(Reader(sqlite_engine).connect, monotonic)
    first = clock.measure()
    # Each sample takes one step; the database answers in its middle.
    monotonic.step = 30.0
    monotonic.seconds = first.at - 2.5 * monotonic.step
    with count_statements(sqlite_engine, clock=True) as count:
        assert clock.measure() is first
        assert len(count) == 3


def test_small_correction_backwards_does_not_set_the_clock_back(
    sqlite_engine: sa.Engine, monotonic: Monotonic
) -> None:
    clock = DatabaseClock(Reader(sqlite_engine).connect, monotonic)
    clock()
    # The monotonic clock is ahead, by more than the duration of the test.
    monotonic.seconds += MAX_HOLD.total_seconds() * 0.9
    ahead = clock()
    clock.measure()
    assert clock() >= ahead
    monotonic.seconds += 3600
    far = clock()
    clock.measure()
    assert clock() < far


def test_refresh_measures_once_an_interval_and_survives_an_outage(
    sqlite_engine: sa.Engine, monotonic: Monotonic
) -> None:
    down = False

    @contextlib.contextmanager
    def connect() -> Iterator[sa.Connection]:
        if down:
            raise Unavailable("the database does not answer")
        with Reader(sqlite_engine).connect() as connection:
            yield connection

    clock = DatabaseClock(connect, monotonic)
    down = True
    with pytest.raises(Unavailable):
        clock()
    with pytest.raises(Unavailable):
        clock.refresh()
    down = False
    with count_statements(sqlite_engine, clock=True) as count:
        for _ in range(10):
            clock.refresh()
        assert len(count) == 1
        monotonic.seconds += INTERVAL
        clock.refresh()
        assert len(count) == 2
    down = True
    monotonic.seconds += INTERVAL
    earlier = clock()
    clock.refresh()
    assert clock() == earlier


def test_earliest_time_is_not_late_and_sends_no_statement(
    sqlite_engine: sa.Engine, monotonic: Monotonic
) -> None:
    clock = DatabaseClock(Reader(sqlite_engine).connect, monotonic)
    with count_statements(sqlite_engine, clock=True) as count:
        assert clock.earliest_at(monotonic.seconds) is None
        assert len(count) == 0
    estimate = clock.measure()
    with count_statements(sqlite_engine, clock=True) as count:
        earliest = clock.earliest_at(estimate.at + 60.0)
        assert earliest is not None
        late = estimate.moment + timedelta(seconds=60) - earliest
        assert late == timedelta(seconds=estimate.error_at(estimate.at + 60.0))
        monotonic.seconds += MAX_AGE
        assert clock.earliest_at(monotonic.seconds) is not None
        monotonic.seconds += 1.0
        assert clock.earliest_at(monotonic.seconds) is None
        assert len(count) == 0
    clock.measure()
    assert clock.earliest_at(monotonic.seconds) is not None


def test_inexact_clock_gives_no_earliest_time(
    sqlite_engine: sa.Engine, monotonic: Monotonic
) -> None:
    clock = DatabaseClock(Reader(sqlite_engine).connect, monotonic)
    monotonic.step = 2.5 * MAX_ERROR
    assert clock.measure().error > MAX_ERROR
    monotonic.step = 0.0
    assert clock.earliest_at(monotonic.seconds) is None


class SteadyDatabase:
    """A database whose clock is as fast as the monotonic clock."""

    def __init__(self, monotonic: Monotonic) -> None:
        self._monotonic = monotonic

    def execute(self, query: Any) -> "SteadyDatabase":
        return self

    def scalar_one(self) -> datetime:
        return datetime(2030, 1, 31) + timedelta(seconds=self._monotonic.seconds)


def test_sample_that_confirms_the_estimate_renews_it(monotonic: Monotonic) -> None:
    database: Any = SteadyDatabase(monotonic)
    clock = DatabaseClock(lambda: contextlib.nullcontext(database), monotonic)
    first = clock.measure()
    # Samples of a slow network, which are less precise than the estimate at that age.
    monotonic.step = 0.8
    monotonic.seconds = first.at + MAX_AGE - 10.0
    assert clock.measure() is first
    monotonic.step = 0.0
    monotonic.seconds += 20.0
    assert clock.earliest_at(monotonic.seconds) is not None


@pytest.mark.slow
@pytest.mark.static
def test_no_service_module_reads_the_clock_of_its_host() -> None:
    """Check that services compare only the database's time; monotonic clocks measure durations."""
    root = Path(cyborg.__file__).parent
    findings = []
    for path in sorted(path for name in PACKAGES for path in (root / name).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        # Few files have such a word at all; only they are parsed.
        suspect = any(name in source for name in WALL_CLOCKS)
        for node in ast.walk(ast.parse(source)) if suspect else ():
            # As a call or as a value, such as a parameter's default.
            if isinstance(node, ast.Attribute) and node.attr in WALL_CLOCKS:
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if name in TIME_MODULES:
                    findings.append(f"{path.relative_to(root)}:{node.lineno} {name}.{node.attr}")
            elif isinstance(node, ast.ImportFrom) and node.module in (
                "time",
                "oslo_utils.timeutils",
            ):
                names = {alias.name for alias in node.names} & WALL_CLOCKS
                findings += [f"{path.relative_to(root)}:{node.lineno} {name}" for name in names]
    assert findings == []
