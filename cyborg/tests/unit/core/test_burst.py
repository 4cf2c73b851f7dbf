# SPDX-License-Identifier: Apache-2.0
"""When events that come together are answered."""

from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.burst import LONGEST, QUIET, Burst, concerns, heard, missed

PCI, NET = frozenset({"pci"}), frozenset({"net"})
PAUSES = st.lists(st.floats(0, 1), min_size=1, max_size=40)


def test_a_single_event_waits_for_a_quiet_moment() -> None:
    burst = heard(None, 5.0, "pci")
    assert burst == Burst(5.0, 5.0, PCI, 1)
    assert burst.due == 5.0 + QUIET


def test_events_without_end_are_answered_all_the_same() -> None:
    burst = None
    for tenth in range(20):
        burst = heard(burst, 5.0 + tenth / 20, "pci")
    assert burst is not None
    assert burst.due == 5.0 + LONGEST


def test_whose_business_it_is() -> None:
    burst = heard(None, 0.0, "pci")
    assert concerns(burst, PCI)
    assert not concerns(burst, NET)
    assert concerns(heard(burst, 0.0, "net"), NET)
    lost = missed(None, 0.0)
    assert concerns(lost, NET)
    assert not concerns(lost, frozenset()), "who watches nothing is left in peace"


@given(PAUSES)
def test_nothing_is_answered_early_and_nothing_late(pauses: list[float]) -> None:
    """Whatever the pauses: no more than LONGEST after the first, and not before the last is due."""
    now, burst = 0.0, heard(None, 0.0, "pci")
    for number, pause in enumerate(pauses):
        now += pause
        after = (missed if number % 3 == 2 else lambda b, t: heard(b, t, "pci"))(burst, now)
        assert after.due >= burst.due
        assert after.first <= after.due <= after.first + LONGEST
        assert after.lost or not burst.lost
        burst = after
    assert burst.events == 1 + sum(number % 3 != 2 for number in range(len(pauses)))
