# SPDX-License-Identifier: Apache-2.0
"""The first heartbeats of an agent, and its attempts to reach a conductor."""

from cyborg.agent.backends.backend import Backend
from cyborg.agent.report.heartbeat import HeartbeatSchedule, Reporter
from cyborg.core.errors import Unavailable
from cyborg.tests.unit.agent.report.test_heartbeat import (
    Clock,
    Direct,
    backend,
    clock,
    conductor,
    driver,
    reporter,
)

__all__ = ["backend", "clock", "conductor", "driver", "reporter"]


def test_run_once_failures_pause_longer_with_a_long_interval(
    reporter: Reporter, conductor: Direct
) -> None:
    """After an outage of the broker, the attempts of many agents must be spread, too."""
    conductor.interval = 120.0
    reporter.run_once()
    conductor.errors = [Unavailable("away")] * 10
    assert 30.0 <= [reporter.run_once() for _ in range(10)][-1] <= 60.0


def test_run_once_after_restart_waits_a_part_of_the_interval(
    conductor: Direct, backend: Backend, clock: Clock
) -> None:
    intervals: list[float] = []
    shares = iter([0.5, 0.25])
    reporter = Reporter(
        "h",
        "e",
        conductor,
        [backend],
        clock,
        schedule=HeartbeatSchedule(40.0, lambda: next(shares)),
        record_interval=intervals.append,
    )
    conductor.interval = 60.0
    assert reporter.run_once() == 10.0
    clock.now += 4
    assert (reporter.run_once(), conductor.names()) == (6.0, [])
    clock.now += 6
    assert reporter.run_once() == 15.0, "a quarter of the interval"
    assert (conductor.names(), intervals) == (["hello", "report"], [60.0])
    clock.now += 15
    assert reporter.run_once() == 60.0


def test_run_once_after_restart_with_an_outcome_does_not_wait(
    conductor: Direct, backend: Backend, clock: Clock
) -> None:
    schedule = HeartbeatSchedule(40.0, lambda: 1.0)
    reporter = Reporter("h", "e", conductor, [backend], clock, schedule=schedule)
    assert reporter.run_once() == 20.0
    reporter.add_job_outcome("j", "done", None)
    reporter.run_once()
    assert conductor.names() == ["hello", "report", "job_done"]
