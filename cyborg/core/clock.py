# SPDX-License-Identifier: Apache-2.0
"""Decisions about time: estimates of the database's time, and batches of kernel events."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

# Seconds; a sample with at most this round trip is always used.
MAX_ROUND_TRIP = 0.1

# Seconds of additional difference between the two clocks per second: twice NTP's slew rate.
MAX_DRIFT = 0.001


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
        # The drift before a sample is as unknown as that after it.
        return self.error + MAX_DRIFT * abs(clock - self.at)


def estimate(moment: datetime, sent: float, received: float) -> Estimate:
    """Return the estimate from the answer ``moment`` of the database.

    ``sent`` and ``received`` are the times of the query and of the answer, in seconds of the
    monotonic clock.
    """
    # As NTP does: the middle has the smallest possible error, whatever the way back took.
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


# Seconds without an event after which a batch is complete.
QUIET_PERIOD = 0.1

# Seconds after which a batch is complete even if events keep arriving.
MAX_DELAY = 0.5


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Kernel events that together cause one discovery: one added card causes several events.

    ``first`` and ``last`` are the times of the first and last event, in seconds of a monotonic
    clock. ``subsystems`` are the kernel subsystems of the events. ``overflow`` is set when events
    were dropped, so that their subsystems are unknown.
    """

    first: float
    last: float
    subsystems: frozenset[str] = frozenset()
    events: int = 0
    overflow: bool = False

    @property
    def due(self) -> float:
        """Return when the batch is complete, on the clock of ``first`` and ``last``."""
        return min(self.last + QUIET_PERIOD, self.first + MAX_DELAY)


def add(batch: EventBatch | None, now: float, subsystem: str) -> EventBatch:
    """Return the batch with one more event; None starts a new batch."""
    previous = batch or EventBatch(now, now)
    # ``first`` stays: otherwise a device that sends events for ever would never be discovered.
    return replace(
        previous,
        last=now,
        subsystems=previous.subsystems | {subsystem},
        events=previous.events + 1,
    )


def mark_overflow(batch: EventBatch | None, now: float) -> EventBatch:
    """Return the batch marked as having lost events; None starts a new batch."""
    return replace(batch or EventBatch(now, now), last=now, overflow=True)


def affects(batch: EventBatch, subsystems: frozenset[str]) -> bool:
    """Return whether a subscriber of these subsystems must run a discovery."""
    return bool(subsystems) and (batch.overflow or bool(subsystems & batch.subsystems))
