# SPDX-License-Identifier: Apache-2.0
"""Heartbeats go on in their interval while the inventory changes; reports have a bounded rate."""

import pytest

from cyborg.agent.backends.backend import BackendSnapshot
from cyborg.agent.report.heartbeat import BURST, MIN_PAUSE, HeartbeatSchedule, Reporter, ReportPace
from cyborg.core.errors import Unavailable
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.tests.fixtures.hosts.scripted_driver import ScriptedDriver, card
from cyborg.tests.unit.agent.report.test_heartbeat import Clock, Direct

READY = BackendState("b0", "puppet", BackendStatus.READY)
INTERVAL = 10.0


class ChangingBackend:
    """A backend whose snapshot differs each time."""

    def __init__(self) -> None:
        self.driver = ScriptedDriver()
        self.name = "b0"
        self.looks = 0

    @property
    def snapshot(self) -> BackendSnapshot:
        self.looks += 1
        return BackendSnapshot(READY, (card(f"0000:{self.looks % 200:02x}:00.0"),))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def conductor() -> Direct:
    conductor = Direct()
    conductor.interval = INTERVAL
    return conductor


@pytest.fixture
def backend() -> ChangingBackend:
    return ChangingBackend()


@pytest.fixture
def reporter(conductor: Direct, backend: ChangingBackend, clock: Clock) -> Reporter:
    schedule = HeartbeatSchedule(random_share=lambda: 1.0)
    return Reporter("h", "e", conductor, [backend], clock, schedule=schedule)  # type: ignore[list-item]


def run(reporter: Reporter, clock: Clock, seconds: float, *, wake_every: float) -> list[float]:
    """Play the reporter's thread, woken by a backend again and again; return the pauses."""
    end, pauses = clock.now + seconds, []
    while clock.now < end:
        pauses.append(reporter.run_once())
        clock.now += min(wake_every, pauses[-1])
    return pauses


def test_reporter_inventory_always_changing_sends_heartbeats(
    reporter: Reporter, conductor: Direct, clock: Clock
) -> None:
    run(reporter, clock, 10 * INTERVAL, wake_every=0.5)
    assert conductor.names().count("hello") == 10


def test_reporter_discovery_faster_than_heartbeat_sends_heartbeats(
    reporter: Reporter, conductor: Direct, clock: Clock
) -> None:
    run(reporter, clock, 10 * INTERVAL, wake_every=INTERVAL * 0.9)
    assert 9 <= conductor.names().count("hello") <= 12


def test_reporter_inventory_always_changing_limits_reports(
    reporter: Reporter, conductor: Direct, clock: Clock
) -> None:
    run(reporter, clock, 20 * INTERVAL, wake_every=0.5)
    assert conductor.names().count("report") <= BURST + 20
    assert conductor.names()[: BURST + 1] == ["hello", *["report"] * BURST], "a burst is at once"


def test_reporter_delayed_report_has_latest_state(
    reporter: Reporter, conductor: Direct, clock: Clock, backend: ChangingBackend
) -> None:
    run(reporter, clock, INTERVAL, wake_every=0.5)
    assert conductor.names()[-1] == "report"
    clock.now += INTERVAL
    reporter.run_once()
    assert conductor.names()[-2:] == ["hello", "report"]
    (device,) = conductor.recorded[-1][1].devices
    assert device.address == f"0000:{backend.looks:02x}:00.0"


def test_reporter_outcome_waits_at_most_min_pause(
    reporter: Reporter, conductor: Direct, clock: Clock
) -> None:
    run(reporter, clock, INTERVAL * 0.6, wake_every=0.25)
    for number in range(10):
        reporter.add_job_outcome(f"j{number}", "done", None)
        before, pause = clock.now, reporter.run_once()
        while reporter.count_undelivered():
            clock.now += pause
            pause = reporter.run_once()
        assert clock.now - before <= MIN_PAUSE
        last = [name for name in conductor.names() if name != "hello"][-2:]
        assert last == ["report", "job_done"], "after the devices that it led to"


@pytest.mark.slow
def test_reporter_conductor_unreachable_keeps_outcomes(
    reporter: Reporter, conductor: Direct, clock: Clock
) -> None:
    reporter.run_once()
    for number in range(3000):
        reporter.add_job_outcome(f"j{number}", "done", None)
        reporter.add_discovery_outcome(f"d{number}", READY)
    conductor.errors = [Unavailable("away")] * 5
    for _ in range(8):
        clock.now += reporter.run_once()
    names = conductor.names()
    assert reporter.count_undelivered() == 0
    assert (names.count("job_done"), names.count("discovery_done")) == (3000, 3000)


def test_pace_idle_intervals_refill_burst() -> None:
    pace, now = ReportPace(), 0.0
    for _ in range(BURST):
        assert pace.next_report(now, INTERVAL, urgent=False) == now
        pace.sent(now)
    assert pace.next_report(now, INTERVAL, urgent=False) is None
    assert pace.next_report(now, INTERVAL, urgent=True) == now + MIN_PAUSE
    later = 2 * BURST * INTERVAL
    for _ in range(BURST):
        assert pace.next_report(later, INTERVAL, urgent=False) == later
        pace.sent(later)
    assert pace.next_report(later, INTERVAL, urgent=False) is None
