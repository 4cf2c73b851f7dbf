# SPDX-License-Identifier: Apache-2.0
"""The health of a backend's devices, from measurement to report."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cyborg.agent.backends.backend import Backend
from cyborg.agent.backends.health import HealthTracker
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Device, Health
from cyborg.core.inventory.device_state import HEALTHY, Measurement
from cyborg.core.inventory.report import BackendStatus
from cyborg.tests.fixtures.hosts.scripted_driver import (
    LONG,
    CallRecorder,
    ScriptedDriver,
    ScriptedHealthDriver,
    card,
)
from cyborg.tests.fixtures.machine.log_lines import texts_of

NEVER = 3600.0
SOON = 0.01
ONE, TWO = "0000:01:00.0", "0000:02:00.0"
SICK = Measurement(Health.UNHEALTHY, "link down")


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gauge() -> ScriptedHealthDriver:
    return ScriptedHealthDriver(devices=[card(ONE), card(TWO)])


@pytest.fixture
def tracker(gauge: ScriptedHealthDriver, clock: Clock) -> HealthTracker:
    return HealthTracker(gauge, 60.0, clock)


def published(
    tracker: HealthTracker, gauge: ScriptedHealthDriver
) -> list[tuple[Health, str | None]]:
    tracker.update(gauge.devices)
    return [(d.health, d.health_reason) for d in tracker.apply_to(gauge.devices)]


def test_apply_to_measured_health_replaces_discovered(
    tracker: HealthTracker, gauge: ScriptedHealthDriver
) -> None:
    gauge.measured = {ONE: SICK, "0000:09:00.0": SICK}
    assert published(tracker, gauge) == [(Health.UNHEALTHY, "link down"), (Health.OK, None)]
    gauge.measured = {}
    assert published(tracker, gauge)[0] == (Health.UNHEALTHY, "link down"), "what was measured last"


def test_update_recovery_window_counts_per_device(
    tracker: HealthTracker,
    gauge: ScriptedHealthDriver,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    gauge.measured = {ONE: SICK, TWO: HEALTHY}
    published(tracker, gauge)
    gauge.measured = {ONE: HEALTHY, TWO: SICK}
    clock.now = 10.0
    watched = "recovering, healthy again after 60 s without a fault; was: link down"
    assert published(tracker, gauge) == [
        (Health.UNHEALTHY, watched),
        (Health.UNHEALTHY, "link down"),
    ]
    clock.now = 69.9
    assert published(tracker, gauge)[0] == (Health.UNHEALTHY, watched)
    clock.now = 70.0
    assert published(tracker, gauge)[0] == (Health.OK, None)
    assert texts_of(caplog.records) == [
        f"[backend=b0 device={ONE}] Device is unhealthy: link down",
        f"[backend=b0 device={TWO}] Device is unhealthy: link down",
        f"[backend=b0 device={ONE}] Device is ok",
    ]


def test_update_removed_device_returns_without_history(
    tracker: HealthTracker, gauge: ScriptedHealthDriver
) -> None:
    gauge.measured = {ONE: SICK}
    published(tracker, gauge)
    both, gauge.devices = gauge.devices, [card(TWO)]
    published(tracker, gauge)
    gauge.devices, gauge.measured = both, {ONE: HEALTHY}
    assert published(tracker, gauge)[0] == (Health.OK, None)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [SICK],
        {ONE: Health.OK},
        {ONE: Measurement("broken")},  # type: ignore[arg-type]
        {ONE: Measurement("unhealthy")},  # type: ignore[arg-type]
        {ONE: Measurement(Health.OK, b"\xff")},  # type: ignore[arg-type]
    ],
)
def test_update_malformed_answer_changes_nothing(
    tracker: HealthTracker, gauge: ScriptedHealthDriver, answer: Any
) -> None:
    gauge.measured = {ONE: SICK}
    published(tracker, gauge)
    gauge.measured = answer
    with pytest.raises(DriverFailed, match="must return a mapping"):
        tracker.update(gauge.devices)
    assert tracker.apply_to(gauge.devices)[0].health is Health.UNHEALTHY


def test_update_driver_without_measure_returns_false() -> None:
    devices = [card()]
    tracker = HealthTracker(ScriptedDriver(devices=devices), 60.0)
    assert not tracker.update(devices)
    assert tracker.apply_to(devices) == tuple(devices)


Run = Callable[..., Backend]


@pytest.fixture
def changed() -> CallRecorder:
    return CallRecorder()


@pytest.fixture
def run(gauge: ScriptedHealthDriver, changed: CallRecorder, clock: Clock) -> Iterator[Run]:
    backends: list[Backend] = []

    def build(timeout: float = NEVER, interval: float = SOON) -> Backend:
        backend = Backend(
            gauge,
            NEVER,
            timeout,
            changed,
            health_interval=interval,
            recovery_window=60.0,
            clock=clock,
        )
        backends.append(backend)
        backend.start()
        return backend

    yield build
    for backend in backends:
        backend.stop()
        gauge.unblock()
        assert backend.join(LONG)


def healths(devices: tuple[Device, ...]) -> list[Health]:
    return [device.health for device in devices]


def test_backend_first_snapshot_has_health(
    run: Run, gauge: ScriptedHealthDriver, changed: CallRecorder
) -> None:
    gauge.measured = {ONE: SICK}
    backend = run(interval=NEVER)
    changed.wait_for()
    assert healths(backend.snapshot.devices) == [Health.UNHEALTHY, Health.OK]
    assert backend.snapshot.devices[0].health_reason == "link down"


def test_backend_measures_between_discoveries(
    run: Run, gauge: ScriptedHealthDriver, changed: CallRecorder, clock: Clock
) -> None:
    backend = run()
    gauge.wait_for_measurements(4)
    assert (gauge.discover_calls, len(changed.calls)) == (1, 1)
    gauge.measured = {ONE: SICK}
    changed.wait_for(2)
    assert healths(backend.snapshot.devices) == [Health.UNHEALTHY, Health.OK]
    gauge.measured = {}
    gauge.wait_for_measurements(gauge.measure_calls + 3)
    assert len(changed.calls) == 2
    gauge.measured = {ONE: HEALTHY}
    changed.wait_for(3)
    gauge.wait_for_measurements(gauge.measure_calls + 3)
    assert healths(backend.snapshot.devices) == [Health.UNHEALTHY, Health.OK], "it is watched"
    clock.now += 60.0
    changed.wait_for(4)
    assert healths(backend.snapshot.devices) == [Health.OK, Health.OK]
    assert (gauge.discover_calls, len(changed.calls)) == (1, 4)


def test_backend_measurement_raises_sets_error(
    run: Run, gauge: ScriptedHealthDriver, changed: CallRecorder
) -> None:
    gauge.measured = {ONE: SICK}
    backend = run()
    changed.wait_for()
    gauge.measure_error = OSError("no such sensor")
    changed.wait_for(2)
    state = backend.snapshot.state
    assert (state.status, state.error) == (BackendStatus.READY, "health: OSError: no such sensor")
    assert healths(backend.snapshot.devices) == [Health.UNHEALTHY, Health.OK]
    gauge.measure_error = None
    changed.wait_for(3)
    assert backend.snapshot.state.error is None


def test_backend_measurement_hangs_sets_error(
    run: Run, gauge: ScriptedHealthDriver, changed: CallRecorder
) -> None:
    backend = run(timeout=0.2)
    changed.wait_for()
    gauge.block()
    changed.wait_for(2)
    state = backend.snapshot.state
    assert state.status is BackendStatus.ERROR
    assert state.error == "measuring health takes longer than 0.2 s"
    assert len(backend.snapshot.devices) == 2
    done = CallRecorder()
    backend.rediscover(done)
    assert done.wait_for() == [(state,)]
    gauge.unblock()
    changed.wait_for(3)
    assert backend.snapshot.state.error is None


def test_backend_failed_discovery_keeps_measuring(
    run: Run, gauge: ScriptedHealthDriver, changed: CallRecorder
) -> None:
    backend = run()
    changed.wait_for()
    gauge.error = DriverFailed("the bus is on fire")
    done = CallRecorder()
    backend.rediscover(done)
    done.wait_for()
    gauge.measured = {TWO: SICK}
    changed.wait_for(3)
    assert backend.snapshot.state.error == "the bus is on fire"
    assert healths(backend.snapshot.devices) == [Health.OK, Health.UNHEALTHY]
