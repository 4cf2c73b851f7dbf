# SPDX-License-Identifier: Apache-2.0
"""Release and sanitising of handles, also with a missing driver."""

from typing import Any

import pytest

from cyborg.agent.backends.factory import FailedDriver
from cyborg.agent.jobs.executor import execute
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Ability
from cyborg.core.jobs.job import JobSpec, WorkItem
from cyborg.drivers.base import Driver
from cyborg.tests.fixtures.hosts.agent_jobs import RELEASE, work
from cyborg.tests.fixtures.hosts.scripted_driver import ScriptedDriver, WorkScript


class Wiper(ScriptedDriver):
    """A driver that sanitises."""

    name = "wiper"

    def __init__(self, *able: Ability) -> None:
        super().__init__()
        self.hand = WorkScript()
        self.able = frozenset(able)

    @property
    def abilities(self) -> frozenset[Ability]:
        return self.able

    def sanitise(self, item: WorkItem) -> None:
        self.hand.call("sanitise", item)


class Both(Wiper):
    """Prepares, too."""

    def prepare(self, item: WorkItem, instance: str | None) -> None:
        self.hand.call("prepare", item)

    def release(self, item: WorkItem) -> None:
        self.hand.call("release", item)


def done(spec: JobSpec, driver: Driver) -> str | None:
    return execute(spec, {"b0": driver})


def test_release_handle_is_sanitised_after_release() -> None:
    driver = Both(Ability.PREPARES, Ability.SANITISES)
    assert done(work("r", RELEASE, "h1", "h2"), driver) is None
    assert driver.hand.calls == [
        ("release", "h1"),
        ("sanitise", "h1"),
        ("release", "h2"),
        ("sanitise", "h2"),
    ]


def test_release_driver_without_prepare_is_sanitised() -> None:
    driver = Wiper(Ability.SANITISES)
    assert done(work("r", RELEASE), driver) is None
    assert driver.hand.calls == [("sanitise", "h1")]


def test_release_fails_handle_is_not_sanitised() -> None:
    driver = Both(Ability.PREPARES, Ability.SANITISES)
    driver.hand.errors["release"] = DriverFailed("stuck")
    assert done(work("r", RELEASE), driver) == "release of h1: stuck"
    assert driver.hand.calls == [("release", "h1")]


def test_sanitise_fails_job_fails_and_others_are_sanitised() -> None:
    driver = Wiper(Ability.SANITISES)
    driver.hand.errors["sanitise"] = DriverFailed("the card is full of keys")
    error = done(work("r", RELEASE, "h1", "h2"), driver)
    assert error == "; ".join(f"release of {h}: the card is full of keys" for h in ("h1", "h2"))
    assert driver.hand.calls == [("sanitise", "h1"), ("sanitise", "h2")]


@pytest.mark.parametrize("able", [(), (Ability.PREPARES,)])
def test_release_without_sanitise_ability_does_not_sanitise(able: Any) -> None:
    driver = Both(*able)
    assert done(work("r", RELEASE), driver) is None
    assert driver.hand.calls == [("release", "h1")]


def test_release_failed_driver_fails() -> None:
    driver = FailedDriver("b0", "acme", "driver acme cannot be loaded: ImportError: no library")
    error = done(work("r", RELEASE), driver)
    assert error == "release of h1: driver acme cannot be loaded: ImportError: no library"
