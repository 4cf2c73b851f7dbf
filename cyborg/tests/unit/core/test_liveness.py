# SPDX-License-Identifier: Apache-2.0
"""Up, late and down."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.liveness import Liveness, judge

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
