# SPDX-License-Identifier: Apache-2.0
"""One backend's loop: what a driver returns, raises, or keeps to itself."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cyborg.agent.backend import Backend
from cyborg.core.device import Ability
from cyborg.core.errors import DriverFailed
from cyborg.core.report import BackendState, BackendStatus
from cyborg.fixtures.drivers import LONG, Able, Puppet, Told, card

SOON = 0.05
NEVER = 3600.0

Make = Callable[..., Backend]


@pytest.fixture
def changed() -> Told:
    return Told()


@pytest.fixture
def make(changed: Told) -> Iterator[Make]:
    made: list[tuple[Backend, Puppet]] = []

    def build(driver: Puppet, timeout: float = NEVER, interval: float = NEVER) -> Backend:
        backend = Backend(driver, interval, timeout, changed)
        made.append((backend, driver))
        backend.start()
        return backend

    yield build
    for backend, driver in made:
        backend.stop()
        driver.free()
        assert backend.join(LONG)


def state(status: BackendStatus, error: str | None = None) -> BackendState:
    return BackendState("b0", "puppet", status, error)


def test_it_begins_by_itself(make: Make, changed: Told) -> None:
    driver = Puppet(devices=[card()])
    driver.hold()
    backend = make(driver)
    assert backend.view.state == state(BackendStatus.DISCOVERING)
    driver.free()
    changed.wait_for()
    assert backend.view.state == state(BackendStatus.READY)
    assert backend.view.devices == (card(),)


def test_the_abilities_are_the_backends_whatever_a_device_says(make: Make, changed: Told) -> None:
    plain, liar = card(), replace(card("0000:02:00.0"), abilities=frozenset(Ability))
    driver = Able(devices=[plain, liar])
    driver.able = frozenset({Ability.PREPARES})
    backend = make(driver)
    changed.wait_for()
    assert [device.abilities for device in backend.view.devices] == [driver.able] * 2
    driver.able = frozenset()
    backend.rediscover()
    changed.wait_for(2)
    assert [device.abilities for device in backend.view.devices] == [frozenset()] * 2


def test_it_looks_again_and_again(make: Make) -> None:
    driver = Puppet()
    make(driver, interval=0.01)
    driver.wait_for(3)


def test_what_is_equal_is_no_news(make: Make, changed: Told) -> None:
    driver = Puppet(devices=[card()])
    backend = make(driver)
    changed.wait_for()
    done = Told()
    backend.rediscover(done)
    done.wait_for()
    driver.devices = [card(), card("0000:02:00.0")]
    backend.rediscover(done)
    done.wait_for(2)
    assert len(changed.calls) == 2


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (DriverFailed("the bus is on fire"), "the bus is on fire"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (RuntimeError("x" * 5000), "RuntimeError: " + "x" * 986),
    ],
)
def test_a_driver_that_raises(make: Make, changed: Told, raised: Exception, told: str) -> None:
    driver = Puppet(devices=[card()])
    backend = make(driver)
    changed.wait_for()
    driver.error = raised
    done = Told()
    backend.rediscover(done)
    assert done.wait_for() == [(state(BackendStatus.ERROR, told),)]
    assert backend.view.devices == (card(),), "what it saw last stays"
    driver.error = None
    backend.rediscover(done)
    assert done.wait_for(2)[1] == (state(BackendStatus.READY),)


def test_a_driver_that_hangs(make: Make, changed: Told) -> None:
    driver = Puppet(devices=[card()])
    backend = make(driver, timeout=SOON)
    changed.wait_for()
    driver.hold()
    done = Told()
    backend.rediscover(done)
    late = state(BackendStatus.ERROR, "discovery takes longer than 0.05 s")
    assert done.wait_for() == [(late,)]
    assert backend.view.devices == (card(),)
    backend.rediscover(done)
    assert done.wait_for(2)[1] == (late,), "whoever asks meanwhile is told at once"
    assert driver.began == 2, "no other call is made until it returns"
    driver.devices = []
    driver.free()
    changed.wait_for(3)
    driver.wait_for(3)
    assert backend.view.state == state(BackendStatus.READY)
    assert backend.view.devices == ()


def test_a_driver_that_hangs_at_once(make: Make, changed: Told) -> None:
    driver = Puppet()
    driver.hold()
    backend = make(driver, timeout=SOON)
    changed.wait_for()
    assert backend.view.state.status is BackendStatus.ERROR


def test_the_one_in_progress_does_not_count(make: Make, changed: Told) -> None:
    driver = Puppet()
    driver.hold()
    backend = make(driver)
    driver.wait_for(1)
    done = Told()
    backend.rediscover(done)
    driver.devices = [card()]
    driver.free()
    done.wait_for()
    assert driver.began == 2


def test_a_sick_driver_leaves_the_others_alone(make: Make, changed: Told) -> None:
    sick, well = Puppet(), Puppet("b1", [card(backend="b1")])
    sick.hold()
    make(sick)
    backend = make(well)
    changed.wait_for()
    assert backend.view.state.status is BackendStatus.READY


def _as_dict() -> Any:
    return {"address": "0000:02:00.0"}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (_as_dict(), "the driver reports a dict as a device"),
        (card("0000:02:00.0", backend="b9"), "says that it is of backend b9"),
        (card("0000:02:00.0", resource_class="gpu"), "has the resource class gpu"),
        (card("0000:02:00.0", traits=frozenset({"A_B"})), "has the trait A_B"),
        (card("0000:02:00.0", attributes={"a": 1}), "cannot be told in a message"),
        (card("0000:02:00.0", attributes={"a": object()}), "cannot be told in a message"),
    ],
)
def test_a_device_that_cannot_be_costs_only_itself(
    make: Make, changed: Told, wrong: Any, told: str
) -> None:
    backend = make(Puppet(devices=[wrong, card()]))
    changed.wait_for()
    assert backend.view.devices == (card(),)
    assert backend.view.state.status is BackendStatus.READY
    assert told in str(backend.view.state.error)


def test_the_same_address_twice_is_a_driver_that_lies(make: Make, changed: Told) -> None:
    backend = make(Puppet(devices=[card(), card()]))
    changed.wait_for()
    assert backend.view.state == state(
        BackendStatus.ERROR, "the driver reports the device 0000:01:00.0 twice"
    )


def test_no_list_at_all_is_an_error(make: Make, changed: Told) -> None:
    driver = Puppet()
    driver.discover = lambda: None  # type: ignore[method-assign, assignment, return-value]
    backend = make(driver)
    changed.wait_for()
    assert backend.view.state.status is BackendStatus.ERROR


def test_a_stop_between_two_looks_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(Puppet(), 3600.0, LONG)
    clear = backend._wake.clear

    def stopped_just_then() -> None:
        backend.stop()
        clear()

    monkeypatch.setattr(backend._wake, "clear", stopped_just_then)
    backend.start()
    assert backend.join(LONG)
    assert backend.view.state.status is BackendStatus.DISCOVERING, "it did not look"


class Ready(Puppet):
    """A puppet that is set up first, when it is told how."""

    def __init__(self, *errors: Exception | None) -> None:
        super().__init__(devices=[card()])
        self.errors = list(errors)
        self.set_up = Told()

    def setup(self) -> None:
        self.set_up()
        assert self._free.wait(LONG)
        if (error := self.errors.pop(0)) is not None:
            raise error


def ready(driver: Ready, told: Told, timeout: float = NEVER) -> Backend:
    backend = Backend(driver, NEVER, timeout, set_up=True)
    backend.rediscover(told)
    backend.start()
    return backend


def end(backend: Backend) -> None:
    backend.stop()
    assert backend.join(LONG)


def test_it_is_set_up_before_it_discovers() -> None:
    driver, told = Ready(None), Told()
    backend = ready(driver, told)
    ((found,),) = told.wait_for()
    assert (found.status, driver.began) == (BackendStatus.READY, 1)
    backend.rediscover(told)
    told.wait_for(2)
    assert len(driver.set_up.calls) == 1
    end(backend)


def test_without_a_setup_it_does_not_discover() -> None:
    driver, told = Ready(DriverFailed("no power"), None), Told()
    backend = ready(driver, told)
    ((found,),) = told.wait_for()
    assert found == state(BackendStatus.ERROR, "setup: no power")
    assert driver.began == 0
    backend.rediscover(told)
    assert told.wait_for(2)[1] == (state(BackendStatus.READY),), "it is tried again"
    end(backend)


def test_a_setup_that_hangs() -> None:
    driver, told = Ready(None), Told()
    driver.hold()
    backend = ready(driver, told, SOON)
    ((found,),) = told.wait_for()
    assert found == state(BackendStatus.ERROR, f"setup takes longer than {SOON} s")
    assert driver.began == 0
    driver.free()
    driver.wait_for(1)
    end(backend)


def test_who_asks_one_that_stops_is_answered(make: Make, changed: Told) -> None:
    driver, told = Puppet(devices=[card()]), Told()
    backend = make(driver)
    changed.wait_for()
    driver.hold()
    backend.rediscover()
    driver.wait_for(2)
    backend.rediscover(told)
    backend.stop()
    driver.free()
    assert told.wait_for() == [(state(BackendStatus.READY),)]
    assert backend.join(LONG)
    backend.rediscover(told)
    assert len(told.calls) == 2
    assert driver.began == 2
