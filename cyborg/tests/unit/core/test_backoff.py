# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.backoff import pause

draws = st.floats(0.0, 1.0, exclude_max=True)
limits = st.floats(1.0, 3600.0)


@given(st.integers(0, 100_000), limits, draws)
def test_a_pause_is_bounded_on_both_sides(failures: int, longest: float, draw: float) -> None:
    middle = pause(failures, longest, 0.5)
    assert 1.0 <= middle <= longest
    assert 0.5 * middle <= pause(failures, longest, draw) <= 1.5 * middle


@given(st.integers(0, 100), limits)
def test_pauses_double_until_they_are_the_longest(failures: int, longest: float) -> None:
    before, after = (pause(n, longest, 0.5) for n in (failures, failures + 1))
    assert after in (2 * before, longest)
