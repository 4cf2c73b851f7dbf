# SPDX-License-Identifier: Apache-2.0
"""The schedule of the verification of resource providers."""

from datetime import datetime, timedelta
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import placement

NOW = datetime(2026, 1, 1)


class Cloud:
    """Providers by their last verification, in seconds, and the calls that verify them."""

    def __init__(self, verified: list[float]) -> None:
        self.verified = sorted(verified)
        self.oldest = 0.0
        self.count = 0

    def run_round(self, now: float, elapsed: float, interval: float, batch: int) -> None:
        """Run a round of one conductor that leases up to ``batch`` providers at a time."""
        plan = placement.plan_round(len(self.verified), interval, elapsed)
        taken = 0
        while (limits := plan.next_batch(taken)) is not None:
            age, limit = limits[0].total_seconds(), min(limits[1], batch)
            chosen = [at for at in self.verified[:limit] if now - at >= age]
            if not chosen:
                break
            taken += len(chosen)
            self.oldest = max(self.oldest, now - chosen[0])
            self.verified = self.verified[len(chosen) :] + [now] * len(chosen)
        self.count += taken


@given(
    ages=st.lists(st.floats(0, placement.DUE), min_size=1, max_size=200),
    interval=st.floats(1, 100_000),
    conductors=st.integers(1, 3),
    batch=st.integers(1, 64),
)
def test_rounds_verify_each_provider_within_interval(
    ages: list[float], interval: float, conductors: int, batch: int
) -> None:
    cloud = Cloud([-age * interval for age in ages])
    period = placement.round_period(interval)
    rounds = 3 * max(placement.ROUNDS, min(200, int(interval / period)))
    for number in range(rounds):
        for _ in range(conductors):
            cloud.run_round(number * period, period, interval, batch)
    assert cloud.oldest <= interval * (1 + 1e-9)
    # Never too early.
    elapsed = rounds * period / interval
    assert cloud.count <= len(ages) * (elapsed / placement.EARLIEST + 1)


@pytest.mark.slow
def test_rounds_of_80_000_providers_are_spread_over_the_interval() -> None:
    """Published at once, verified in equal parts after some intervals: no burst of calls."""
    count, interval = 80_000, 600.0
    cloud = Cloud([0.0] * count)
    counts = []
    for number in range(1, 60 * 12):
        before = cloud.count
        cloud.run_round(number * 10.0, 10.0, interval, 512)
        counts.append(cloud.count - before)
    assert cloud.oldest <= interval
    # One in 60 providers has its turn in each round of 10 s.
    assert max(counts[-60:]) < 2 * count / 60


def test_round_after_pause_is_larger() -> None:
    assert placement.plan_round(1000, 600.0, 60.0).total == 1000
    assert placement.plan_round(1000, 600.0, 0.0).total == 167
    assert placement.plan_round(0, 600.0, 10.0).next_batch(0) is None


@given(seconds=st.floats(0, 200_000))
def test_comparison_is_due_once_a_day_at_least(seconds: float) -> None:
    uuid = str(uuid4())
    due = placement.is_comparison_due(uuid, NOW - timedelta(seconds=seconds), NOW)
    assert due or seconds < 86_400
    assert not due or seconds >= 43_200


def test_comparisons_of_one_publication_are_spread() -> None:
    at = NOW - timedelta(hours=18)
    due = sum(placement.is_comparison_due(str(uuid4()), at, NOW) for _ in range(1000))
    assert 300 < due < 700


def test_comparison_without_earlier_one_is_due() -> None:
    assert placement.is_comparison_due(str(uuid4()), None, NOW)


@pytest.mark.parametrize(("interval", "period"), [(600.0, 10.0), (1.0, 0.05), (86_400.0, 10.0)])
def test_round_period_is_short_enough(interval: float, period: float) -> None:
    assert placement.round_period(interval) == pytest.approx(period)
