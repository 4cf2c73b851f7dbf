# SPDX-License-Identifier: Apache-2.0
"""Due times of event batches."""

from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.clock import MAX_DELAY, QUIET_PERIOD, EventBatch, add, affects, mark_overflow

PCI, NET = frozenset({"pci"}), frozenset({"net"})
PAUSES = st.lists(st.floats(0, 1), min_size=1, max_size=40)


def test_event_batch_single_event_due_after_quiet_period() -> None:
    burst = add(None, 5.0, "pci")
    assert burst == EventBatch(5.0, 5.0, PCI, 1)
    assert burst.due == 5.0 + QUIET_PERIOD


def test_event_batch_continuous_events_due_after_max_delay() -> None:
    burst = None
    for tenth in range(20):
        burst = add(burst, 5.0 + tenth / 20, "pci")
    assert burst is not None
    assert burst.due == 5.0 + MAX_DELAY


def test_affects_subscribed_subsystems_or_overflow() -> None:
    burst = add(None, 0.0, "pci")
    assert affects(burst, PCI)
    assert not affects(burst, NET)
    assert affects(add(burst, 0.0, "net"), NET)
    overflowed = mark_overflow(None, 0.0)
    assert affects(overflowed, NET)
    assert not affects(overflowed, frozenset()), "who watches nothing is left in peace"


@given(PAUSES)
def test_event_batch_due_within_limits(pauses: list[float]) -> None:
    """A batch is due at most MAX_DELAY after its first event, and not before the quiet period."""
    now, burst = 0.0, add(None, 0.0, "pci")
    for number, pause in enumerate(pauses):
        now += pause
        after = (mark_overflow if number % 3 == 2 else lambda b, t: add(b, t, "pci"))(burst, now)
        assert after.due >= burst.due
        assert after.first <= after.due <= after.first + MAX_DELAY
        assert after.overflow or not burst.overflow
        burst = after
    assert burst.events == 1 + sum(number % 3 != 2 for number in range(len(pauses)))
