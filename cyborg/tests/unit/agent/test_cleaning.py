# SPDX-License-Identifier: Apache-2.0
"""What a release comes to: a driver that takes back, one that wipes, and one that is not there."""

from typing import Any

import pytest

from cyborg.agent.acting import carry_out
from cyborg.agent.backends import _Unloadable
from cyborg.core.device import Ability
from cyborg.core.errors import DriverFailed
from cyborg.core.job import Item, Work
from cyborg.drivers.base import Driver
from cyborg.fixtures.agent_jobs import RELEASE, work
from cyborg.fixtures.drivers import Hand, Puppet


class Wiper(Puppet):
    """Leaves nothing of whoever had a handle."""

    name = "wiper"

    def __init__(self, *able: Ability) -> None:
        super().__init__()
        self.hand = Hand()
        self.able = frozenset(able)

    @property
    def abilities(self) -> frozenset[Ability]:
        return self.able

    def sanitise(self, item: Item) -> None:
        self.hand.act("sanitise", item)


class Both(Wiper):
    """Prepares, too."""

    def prepare(self, item: Item, instance: str | None) -> None:
        self.hand.act("prepare", item)

    def release(self, item: Item) -> None:
        self.hand.act("release", item)


def done(asked: Work, driver: Driver) -> str | None:
    return carry_out(asked, {"b0": driver})


def test_a_handle_is_wiped_after_it_was_taken_back() -> None:
    driver = Both(Ability.PREPARES, Ability.SANITISES)
    assert done(work("r", RELEASE, "h1", "h2"), driver) is None
    assert driver.hand.acts == [
        ("release", "h1"),
        ("sanitise", "h1"),
        ("release", "h2"),
        ("sanitise", "h2"),
    ]


def test_one_that_need_not_be_prepared_is_wiped_all_the_same() -> None:
    driver = Wiper(Ability.SANITISES)
    assert done(work("r", RELEASE), driver) is None
    assert driver.hand.acts == [("sanitise", "h1")]


def test_what_is_not_taken_back_is_not_wiped_yet() -> None:
    driver = Both(Ability.PREPARES, Ability.SANITISES)
    driver.hand.errors["release"] = DriverFailed("stuck")
    assert done(work("r", RELEASE), driver) == "release of h1: stuck"
    assert driver.hand.acts == [("release", "h1")]


def test_wiping_that_fails_fails_the_job_and_the_other_handles_are_wiped() -> None:
    driver = Wiper(Ability.SANITISES)
    driver.hand.errors["sanitise"] = DriverFailed("the card is full of keys")
    told = done(work("r", RELEASE, "h1", "h2"), driver)
    assert told == "; ".join(f"release of {h}: the card is full of keys" for h in ("h1", "h2"))
    assert driver.hand.acts == [("sanitise", "h1"), ("sanitise", "h2")]


@pytest.mark.parametrize("able", [(), (Ability.PREPARES,)])
def test_who_does_not_say_that_it_wipes_is_not_asked_to(able: Any) -> None:
    driver = Both(*able)
    assert done(work("r", RELEASE), driver) is None
    assert driver.hand.acts == [("release", "h1")]


def test_what_a_driver_left_that_cannot_be_loaded_now_stays_dirty() -> None:
    driver = _Unloadable("b0", "acme", "driver acme cannot be loaded: ImportError: no library")
    told = done(work("r", RELEASE), driver)
    assert told == "release of h1: driver acme cannot be loaded: ImportError: no library"
