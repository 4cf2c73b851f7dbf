# SPDX-License-Identifier: Apache-2.0
"""Estimates of the database's time, which all conductors and APIs use to compare timestamps.

A sample queries the database's time. The estimate assumes that the database read its clock in the
middle between sending and receiving, so its error is half the round trip at most. Between two
samples the time passed on the local monotonic clock is added, so that a step of the host's wall
clock has no effect.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

MAX_ROUND_TRIP = 0.1
"""Seconds; a sample with at most this round trip is always used."""

MAX_DRIFT = 0.001
"""Seconds of additional difference between the two clocks per second: twice NTP's slew rate."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One sample: the database's time was ``moment`` when the monotonic clock was ``at``.

    ``moment`` is naive UTC, ``at`` is in seconds. ``error`` is the largest possible error of
    ``moment``, in seconds.
    """

    moment: datetime
    at: float
    error: float

    def time_at(self, clock: float) -> datetime:
        """Return the database's time at a reading of the monotonic clock."""
        return self.moment + timedelta(seconds=clock - self.at)

    def error_at(self, clock: float) -> float:
        """Return the largest possible error of ``time_at``, in seconds; it grows with time."""
        return self.error + MAX_DRIFT * abs(clock - self.at)


def estimate(moment: datetime, sent: float, received: float) -> Estimate:
    """Return the estimate from the answer ``moment`` of the database.

    ``sent`` and ``received`` are the times of the query and of the answer, in seconds of the
    monotonic clock.
    """
    return Estimate(moment, (sent + received) / 2, (received - sent) / 2)


def is_better(new: Estimate, current: Estimate | None) -> bool:
    """Return whether a new sample replaces the current estimate.

    A sample with a short round trip always does. Another sample does only if it is more precise, or
    if the two differ by more than their errors: then the clock of the database was set.
    """
    if current is None or 2 * new.error <= MAX_ROUND_TRIP:
        return True
    allowed = current.error_at(new.at)
    apart = abs((new.moment - current.time_at(new.at)).total_seconds())
    return new.error <= allowed or apart > new.error + allowed
