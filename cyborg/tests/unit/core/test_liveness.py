# SPDX-License-Identifier: Apache-2.0
"""Up, late and down; and whether it is for us to say."""

from datetime import UTC, datetime, timedelta
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.liveness import Hearing, Liveness, heard, judge, limit, may_judge

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("silent", "state"),
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
def test_missed_hellos_decide(silent: float, state: Liveness) -> None:
    assert judge(NOW - timedelta(seconds=silent), NOW, 10.0, 2, 6) is state


@given(st.floats(0, 1000), st.floats(0, 1000))
def test_silence_never_makes_better(one: float, two: float) -> None:
    order = list(Liveness)
    less, more = sorted((one, two))
    first, second = (judge(NOW - timedelta(seconds=s), NOW, 10.0, 2, 6) for s in (less, more))
    assert order.index(first) <= order.index(second)


START = datetime(2026, 1, 1)
GAP, STEP, WINDOW = 30.0, 10.0, 145.0


def hear(*moments: tuple[float, float]) -> Hearing | None:
    """Hear hellos at moments of the clock that counts, the other one being so much ahead."""
    hearing: Hearing | None = None
    for at, wrong in moments:
        hearing = heard(hearing, at, START + timedelta(seconds=at + wrong), GAP, STEP)
    return hearing


def may(hearing: Hearing | None, at: float, wrong: float = 0.0) -> bool:
    return may_judge(hearing, at, START + timedelta(seconds=at + wrong), GAP, STEP, WINDOW)


def test_the_limit_is_that_of_the_judgement() -> None:
    for silent in (69.999, 70.0):
        down = timedelta(seconds=silent) >= limit(10.0, 6)
        assert down == (judge(NOW - timedelta(seconds=silent), NOW, 10.0, 2, 6) is Liveness.DOWN)


def test_who_has_not_heard_itself_judges_nobody() -> None:
    assert not may(None, 10**9)
    assert not may(hear((0, 0)), 0)


def test_who_heard_itself_for_the_whole_window_judges() -> None:
    assert not may(hear(*((at, 0) for at in range(0, 150, 10))), 141)
    assert may(hear(*((at, 0) for at in range(0, 160, 10))), 151)


@pytest.mark.parametrize(
    ("moments", "at", "wrong"),
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
def test_a_break_ends_the_right_to_judge(
    moments: list[tuple[float, float]], at: float, wrong: float
) -> None:
    assert not may(hear(*moments), at, wrong)


@given(
    st.lists(st.tuples(st.floats(0.1, 60), st.floats(-30, 30)), max_size=40),
    st.floats(0, 60),
)
def test_within_the_window_of_a_break_nobody_is_judged(
    steps: list[tuple[float, float]], later: float
) -> None:
    """Whatever happened: a judgement needs a stretch without a break that fills the window."""
    times = list(accumulate((pause for pause, _ in steps), initial=0.0))
    wrongs = list(accumulate((wrong for _, wrong in steps), initial=0.0))
    began = 0.0
    for (pause, wrong), at in zip(steps, times[1:], strict=True):
        if pause > GAP + 0.001 or abs(wrong) > STEP + 0.001:
            began = at
    at = times[-1] + later
    if may(hear(*zip(times, wrongs, strict=True)), at, wrongs[-1]):
        assert at - began >= WINDOW
        assert later <= GAP + 0.001
