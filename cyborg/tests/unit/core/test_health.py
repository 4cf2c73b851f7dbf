# SPDX-License-Identifier: Apache-2.0
"""What measurements come to, and when a sick device is well again."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.device import Health
from cyborg.core.health import WELL, Measurement, Sick, settle, worst

QUIET = 60.0
SICK = Measurement(Health.UNHEALTHY, "link down")
UNKNOWN = Measurement(Health.UNKNOWN, "no answer")
MEASUREMENTS = st.builds(
    Measurement, st.sampled_from(Health), st.none() | st.sampled_from(["", "hot", "link", "bus"])
)
RANK = [Health.OK, Health.UNKNOWN, Health.UNHEALTHY]
# Pairs of a pause before a measurement, and the measurement.
STORIES = st.lists(st.tuples(st.floats(0, 100), MEASUREMENTS), max_size=30)


def test_the_worst_comes_first_and_nothing_is_lost() -> None:
    narrow = Measurement(Health.OK, "narrow")
    assert worst([]) == WELL
    assert worst([narrow, WELL]) == narrow
    assert worst([narrow, SICK, UNKNOWN, SICK]) == Measurement(
        Health.UNHEALTHY, "link down; no answer; narrow"
    )


@given(st.lists(MEASUREMENTS, max_size=6))
def test_the_worst_wins_and_every_reason_is_told_once(measured: list[Measurement]) -> None:
    found = worst(measured)
    assert found.health == max((m.health for m in measured), key=RANK.index, default=Health.OK)
    told = [] if found.reason is None else found.reason.split("; ")
    assert sorted(told) == sorted({m.reason for m in measured if m.reason})


@given(st.lists(MEASUREMENTS, max_size=4), st.lists(MEASUREMENTS, max_size=4))
def test_measurements_may_be_combined_in_groups(
    some: list[Measurement], others: list[Measurement]
) -> None:
    assert worst([worst(some), worst(others)]).health == worst([*some, *others]).health


def play(
    story: Sequence[tuple[float, Measurement]],
) -> list[tuple[float, Measurement, Measurement]]:
    """Return when each measurement was, what it was, and what was shown."""
    sick: Sick | None = None
    now, told = 0.0, []
    for pause, measured in story:
        now += pause
        sick, shown = settle(sick, measured, now, QUIET)
        assert (sick is not None) == (shown.health is Health.UNHEALTHY)
        told.append((now, measured, shown))
    return told


@given(STORIES)
def test_the_sick_show_at_once_and_reopen_only_after_the_quiet_time(
    story: list[tuple[float, Measurement]],
) -> None:
    well_since: float | None = None
    ill = False
    for now, measured, shown in play(story):
        if measured.health is Health.UNHEALTHY:
            ill, well_since = True, None
            assert shown == measured
        elif not ill:
            assert shown == measured
        elif measured.health is Health.UNKNOWN:
            well_since = None
            assert shown.health is Health.UNHEALTHY
        else:
            well_since = now if well_since is None else well_since
            ill = now - well_since < QUIET
            assert shown == (measured if not ill else shown)
            assert (shown.health is Health.UNHEALTHY) == ill


@given(st.lists(st.floats(0, 5), max_size=10))
def test_what_is_watched_is_told_in_the_same_words_at_each_look(pauses: list[float]) -> None:
    told = {shown for _, _, shown in play([(0.0, SICK), *((p, WELL) for p in pauses)])[1:]}
    assert len(told) <= 1


def test_it_is_told_that_a_device_is_watched_and_why() -> None:
    _, (_, _, shown) = play([(0.0, SICK), (5.0, WELL)])
    assert shown.reason == "well now, watched until it has been so for 60 s; was: link down"


@pytest.mark.parametrize("quiet", [0.0, 0.5])
def test_the_quiet_time_may_be_nothing(quiet: float) -> None:
    sick, _ = settle(None, SICK, 1.0, quiet)
    sick, shown = settle(sick, WELL, 2.0, quiet)
    assert (shown == WELL) == (quiet == 0.0)
