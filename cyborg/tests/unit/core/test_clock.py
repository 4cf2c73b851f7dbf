# SPDX-License-Identifier: Apache-2.0
"""Estimates of the database's time from samples of different precision."""

from datetime import datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.clock import MAX_DRIFT, MAX_ROUND_TRIP, estimate, is_better

START = datetime(2026, 1, 1)
seconds = st.floats(min_value=0.0, max_value=1e6)
round_trips = st.floats(min_value=0.0, max_value=10.0)


@given(offset=seconds, sent=seconds, outbound=round_trips, inbound=round_trips, later=seconds)
def test_estimate_error_is_at_most_half_round_trip(
    offset: float, sent: float, outbound: float, inbound: float, later: float
) -> None:
    def true_time(clock: float) -> datetime:
        return START + timedelta(seconds=offset + clock)

    result = estimate(true_time(sent + outbound), sent, sent + outbound + inbound)
    error = abs((result.time_at(sent + later) - true_time(sent + later)).total_seconds())
    assert error <= result.error + 1e-5
    assert result.error_at(sent + later) >= result.error


def test_is_better_first_sample_is_used() -> None:
    assert is_better(estimate(START, 0.0, 30.0), None)


def test_is_better_short_round_trip_is_used() -> None:
    current = estimate(START, 0.0, 0.0)
    assert is_better(
        estimate(START + timedelta(seconds=1), 1.0, 1.0 + 0.9 * MAX_ROUND_TRIP), current
    )


def test_is_better_long_round_trip_is_used_after_drift_exceeds_error() -> None:
    current = estimate(START, 0.0, 0.01)
    slow = 2.0
    for age in (20.0, 0.9 * slow / 2 / MAX_DRIFT, 1.1 * slow / 2 / MAX_DRIFT):
        moment = START + timedelta(seconds=age + slow / 2)
        new = estimate(moment, age, age + slow)
        assert is_better(new, current) is (age * MAX_DRIFT > slow / 2)


def test_is_better_clock_step_of_database_is_used() -> None:
    current = estimate(START, 0.0, 0.01)
    assert is_better(estimate(START + timedelta(seconds=3600), 20.0, 22.0), current)
    assert is_better(estimate(START - timedelta(seconds=3600), 20.0, 22.0), current)
