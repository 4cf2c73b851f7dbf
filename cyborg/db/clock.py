# SPDX-License-Identifier: Apache-2.0
"""The database's time: the one clock of all conductors and APIs of an installation.

One process writes deadlines, leases and last-seen times and another compares them. No process uses
the clock of its own host, so the hosts' clocks may differ.

::

    utcnow()          in a statement, such as the default of a column
    DatabaseClock     in a process, without a statement
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from cyborg.core.clock import MAX_ROUND_TRIP, Estimate, estimate, is_better
from cyborg.core.errors import Unavailable
from cyborg.core.log import get_logger

LOG = get_logger(__name__)

# Seconds between two measurements.
INTERVAL = 20.0

# Maximum number of statements of one measurement. Another follows only a long round trip.
SAMPLES = 3

# Seconds; the largest error of a time that bounds the work of another process.
MAX_ERROR = 1.0

# Seconds since the last measurement after which no such time is given.
MAX_AGE = 3 * INTERVAL

# Largest backward correction that is hidden: the clock stops instead of going back.
MAX_HOLD = timedelta(seconds=1)


class utcnow(FunctionElement[datetime]):
    """SQL function that returns the database's time, naive UTC."""

    type = sa.DateTime()
    inherit_cache = True


@compiles(utcnow, "postgresql")
def _postgresql(element: Any, compiler: Any, **options: Any) -> str:
    # Not now(), which is the start of the transaction.
    return "timezone('utc', clock_timestamp())"


@compiles(utcnow, "mysql")
@compiles(utcnow, "mariadb")
def _mysql(element: Any, compiler: Any, **options: Any) -> str:
    return "UTC_TIMESTAMP(6)"


@compiles(utcnow, "sqlite")
def _sqlite(element: Any, compiler: Any, **options: Any) -> str:
    # The format in which SQLAlchemy writes datetimes: comparing the texts compares the times.
    return "strftime('%Y-%m-%d %H:%M:%f000', 'now')"


# The execution option that marks the statement of a measurement.
MEASUREMENT = "cyborg_clock"

_QUERY = sa.select(utcnow()).execution_options(**{MEASUREMENT: True})


class DatabaseClock:
    """Callable that returns the database's time, naive UTC. Thread-safe.

    Only the first call sends a statement; ``measure`` and ``refresh`` keep the clock accurate.
    Raise Unavailable if the database has never answered. ``earliest_at`` sends none at all.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractContextManager[sa.Connection]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``connect`` returns a connection in autocommit mode."""
        self._connect = connect
        self._monotonic = monotonic
        self._lock = threading.Lock()
        # One thread measures at a time. Others read the estimate without a lock: it is one value.
        self._measuring = threading.Lock()
        self._estimate: Estimate | None = None
        self._last = datetime.min
        self._tried_at = float("-inf")
        self._measured_at = float("-inf")

    def __call__(self) -> datetime:
        """Return the database's time."""
        current = self._estimate
        if current is None:
            current = self.measure()
        with self._lock:
            now = current.time_at(self._monotonic())
            # A larger step back is a clock that was set: to hide it would stop the clock for long.
            if timedelta() < self._last - now <= MAX_HOLD:
                return self._last
            self._last = now
            return now

    @property
    def error(self) -> float:
        """Return the maximum error in seconds, infinity before the first measurement."""
        current = self._estimate
        return float("inf") if current is None else current.error_at(self._monotonic())

    def earliest_at(self, moment: float) -> datetime | None:
        """Return the earliest time that the database can have at a reading of the monotonic clock.

        Return None without a recent and accurate measurement. This never waits: a process that
        needs it calls ``measure`` periodically.
        """
        current, now = self._estimate, self._monotonic()
        if current is None or now - self._measured_at > MAX_AGE:
            return None
        if current.error_at(now) > MAX_ERROR:
            return None
        return current.time_at(moment) - timedelta(seconds=current.error_at(moment))

    def measure(self) -> Estimate:
        """Query the database's time; return the new estimate, or the old one if it is better.

        Raise Unavailable.
        """
        with self._measuring:
            self._tried_at = self._monotonic()
            with self._connect() as connection:
                samples: list[Estimate] = []
                while len(samples) < SAMPLES:
                    samples.append(self._sample(connection))
                    # The error is half of the round trip.
                    if 2 * samples[-1].error <= MAX_ROUND_TRIP:
                        break
            # The shortest round trip has the smallest error.
            best = min(samples, key=lambda sample: sample.error)
            previous = self._estimate
            if previous is not None and not is_better(best, previous):
                self._measured_at = best.at  # the sample agrees with the estimate
                return previous
            self._estimate, self._measured_at = best, best.at
        if previous is not None:
            _log_step(best, previous)
        return best

    def refresh(self) -> None:
        """Measure if the last attempt is INTERVAL old and no other thread is measuring.

        Use this in a process without a periodic task that calls ``measure``. If the database is
        down, keep the last estimate. If there is no estimate, raise Unavailable.
        """
        if self._estimate is None:
            self.measure()
            return
        if self._monotonic() - self._tried_at < INTERVAL or self._measuring.locked():
            return
        try:
            self.measure()
        except Unavailable as exc:
            LOG.warning(
                "Cannot measure the database's clock, keeping the last estimate: %s", exc.message
            )

    def _sample(self, connection: sa.Connection) -> Estimate:
        sent = self._monotonic()
        now = connection.execute(_QUERY).scalar_one()
        return estimate(now, sent, self._monotonic())


def _log_step(new: Estimate, previous: Estimate) -> None:
    step = (new.moment - previous.time_at(new.at)).total_seconds()
    if abs(step) > new.error + previous.error_at(new.at) + MAX_HOLD.total_seconds():
        LOG.warning(
            "The database's clock jumped by %+.1f s, which shifts deadlines and leases; check that "
            "the clocks of the database servers are synchronised",
            step,
        )
