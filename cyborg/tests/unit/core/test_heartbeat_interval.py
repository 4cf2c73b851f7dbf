# SPDX-License-Identifier: Apache-2.0
"""Interval of the heartbeats of agents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.hosts import HEARTBEAT_COST, MAX_CORES, choose_interval

AGENTS = st.integers(0, 10**6)
PROCESSES = st.integers(0, 100)
SECONDS = st.floats(0.1, 3600)


@pytest.mark.parametrize(
    ("agents", "processes", "interval"),
    [
        (0, 0, 10.0),
        (1000, 1, 10.0),
        (2000, 1, 12.0),
        (2000, 2, 10.0),
        (10_000, 4, 15.0),
        (10_000, 2, 30.0),
        (10_000, 1, 30.0),
    ],
)
def test_interval_for_number_of_agents(agents: int, processes: int, interval: float) -> None:
    assert choose_interval(agents, processes, 10.0, 30.0) == pytest.approx(interval)


@given(AGENTS, PROCESSES, SECONDS, SECONDS)
def test_interval_is_within_its_bounds(
    agents: int, processes: int, minimum: float, maximum: float
) -> None:
    interval = choose_interval(agents, processes, minimum, maximum)
    assert minimum <= interval <= max(minimum, maximum)


@given(AGENTS, PROCESSES, SECONDS, SECONDS)
def test_interval_below_its_maximum_limits_the_load_of_a_process(
    agents: int, processes: int, minimum: float, maximum: float
) -> None:
    interval = choose_interval(agents, processes, minimum, maximum)
    cores = agents * HEARTBEAT_COST / interval / max(1, processes)
    assert cores <= MAX_CORES * (1 + 1e-9) or interval == max(minimum, maximum)


@given(AGENTS, AGENTS, PROCESSES, PROCESSES)
def test_interval_grows_with_agents_and_falls_with_processes(
    agents: int, more_agents: int, processes: int, more_processes: int
) -> None:
    interval = choose_interval(agents, processes, 10.0, 30.0)
    assert choose_interval(agents + more_agents, processes, 10.0, 30.0) >= interval
    assert choose_interval(agents, processes + more_processes, 10.0, 30.0) <= interval
