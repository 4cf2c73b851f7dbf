# SPDX-License-Identifier: Apache-2.0
"""Whether a service that has spoken is still there, and whether we are the ones to say so."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

_START = datetime(1970, 1, 1)  # naive, as the moments of the database are


class Liveness(StrEnum):
    """What the last hello says of a service: ``state`` in the listing of services."""

    UP = "up"
    LATE = "late"
    DOWN = "down"


def limit(interval_seconds: float, missed: int) -> timedelta:
    """Return the silence in which that many hellos are missed.

    A hello counts as missed when a whole interval has passed without it.
    """
    return timedelta(seconds=interval_seconds) * (missed + 1)


def judge(
    last_seen: datetime,
    now: datetime,
    interval_seconds: float,
    late_after: int,
    down_after: int,
) -> Liveness:
    """Judge by the hellos missed: ``late_after`` of them make it late, ``down_after`` down.

    A last hello in the future, which a step of the clock can make, is up.
    """
    silent = now - last_seen
    if silent >= limit(interval_seconds, down_after):
        return Liveness.DOWN
    if silent >= limit(interval_seconds, late_after):
        return Liveness.LATE
    return Liveness.UP


@dataclass(frozen=True, slots=True)
class Hearing:
    """Since when one conductor has heard its own hellos come back by the bus, without a break.

    ``since`` and ``last`` are the first and the last of these hellos, in seconds of a clock that
    only counts up. ``lead`` is by how much the wall clock was ahead of that clock at the last.
    """

    since: float
    last: float
    lead: float


def lead(clock: float, now: datetime) -> float:
    """Return by how many seconds the wall clock, naive UTC, is ahead of the one that counts."""
    return (now - _START).total_seconds() - clock


def heard(before: Hearing | None, clock: float, now: datetime, gap: float, step: float) -> Hearing:
    """Return what is known after one more hello has come back.

    More than ``gap`` seconds since the one before, or a step of the wall clock by more than
    ``step`` seconds, is a break: all counts from here.
    """
    ahead = lead(clock, now)
    if before is None or not _unbroken(before, clock, ahead, gap, step):
        return Hearing(clock, clock, ahead)
    return Hearing(before.since, clock, ahead)


def may_judge(
    hearing: Hearing | None, clock: float, now: datetime, gap: float, step: float, window: float
) -> bool:
    """Tell whether another's silence is its own: whether we could have heard it all the time.

    That is so when our own hellos went the same way and came back, without a break, for the whole
    ``window`` (seconds).
    """
    if hearing is None or not _unbroken(hearing, clock, lead(clock, now), gap, step):
        return False
    return hearing.last - hearing.since >= window


def _unbroken(hearing: Hearing, clock: float, ahead: float, gap: float, step: float) -> bool:
    return clock - hearing.last <= gap and abs(ahead - hearing.lead) <= step
