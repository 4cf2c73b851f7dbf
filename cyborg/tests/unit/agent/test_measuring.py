# SPDX-License-Identifier: Apache-2.0
"""The health of a backend's devices, from what its driver measures to what is reported."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cyborg.agent.backend import Backend
from cyborg.agent.measuring import Measuring
from cyborg.core.device import Device, Health
from cyborg.core.errors import DriverFailed
from cyborg.core.health import WELL, Measurement
from cyborg.core.report import BackendStatus
from cyborg.fixtures.drivers import LONG, Gauge, Puppet, Told, card

NEVER = 3600.0
SOON = 0.01
ONE, TWO = "0000:01:00.0", "0000:02:00.0"
SICK = Measurement(Health.UNHEALTHY, "link down")


class Clock:
    """Shows what it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gauge() -> Gauge:
    return Gauge(devices=[card(ONE), card(TWO)])


@pytest.fixture
def measuring(gauge: Gauge, clock: Clock) -> Measuring:
    return Measuring(gauge, 60.0, clock)


def shown(measuring: Measuring, gauge: Gauge) -> list[tuple[Health, str | None]]:
    measuring.look(gauge.devices)
    return [(d.health, d.health_reason) for d in measuring.over(gauge.devices)]


def test_what_is_measured_goes_over_what_was_discovered(measuring: Measuring, gauge: Gauge) -> None:
    gauge.measured = {ONE: SICK, "0000:09:00.0": SICK}
    assert shown(measuring, gauge) == [(Health.UNHEALTHY, "link down"), (Health.OK, None)]
    gauge.measured = {}
    assert shown(measuring, gauge)[0] == (Health.UNHEALTHY, "link down"), "what was measured last"


def test_the_quiet_time_counts_by_device(
    measuring: Measuring, gauge: Gauge, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gauge.measured = {ONE: SICK, TWO: WELL}
    shown(measuring, gauge)
    gauge.measured = {ONE: WELL, TWO: SICK}
    clock.now = 10.0
    watched = "well now, watched until it has been so for 60 s; was: link down"
    assert shown(measuring, gauge) == [
        (Health.UNHEALTHY, watched),
        (Health.UNHEALTHY, "link down"),
    ]
    clock.now = 69.9
    assert shown(measuring, gauge)[0] == (Health.UNHEALTHY, watched)
    clock.now = 70.0
    assert shown(measuring, gauge)[0] == (Health.OK, None)
    assert caplog.messages == [
        f"b0: device {ONE} is unhealthy: link down",
        f"b0: device {TWO} is unhealthy: link down",
        f"b0: device {ONE} is ok",
    ]


def test_one_that_left_comes_back_without_its_past(measuring: Measuring, gauge: Gauge) -> None:
    gauge.measured = {ONE: SICK}
    shown(measuring, gauge)
    both, gauge.devices = gauge.devices, [card(TWO)]
    shown(measuring, gauge)
    gauge.devices, gauge.measured = both, {ONE: WELL}
    assert shown(measuring, gauge)[0] == (Health.OK, None)


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
def test_an_answer_that_is_none_changes_nothing(
    measuring: Measuring, gauge: Gauge, answer: Any
) -> None:
    gauge.measured = {ONE: SICK}
    shown(measuring, gauge)
    gauge.measured = answer
    with pytest.raises(DriverFailed, match="returns no map"):
        measuring.look(gauge.devices)
    assert measuring.over(gauge.devices)[0].health is Health.UNHEALTHY


def test_a_driver_that_cannot_measure_is_not_asked() -> None:
    devices = [card()]
    measuring = Measuring(Puppet(devices=devices), 60.0)
    assert not measuring.look(devices)
    assert measuring.over(devices) == tuple(devices)


Run = Callable[..., Backend]


@pytest.fixture
def changed() -> Told:
    return Told()


@pytest.fixture
def run(gauge: Gauge, changed: Told, clock: Clock) -> Iterator[Run]:
    made: list[Backend] = []

    def build(timeout: float = NEVER, interval: float = SOON) -> Backend:
        backend = Backend(
            gauge,
            NEVER,
            timeout,
            changed,
            health_interval=interval,
            health_quiet=60.0,
            clock=clock,
        )
        made.append(backend)
        backend.start()
        return backend

    yield build
    for backend in made:
        backend.stop()
        gauge.free()
        assert backend.join(LONG)


def healths(devices: tuple[Device, ...]) -> list[Health]:
    return [device.health for device in devices]


def test_the_first_view_is_measured_already(run: Run, gauge: Gauge, changed: Told) -> None:
    gauge.measured = {ONE: SICK}
    backend = run(interval=NEVER)
    changed.wait_for()
    assert healths(backend.view.devices) == [Health.UNHEALTHY, Health.OK]
    assert backend.view.devices[0].health_reason == "link down"


def test_it_measures_between_discoveries_and_tells_only_news(
    run: Run, gauge: Gauge, changed: Told, clock: Clock
) -> None:
    backend = run()
    gauge.wait_for_looks(4)
    assert (gauge.began, len(changed.calls)) == (1, 1)
    gauge.measured = {ONE: SICK}
    changed.wait_for(2)
    assert healths(backend.view.devices) == [Health.UNHEALTHY, Health.OK]
    gauge.measured = {}
    gauge.wait_for_looks(gauge.looks + 3)
    assert len(changed.calls) == 2
    gauge.measured = {ONE: WELL}
    changed.wait_for(3)
    gauge.wait_for_looks(gauge.looks + 3)
    assert healths(backend.view.devices) == [Health.UNHEALTHY, Health.OK], "it is watched"
    clock.now += 60.0
    changed.wait_for(4)
    assert healths(backend.view.devices) == [Health.OK, Health.OK]
    assert (gauge.began, len(changed.calls)) == (1, 4)


def test_a_measurement_that_raises(run: Run, gauge: Gauge, changed: Told) -> None:
    gauge.measured = {ONE: SICK}
    backend = run()
    changed.wait_for()
    gauge.trouble = OSError("no such sensor")
    changed.wait_for(2)
    state = backend.view.state
    assert (state.status, state.error) == (BackendStatus.READY, "health: OSError: no such sensor")
    assert healths(backend.view.devices) == [Health.UNHEALTHY, Health.OK]
    gauge.trouble = None
    changed.wait_for(3)
    assert backend.view.state.error is None


def test_a_measurement_that_hangs(run: Run, gauge: Gauge, changed: Told) -> None:
    backend = run(timeout=0.2)
    changed.wait_for()
    gauge.hold()
    changed.wait_for(2)
    state = backend.view.state
    assert state.status is BackendStatus.ERROR
    assert state.error == "measuring health takes longer than 0.2 s"
    assert len(backend.view.devices) == 2
    done = Told()
    backend.rediscover(done)
    assert done.wait_for() == [(state,)]
    gauge.free()
    changed.wait_for(3)
    assert backend.view.state.error is None


def test_a_discovery_that_fails_leaves_the_measuring(run: Run, gauge: Gauge, changed: Told) -> None:
    backend = run()
    changed.wait_for()
    gauge.error = DriverFailed("the bus is on fire")
    done = Told()
    backend.rediscover(done)
    done.wait_for()
    gauge.measured = {TWO: SICK}
    changed.wait_for(3)
    assert backend.view.state.error == "the bus is on fire"
    assert healths(backend.view.devices) == [Health.OK, Health.UNHEALTHY]
