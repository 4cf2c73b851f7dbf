# SPDX-License-Identifier: Apache-2.0
"""The loop of one backend: drivers that return devices, raise or hang."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cyborg.agent.backends.backend import Backend
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import (
    Ability,
    AttachHandle,
    Device,
    HandleType,
    Layout,
    count_handles,
)
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.core.jobs.job import WorkItem
from cyborg.tests.fixtures.hosts.scripted_driver import (
    LONG,
    CallRecorder,
    ScriptedDriver,
    ScriptedWorkDriver,
    card,
)

SOON = 0.05
NEVER = 3600.0

Make = Callable[..., Backend]


@pytest.fixture
def changed() -> CallRecorder:
    return CallRecorder()


@pytest.fixture
def make(changed: CallRecorder) -> Iterator[Make]:
    created: list[tuple[Backend, ScriptedDriver]] = []

    def build(driver: ScriptedDriver, timeout: float = NEVER, interval: float = NEVER) -> Backend:
        backend = Backend(driver, interval, timeout, changed)
        created.append((backend, driver))
        backend.start()
        return backend

    yield build
    for backend, driver in created:
        backend.stop()
        driver.unblock()
        assert backend.join(LONG)


@pytest.mark.parametrize("live_attach", [True, False])
def test_device_of_type_vfio_is_not_deliverable_without_live_attach(live_attach: bool) -> None:
    function = AttachHandle("0000:01:00.4", HandleType.VFIO)
    devices = [card(), card("0000:02:00.0", handles=(function,))]
    withheld = replace(card("0000:03:00.0", handles=(function,)), deliverable=False)
    driver = ScriptedDriver(devices=[*devices, withheld])
    backend = Backend(driver, NEVER, NEVER, live_attach=live_attach)
    backend.run_once()
    found = backend.snapshot.devices
    assert [device.deliverable for device in found] == [True, live_attach, False]
    assert found[2].undeliverable_reason == withheld.undeliverable_reason
    assert live_attach or "[libvirt] live_attach = true" in str(found[1].undeliverable_reason)


def state(status: BackendStatus, error: str | None = None) -> BackendState:
    return BackendState("b0", "puppet", status, error)


def test_start_discovers_at_once(make: Make, changed: CallRecorder) -> None:
    driver = ScriptedDriver(devices=[card()])
    driver.block()
    backend = make(driver)
    assert backend.snapshot.state == state(BackendStatus.DISCOVERING)
    driver.unblock()
    changed.wait_for()
    assert backend.snapshot.state == state(BackendStatus.READY)
    assert backend.snapshot.devices == (card(),)


def test_discovery_sets_abilities_of_driver(make: Make, changed: CallRecorder) -> None:
    plain, liar = card(), replace(card("0000:02:00.0"), abilities=frozenset(Ability))
    driver = ScriptedWorkDriver(devices=[plain, liar])
    driver.supported = frozenset({Ability.PREPARES})
    backend = make(driver)
    changed.wait_for()
    assert [device.abilities for device in backend.snapshot.devices] == [driver.supported] * 2
    driver.supported = frozenset()
    backend.rediscover()
    changed.wait_for(2)
    assert [device.abilities for device in backend.snapshot.devices] == [frozenset()] * 2


def test_discovery_repeats_at_interval(make: Make) -> None:
    driver = ScriptedDriver()
    make(driver, interval=0.01)
    driver.wait_for(3)


def test_discovery_unchanged_does_not_notify(make: Make, changed: CallRecorder) -> None:
    driver = ScriptedDriver(devices=[card()])
    backend = make(driver)
    changed.wait_for()
    done = CallRecorder()
    backend.rediscover(done)
    done.wait_for()
    driver.devices = [card(), card("0000:02:00.0")]
    backend.rediscover(done)
    done.wait_for(2)
    assert len(changed.calls) == 2


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (DriverFailed("the bus is on fire"), "the bus is on fire"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (RuntimeError("x" * 5000), "RuntimeError: " + "x" * 986),
    ],
)
def test_discovery_driver_raises_sets_error(
    make: Make, changed: CallRecorder, raised: Exception, expected: str
) -> None:
    driver = ScriptedDriver(devices=[card()])
    backend = make(driver)
    changed.wait_for()
    driver.error = raised
    done = CallRecorder()
    backend.rediscover(done)
    assert done.wait_for() == [(state(BackendStatus.ERROR, expected),)]
    assert backend.snapshot.devices == (card(),), "what it saw last stays"
    driver.error = None
    backend.rediscover(done)
    assert done.wait_for(2)[1] == (state(BackendStatus.READY),)


def test_backend_consecutive_failures_cordon(changed: CallRecorder) -> None:
    driver = ScriptedDriver(devices=[card()])
    backend = Backend(driver, NEVER, NEVER, changed, cordon_after=3)
    backend.start()
    changed.wait_for()
    done = CallRecorder()
    states: list[tuple[BackendState]] = []

    def discover() -> BackendState:
        backend.rediscover(done)
        states[:] = done.wait_for(len(states) + 1)
        return states[-1][0]

    driver.error = DriverFailed("nobody answers")
    failed = state(BackendStatus.ERROR, "nobody answers")
    assert [discover(), discover()] == [failed, failed]
    driver.error = None
    assert discover() == state(BackendStatus.READY), "and the count begins again"
    driver.error = DriverFailed("nobody answers")
    assert [discover(), discover()] == [failed, failed]
    cordoned = replace(
        failed, error="nobody answers; cordoned after 3 failed discoveries", cordoned=True
    )
    assert discover() == cordoned
    news = len(changed.calls)
    assert discover() == cordoned
    assert len(changed.calls) == news, "one more failure is no news"
    assert backend.snapshot.devices == (card(),)
    driver.error = None
    assert discover() == state(BackendStatus.READY)
    backend.stop()
    assert backend.join(LONG)


def test_discovery_driver_hangs_sets_error(make: Make, changed: CallRecorder) -> None:
    driver = ScriptedDriver(devices=[card()])
    backend = make(driver, timeout=SOON)
    changed.wait_for()
    driver.block()
    done = CallRecorder()
    backend.rediscover(done)
    late = state(BackendStatus.ERROR, "discovery takes longer than 0.05 s")
    assert done.wait_for() == [(late,)]
    assert backend.snapshot.devices == (card(),)
    backend.rediscover(done)
    assert done.wait_for(2)[1] == (late,), "a request meanwhile is answered at once"
    assert driver.discover_calls == 2, "no other call is made until it returns"
    driver.devices = []
    driver.unblock()
    changed.wait_for(3)
    driver.wait_for(3)
    assert backend.snapshot.state == state(BackendStatus.READY)
    assert not backend.snapshot.devices


def test_discovery_first_call_hangs_sets_error(make: Make, changed: CallRecorder) -> None:
    driver = ScriptedDriver()
    driver.block()
    backend = make(driver, timeout=SOON)
    changed.wait_for()
    assert backend.snapshot.state.status is BackendStatus.ERROR


def test_rediscover_during_discovery_runs_another(make: Make, changed: CallRecorder) -> None:
    driver = ScriptedDriver()
    driver.block()
    backend = make(driver)
    driver.wait_for(1)
    done = CallRecorder()
    backend.rediscover(done)
    driver.devices = [card()]
    driver.unblock()
    done.wait_for()
    assert driver.discover_calls == 2


def test_discovery_failing_driver_does_not_affect_others(make: Make, changed: CallRecorder) -> None:
    failing, healthy = ScriptedDriver(), ScriptedDriver("b1", [card(backend="b1")])
    failing.block()
    make(failing)
    backend = make(healthy)
    changed.wait_for()
    assert backend.snapshot.state.status is BackendStatus.READY


def _as_dict() -> Any:
    return {"address": "0000:02:00.0"}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (_as_dict(), "the driver reports a dict as a device"),
        (card("0000:02:00.0", backend="b9"), "names backend b9, not b0"),
        (card("0000:02:00.0", resource_class="gpu"), "has resource class gpu"),
        (card("0000:02:00.0", traits=frozenset({"A_B"})), "has trait A_B"),
        (card("0000:02:00.0", attributes={"a": 1}), "cannot be encoded"),
        (card("0000:02:00.0", attributes={"a": object()}), "cannot be encoded"),
    ],
)
def test_discovery_invalid_device_is_skipped(
    make: Make, changed: CallRecorder, wrong: Any, expected: str
) -> None:
    backend = make(ScriptedDriver(devices=[wrong, card()]))
    changed.wait_for()
    assert backend.snapshot.devices == (card(),)
    assert backend.snapshot.state.status is BackendStatus.READY
    assert expected in str(backend.snapshot.state.error)


class LayoutDriver(ScriptedDriver):
    """Driver with layouts, which cannot be read for some cards."""

    abilities = frozenset({Ability.PARTITIONS})

    def layouts(self, device: Device) -> Sequence[Layout]:
        if device.address.startswith("0000:02"):
            raise DriverFailed("no layouts today")
        return [Layout("none", {}), Layout("whole", count_handles(device))]

    def partition(self, item: WorkItem, layout: str) -> None:
        raise DriverFailed("not here")


def test_discovery_unreadable_layouts_affect_one_device(make: Make, changed: CallRecorder) -> None:
    other = replace(card(), address="0000:02:00.0", deployables=())
    backend = make(LayoutDriver(devices=[card(), other]))
    changed.wait_for()
    first, second = backend.snapshot.devices
    assert (first.layout, [layout.name for layout in first.layouts]) == ("whole", ["none", "whole"])
    assert (second.layout, second.layouts) == (None, ())
    assert backend.snapshot.state == state(
        BackendStatus.READY, "layouts of device 0000:02:00.0: no layouts today"
    )


def test_discovery_duplicate_address_sets_error(make: Make, changed: CallRecorder) -> None:
    backend = make(ScriptedDriver(devices=[card(), card()]))
    changed.wait_for()
    assert backend.snapshot.state == state(
        BackendStatus.ERROR, "the driver reports the device 0000:01:00.0 twice"
    )


def test_discovery_invalid_result_sets_error(make: Make, changed: CallRecorder) -> None:
    driver = ScriptedDriver()
    driver.discover = lambda: None  # type: ignore[method-assign, assignment, return-value]
    backend = make(driver)
    changed.wait_for()
    assert backend.snapshot.state.status is BackendStatus.ERROR


def test_stop_between_discoveries_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(ScriptedDriver(), 3600.0, LONG)
    clear = backend._wake.clear

    def stop_after_clear() -> None:
        backend.stop()
        clear()

    monkeypatch.setattr(backend._wake, "clear", stop_after_clear)
    backend.start()
    assert backend.join(LONG)
    assert backend.snapshot.state.status is BackendStatus.DISCOVERING, "it did not look"


class Ready(ScriptedDriver):
    """A puppet that is set up first, when it is expected how."""

    def __init__(self, *errors: Exception | None) -> None:
        super().__init__(devices=[card()])
        self.errors = list(errors)
        self.set_up = CallRecorder()

    def setup(self) -> None:
        self.set_up()
        assert self._free.wait(LONG)
        if (error := self.errors.pop(0)) is not None:
            raise error


def ready(driver: Ready, on_done: CallRecorder, timeout: float = NEVER) -> Backend:
    backend = Backend(driver, NEVER, timeout, needs_setup=True)
    backend.rediscover(on_done)
    backend.start()
    return backend


def end(backend: Backend) -> None:
    backend.stop()
    assert backend.join(LONG)


def test_setup_runs_before_discovery() -> None:
    driver, on_done = Ready(None), CallRecorder()
    backend = ready(driver, on_done)
    ((reported_state,),) = on_done.wait_for()
    assert (reported_state.status, driver.discover_calls) == (BackendStatus.READY, 1)
    backend.rediscover(on_done)
    on_done.wait_for(2)
    assert len(driver.set_up.calls) == 1
    end(backend)


def test_setup_fails_no_discovery_runs() -> None:
    driver, on_done = Ready(DriverFailed("no power"), None), CallRecorder()
    backend = ready(driver, on_done)
    ((reported_state,),) = on_done.wait_for()
    assert reported_state == state(BackendStatus.ERROR, "setup: no power")
    assert driver.discover_calls == 0
    backend.rediscover(on_done)
    assert on_done.wait_for(2)[1] == (state(BackendStatus.READY),), "it is tried again"
    end(backend)


def test_setup_hangs_sets_error() -> None:
    driver, on_done = Ready(None), CallRecorder()
    driver.block()
    backend = ready(driver, on_done, SOON)
    ((reported_state,),) = on_done.wait_for()
    assert reported_state == state(BackendStatus.ERROR, f"setup takes longer than {SOON} s")
    assert driver.discover_calls == 0
    driver.unblock()
    driver.wait_for(1)
    end(backend)


def test_rediscover_stopping_backend_calls_back(make: Make, changed: CallRecorder) -> None:
    driver, on_done = ScriptedDriver(devices=[card()]), CallRecorder()
    backend = make(driver)
    changed.wait_for()
    driver.block()
    backend.rediscover()
    driver.wait_for(2)
    backend.rediscover(on_done)
    backend.stop()
    driver.unblock()
    assert on_done.wait_for() == [(state(BackendStatus.READY),)]
    assert backend.join(LONG)
    backend.rediscover(on_done)
    assert len(on_done.calls) == 2
    assert driver.discover_calls == 2
