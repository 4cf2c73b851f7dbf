# SPDX-License-Identifier: Apache-2.0
"""Combination of health measurements, and hysteresis of the recovery."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_state import (
    HEALTHY,
    Measurement,
    Recovery,
    apply_hysteresis,
    combine,
)

QUIET = 60.0
SICK = Measurement(Health.UNHEALTHY, "link down")
UNKNOWN = Measurement(Health.UNKNOWN, "no answer")
MEASUREMENTS = st.builds(
    Measurement, st.sampled_from(Health), st.none() | st.sampled_from(["", "hot", "link", "bus"])
)
RANK = [Health.OK, Health.UNKNOWN, Health.UNHEALTHY]
# Pairs of a pause before a measurement, and the measurement.
STORIES = st.lists(st.tuples(st.floats(0, 100), MEASUREMENTS), max_size=30)


def test_combine_orders_reasons_by_health() -> None:
    narrow = Measurement(Health.OK, "narrow")
    assert combine([]) == HEALTHY
    assert combine([narrow, HEALTHY]) == narrow
    assert combine([narrow, SICK, UNKNOWN, SICK]) == Measurement(
        Health.UNHEALTHY, "link down; no answer; narrow"
    )


@given(st.lists(MEASUREMENTS, max_size=6))
def test_combine_has_worst_health_and_distinct_reasons(measured: list[Measurement]) -> None:
    combined = combine(measured)
    assert combined.health == max((m.health for m in measured), key=RANK.index, default=Health.OK)
    observed = [] if combined.reason is None else combined.reason.split("; ")
    assert sorted(observed) == sorted({m.reason for m in measured if m.reason})


@given(st.lists(MEASUREMENTS, max_size=4), st.lists(MEASUREMENTS, max_size=4))
def test_combine_is_associative(first: list[Measurement], second: list[Measurement]) -> None:
    assert combine([combine(first), combine(second)]).health == combine([*first, *second]).health


def play(
    story: Sequence[tuple[float, Measurement]],
) -> list[tuple[float, Measurement, Measurement]]:
    """Return (time, measurement, shown measurement) for each step."""
    recovery: Recovery | None = None
    now, observed = 0.0, []
    for pause, measured in story:
        now += pause
        recovery, published = apply_hysteresis(recovery, measured, now, QUIET)
        assert (recovery is not None) == (published.health is Health.UNHEALTHY)
        observed.append((now, measured, published))
    return observed


@given(STORIES)
def test_apply_hysteresis_unhealthy_until_recovery_window_passed(
    story: list[tuple[float, Measurement]],
) -> None:
    healthy_since: float | None = None
    unhealthy = False
    for now, measured, published in play(story):
        if measured.health is Health.UNHEALTHY:
            unhealthy, healthy_since = True, None
            assert published == measured
        elif not unhealthy:
            assert published == measured
        elif measured.health is Health.UNKNOWN:
            healthy_since = None
            assert published.health is Health.UNHEALTHY
        else:
            healthy_since = now if healthy_since is None else healthy_since
            unhealthy = now - healthy_since < QUIET
            assert published == (measured if not unhealthy else published)
            assert (published.health is Health.UNHEALTHY) == unhealthy


@given(st.lists(st.floats(0, 5), max_size=10))
def test_apply_hysteresis_reason_is_stable_during_recovery(pauses: list[float]) -> None:
    observed = {
        published for _, _, published in play([(0.0, SICK), *((p, HEALTHY) for p in pauses)])[1:]
    }
    assert len(observed) <= 1


def test_apply_hysteresis_recovery_reason_has_original_reason() -> None:
    _, (_, _, published) = play([(0.0, SICK), (5.0, HEALTHY)])
    assert (
        published.reason == "recovering, healthy again after 60 s without a fault; was: link down"
    )


@pytest.mark.parametrize("quiet", [0.0, 0.5])
def test_apply_hysteresis_without_recovery_window(quiet: float) -> None:
    recovery, _ = apply_hysteresis(None, SICK, 1.0, quiet)
    recovery, published = apply_hysteresis(recovery, HEALTHY, 2.0, quiet)
    assert (published == HEALTHY) == (quiet == 0.0)
