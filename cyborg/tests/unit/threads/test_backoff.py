# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from cyborg.threads.failures import Backoff, compute_delay

draws = st.floats(0.0, 1.0, exclude_max=True)
limits = st.floats(1.0, 3600.0)


@given(st.integers(0, 100_000), limits, draws)
def test_compute_delay_is_bounded(failures: int, max_delay: float, jitter: float) -> None:
    middle = compute_delay(failures, max_delay, 0.5)
    assert 1.0 <= middle <= max_delay
    assert 0.5 * middle <= compute_delay(failures, max_delay, jitter) <= 1.5 * middle


@given(st.integers(0, 100), limits)
def test_compute_delay_doubles_up_to_max_delay(failures: int, max_delay: float) -> None:
    before, after = (compute_delay(n, max_delay, 0.5) for n in (failures, failures + 1))
    assert after in (2 * before, max_delay)


def test_backoff_doubles_up_to_maximum_and_starts_again_after_reset() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_delay() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next_delay() == 0.5


def test_backoff_with_jitter_cuts_up_to_half_of_the_delay() -> None:
    backoff = Backoff(1.0, 4.0, jitter=True)
    for middle in (1.0, 2.0, 4.0, 4.0):
        assert middle / 2 <= backoff.next_delay() <= middle
