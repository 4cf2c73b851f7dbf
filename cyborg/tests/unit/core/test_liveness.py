# SPDX-License-Identifier: Apache-2.0
"""Liveness of services, and the self-check of conductors."""

from datetime import UTC, datetime, timedelta
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.hosts import (
    Liveness,
    SelfCheck,
    evaluate,
    heartbeat_timeout,
    observed_seconds,
    record,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def evaluate_after(seconds: float) -> Liveness:
    """Return the liveness some seconds after a heartbeat, with an interval of 10 s."""
    late_at, down_at = (NOW + heartbeat_timeout(10.0, missed) for missed in (2, 6))
    return evaluate(late_at, down_at, NOW + timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("gap", "state"),
    [
        (-5, Liveness.UP),
        (0, Liveness.UP),
        (29.9, Liveness.UP),
        (30, Liveness.LATE),
        (69.9, Liveness.LATE),
        (70, Liveness.DOWN),
        (10**6, Liveness.DOWN),
    ],
)
def test_evaluate_missed_heartbeats_set_liveness(gap: float, state: Liveness) -> None:
    assert evaluate_after(gap) is state


@given(st.floats(0.1, 600), st.integers(1, 10), st.integers(1, 10), st.floats(0, 10000))
def test_evaluate_counts_missed_intervals_of_the_service(
    interval: float, late: int, more: int, gap: float
) -> None:
    """A service that was given a longer interval has later deadlines."""
    late_at, down_at = (NOW + heartbeat_timeout(interval, n) for n in (late, late + more))
    now = NOW + timedelta(seconds=gap)
    missed = (now - NOW) / timedelta(seconds=interval) - 1
    found = evaluate(late_at, down_at, now)
    if abs(missed - round(missed)) > 1e-3:
        up, down = missed < late, missed >= late + more
        assert found is (Liveness.UP if up else Liveness.DOWN if down else Liveness.LATE)


@given(st.floats(0, 1000), st.floats(0, 1000))
def test_evaluate_longer_gap_never_improves_liveness(left: float, right: float) -> None:
    order = list(Liveness)
    shorter, longer = sorted((left, right))
    first, second = evaluate_after(shorter), evaluate_after(longer)
    assert order.index(first) <= order.index(second)


START = datetime(2026, 1, 1)
GAP, STEP, WINDOW = 30.0, 10.0, 145.0


def record_heartbeats(*moments: tuple[float, float]) -> SelfCheck | None:
    """Return the self-check after heartbeats at (monotonic clock, offset of the wall clock)."""
    check: SelfCheck | None = None
    for at, offset in moments:
        check = record(check, at, START + timedelta(seconds=at + offset), GAP, STEP)
    return check


def may_declare_down(check: SelfCheck | None, at: float, offset: float = 0.0) -> bool:
    now = START + timedelta(seconds=at + offset)
    return observed_seconds(check, at, now, GAP, STEP) >= WINDOW


def test_observed_seconds_without_self_check_is_zero() -> None:
    assert not may_declare_down(None, 10**9)
    assert not may_declare_down(record_heartbeats((0, 0)), 0)


def test_observed_seconds_after_whole_window_is_enough() -> None:
    assert not may_declare_down(record_heartbeats(*((at, 0) for at in range(0, 150, 10))), 141)
    assert may_declare_down(record_heartbeats(*((at, 0) for at in range(0, 160, 10))), 151)


@pytest.mark.parametrize(
    ("moments", "at", "offset"),
    [
        pytest.param([(at, 0) for at in range(0, 1000, 10)], 1030, 0, id="we are silent now"),
        pytest.param(
            [(at, 0) for at in (*range(0, 1000, 10), *range(4600, 4740, 10))], 4731, 0, id="we were"
        ),
        pytest.param([(at, 0) for at in range(0, 1000, 10)], 991, 3600, id="the clock has stepped"),
        pytest.param([(at, 0) for at in range(0, 1000, 10)], 991, -3600, id="... back"),
        pytest.param(
            [(at, 0 if at < 900 else 3600) for at in range(0, 1000, 10)], 991, 3600, id="... before"
        ),
    ],
)
def test_observed_seconds_after_gap_is_too_short(
    moments: list[tuple[float, float]], at: float, offset: float
) -> None:
    assert not may_declare_down(record_heartbeats(*moments), at, offset)


@given(
    st.lists(st.tuples(st.floats(0.1, 60), st.floats(-30, 30)), max_size=40),
    st.floats(0, 60),
)
def test_observed_seconds_starts_again_after_gap(
    steps: list[tuple[float, float]], later: float
) -> None:
    """True only after a period without a gap that fills the window."""
    times = list(accumulate((pause for pause, _ in steps), initial=0.0))
    wrongs = list(accumulate((offset for _, offset in steps), initial=0.0))
    began = 0.0
    for (pause, offset), at in zip(steps, times[1:], strict=True):
        if pause > GAP + 0.001 or abs(offset) > STEP + 0.001:
            began = at
    at = times[-1] + later
    if may_declare_down(record_heartbeats(*zip(times, wrongs, strict=True)), at, wrongs[-1]):
        assert at - began >= WINDOW
        assert later <= GAP + 0.001
