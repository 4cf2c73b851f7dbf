# SPDX-License-Identifier: Apache-2.0
"""Discoveries after uevents, with a clock that only the source moves."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from cyborg.agent.backends.backend import Backend
from cyborg.agent.backends.uevents import INITIAL_PAUSE, MAX_PAUSE, EventsDropped, UeventWatcher
from cyborg.core.clock import MAX_DELAY, QUIET_PERIOD
from cyborg.tests.fixtures.hosts.scripted_driver import LONG, CallRecorder, ScriptedDriver
from cyborg.tests.fixtures.machine.log_lines import warnings_of

SOURCE_ERROR = OSError(9, "Bad file descriptor")
TimedEvent = tuple[float, str | Exception]


class CountingBackend(Backend):
    """Counts what it is rediscoveries for, and discovers nothing."""

    def __init__(self, *subsystems: str) -> None:
        class Subscriber(ScriptedDriver):
            UEVENT_SUBSYSTEMS = frozenset(subsystems)

        super().__init__(Subscriber(), 3600, 3600)
        self.rediscoveries = 0

    def rediscover(self, done: Any = None) -> None:
        """Count."""
        self.rediscoveries += 1


class FakeKernel:
    """Event source with scripted events; its ``read`` moves the clock."""

    def __init__(self, *events: TimedEvent) -> None:
        self.now = 0.0
        self.events = list(events)
        self.opened: list[frozenset[str]] = []
        self.closed = 0
        self.refuses: Exception | None = None

    def clock(self) -> float:
        return self.now

    def listen(self, subsystems: frozenset[str]) -> "FakeKernel":
        if self.refuses is not None:
            raise self.refuses
        self.opened.append(subsystems)
        return self

    def read(self, seconds: float | None) -> list[str]:
        due = self.now + (LONG if seconds is None else seconds)
        if not self.events or self.events[0][0] > due:
            self.now = due
            return []
        at, event = self.events.pop(0)
        self.now = max(self.now, at)
        if isinstance(event, Exception):
            raise event
        return [event]

    def wake(self) -> None:
        """Do nothing: no thread waits."""

    def close(self) -> None:
        self.closed += 1


def watch(kernel: FakeKernel, backends: Sequence[Backend]) -> UeventWatcher:
    return UeventWatcher(backends, kernel.listen, kernel.clock)


def run_until(watcher: UeventWatcher, kernel: FakeKernel, until: float) -> list[float]:
    """Poll until a time; return the pauses."""
    pauses = []
    while kernel.now < until:
        pause = watcher.run_once()
        kernel.now += pause
        if pause:
            pauses.append(pause)
    return pauses


def discovery_times(
    kernel: FakeKernel, backend: CountingBackend, until: float = 3.0
) -> list[float]:
    """Return the times of the rediscoveries, without the one after opening."""
    watcher = watch(kernel, [backend])
    assert watcher.open()
    times = []
    while kernel.now < until:
        before = backend.rediscoveries
        watcher.run_once()
        times += [kernel.now] * (backend.rediscoveries - before)
    return times


def test_run_once_burst_rediscovers_once() -> None:
    kernel = FakeKernel((1.0, "pci"), (1.05, "pci"), (1.12, "pci"), (2.0, "pci"))
    assert discovery_times(kernel, CountingBackend("pci")) == pytest.approx(
        [1.12 + QUIET_PERIOD, 2.0 + QUIET_PERIOD]
    )


def test_run_once_event_storm_rediscovers_periodically() -> None:
    storm = [(1.0 + n * QUIET_PERIOD / 2, "pci") for n in range(21)]  # a second long
    times = discovery_times(FakeKernel(*storm), CountingBackend("pci"))
    assert times[0] == pytest.approx(1.0 + MAX_DELAY)
    assert len(times) in (2, 3)
    assert times[-1] > storm[-1][0]


def test_run_once_rediscovers_only_subscribed_backends() -> None:
    cards, wires, unsubscribed = (
        CountingBackend("pci"),
        CountingBackend("net", "pci"),
        CountingBackend(),
    )
    kernel = FakeKernel((1.0, "net"), (2.0, "pci"))
    watcher = watch(kernel, [cards, wires, unsubscribed])
    watcher.open()
    run_until(watcher, kernel, 3.0)
    assert kernel.opened == [{"net", "pci"}]
    assert (cards.rediscoveries, wires.rediscoveries, unsubscribed.rediscoveries) == (1, 2, 0)


def test_run_once_events_dropped_rediscovers_all() -> None:
    cards, wires, unsubscribed = CountingBackend("pci"), CountingBackend("net"), CountingBackend()
    kernel = FakeKernel((1.0, "pci"), (1.01, EventsDropped()), (1.02, EventsDropped()))
    watcher = watch(kernel, [cards, wires, unsubscribed])
    watcher.open()
    assert run_until(watcher, kernel, 3.0) == []
    assert (cards.rediscoveries, wires.rediscoveries, unsubscribed.rediscoveries) == (1, 1, 0)
    assert (len(kernel.opened), kernel.closed) == (1, 0)


def test_run_once_source_fails_reopens_and_rediscovers_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = CountingBackend("net")
    kernel = FakeKernel((1.0, SOURCE_ERROR))
    watcher = watch(kernel, [backend])
    watcher.open()
    assert run_until(watcher, kernel, 5.0) == [INITIAL_PAUSE]
    assert (len(kernel.opened), kernel.closed, backend.rediscoveries) == (2, 1, 1)
    (warning,) = warnings_of(caplog.records)
    assert "Cannot read uevents" in warning.getMessage()
    assert "Bad file descriptor" in warning.getMessage()


def test_run_once_events_before_failure_rediscover_at_once() -> None:
    backend = CountingBackend("pci")
    kernel = FakeKernel((1.0, "pci"), (1.01, SOURCE_ERROR))
    watcher = watch(kernel, [backend])
    watcher.open()
    while not backend.rediscoveries:
        watcher.run_once()
    assert kernel.now == 1.01


def test_run_once_repeated_failures_back_off_and_warn_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel = FakeKernel(*((0.0, SOURCE_ERROR) for _ in range(50)))
    watcher = watch(kernel, [CountingBackend("pci")])
    watcher.open()
    pauses = run_until(watcher, kernel, 500.0)
    assert pauses[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_PAUSE]
    assert set(pauses[7:]) == {MAX_PAUSE}
    assert len(warnings_of(caplog.records)) == 1


def test_run_once_failure_after_recovery_warns_again(caplog: pytest.LogCaptureFixture) -> None:
    kernel = FakeKernel((1.0, SOURCE_ERROR), (200.0, SOURCE_ERROR))
    watcher = watch(kernel, [CountingBackend("pci")])
    watcher.open()
    assert run_until(watcher, kernel, 300.0) == [INITIAL_PAUSE, INITIAL_PAUSE]
    assert len(warnings_of(caplog.records)) == 2


@pytest.mark.parametrize("error", [ImportError("No library named udev"), SOURCE_ERROR])
def test_start_source_cannot_open_rediscovers_after_opening(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    backend = CountingBackend("pci")
    kernel = FakeKernel()
    kernel.refuses = error
    watcher = watch(kernel, [backend])
    watcher.open()
    assert run_until(watcher, kernel, 10.0) == [1.0, 2.0, 4.0, 8.0]
    assert (backend.rediscoveries, kernel.opened) == (0, [])
    (warning,) = warnings_of(caplog.records)
    assert "[agent] discovery_interval" in warning.getMessage()
    kernel.refuses = None
    run_until(watcher, kernel, 40.0)
    assert backend.rediscoveries == 1, "what came meanwhile is found"


class BlockingSource:
    """A source without events that can be woken."""

    def __init__(self) -> None:
        self.waits = CallRecorder()
        self.closed = CallRecorder()
        self._woken = threading.Event()

    def read(self, seconds: float | None) -> list[str]:
        self.waits(seconds)
        assert self._woken.wait(LONG)
        return []

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self.closed()


@contextmanager
def started(watcher: UeventWatcher) -> Iterator[None]:
    watcher.start()
    yield
    watcher.stop()
    assert watcher.join(LONG)


def test_stop_wakes_source() -> None:
    source = BlockingSource()
    with started(UeventWatcher([CountingBackend("pci")], lambda _: source)):
        assert source.waits.wait_for() == [(None,)]
    assert source.closed.calls == [()]


def test_start_without_subscriptions_opens_nothing() -> None:
    kernel = FakeKernel()
    with started(UeventWatcher([CountingBackend(), CountingBackend()], kernel.listen)):
        pass
    assert kernel.opened == []


def test_refresh_new_subsystem_reopens_and_rediscovers_all() -> None:
    first, second = CountingBackend("pci"), CountingBackend("net")
    backends, kernel = [first], FakeKernel((1.0, "net"))
    watcher = watch(kernel, backends)
    watcher.open()
    watcher.refresh()
    assert kernel.opened == [{"pci"}], "nothing is new"
    backends.append(second)
    watcher.refresh()
    run_until(watcher, kernel, 3.0)
    assert (kernel.opened, kernel.closed) == ([frozenset({"pci"}), frozenset({"net", "pci"})], 1)
    assert (first.rediscoveries, second.rediscoveries) == (1, 2)
    backends.remove(first)
    watcher.refresh()
    run_until(watcher, kernel, 6.0)
    assert len(kernel.opened) == 2
    assert first.rediscoveries == 1


def test_refresh_first_subscription_opens_source() -> None:
    source, backends = BlockingSource(), [CountingBackend()]
    opened = CallRecorder()

    def listen(subsystems: frozenset[str]) -> BlockingSource:
        opened(subsystems)
        return source

    watcher = UeventWatcher(backends, listen)
    with started(watcher):
        watcher.refresh()
        assert opened.calls == []
        backends.append(CountingBackend("pci"))
        watcher.refresh()
        source.waits.wait_for()
        assert opened.calls == [(frozenset({"pci"}),)]


def test_refresh_new_subsystem_wakes_running_source() -> None:
    sources, backends = [BlockingSource(), BlockingSource()], [CountingBackend("pci")]
    waiting = list(sources)
    watcher = UeventWatcher(backends, lambda _: waiting.pop(0))
    with started(watcher):
        sources[0].waits.wait_for()
        backends.append(CountingBackend("net"))
        watcher.refresh()
        sources[1].waits.wait_for()
        assert sources[0].closed.calls == [()]
    watcher.refresh()
