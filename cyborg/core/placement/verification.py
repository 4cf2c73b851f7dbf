# SPDX-License-Identifier: Apache-2.0
"""Schedule of the verification of resource providers: when, how many a round, and how thorough.

A cloud at rest costs one call to Placement for each host, once in DUE intervals. Every write of
inventories or traits raises the generation of a provider, so a provider with the generation of its
last comparison has not drifted, and only others are read. A name and a parent change without a
generation, but the list of a tree has both. A restored database may reach an old generation again
with other contents, so each provider is also read once in FULL_INTERVAL.
"""

import math
import zlib
from dataclasses import dataclass
from datetime import datetime, timedelta

EARLIEST = 0.75
"""Share of the interval after which a provider may be verified, to spread the calls evenly."""
DUE = 0.85
"""Share of the interval after which a provider is due."""
DRAIN = 0.1
"""Share of the interval in which all providers are verified if all are due at once."""
ROUNDS = 20
"""Rounds of an interval at least: DUE, DRAIN and the wait for a round are one interval."""
MAX_PERIOD = 10.0
"""Seconds between two rounds at most."""
FULL_INTERVAL = timedelta(days=1)
"""Time after which the contents of a provider are read although its generation is the same."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Numbers of providers that one round verifies at most: before they are due, and in all."""

    interval: float
    early: int
    total: int

    def next_batch(self, taken: int) -> tuple[timedelta, int] | None:
        """Return the minimum age and the maximum number of the next providers of the round.

        ``taken`` is the number of providers that the round has verified. Return None at its end.
        """
        if taken < self.early:
            return timedelta(seconds=EARLIEST * self.interval), self.early - taken
        if taken < self.total:
            return timedelta(seconds=DUE * self.interval), self.total - taken
        return None


def round_period(interval: float) -> float:
    """Return the seconds between two rounds for an interval of verification in seconds."""
    return min(MAX_PERIOD, interval / ROUNDS)


def plan_round(count: int, interval: float, elapsed: float) -> RoundPlan:
    """Return the plan of a round that starts ``elapsed`` seconds after the previous one.

    ``count`` is the number of providers. If each conductor follows its plans and Placement answers
    in time, no provider is older than ``interval`` seconds at any number of providers.
    """
    share = max(elapsed, round_period(interval)) / interval
    return RoundPlan(
        interval=interval,
        early=math.ceil(count * share / DUE),
        total=math.ceil(count * share / DRAIN),
    )


def is_comparison_due(uuid: str, compared_at: datetime | None, now: datetime) -> bool:
    """Return whether the contents of a provider must be read although nothing seems to change.

    The time differs between providers, so that those of one publication are not due at once.
    """
    if compared_at is None:
        return True
    spread = zlib.crc32(uuid.encode()) / 2**32
    return now - compared_at >= FULL_INTERVAL * (0.5 + 0.5 * spread)
