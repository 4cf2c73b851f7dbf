# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job's items: one that fails, one that no driver can do."""

import pytest

from cyborg.agent.acting import carry_out
from cyborg.core.device import Ability
from cyborg.core.errors import DriverFailed
from cyborg.core.job import Item, Work
from cyborg.fixtures.agent_jobs import (
    CARD,
    PREPARE,
    PROGRAM,
    RELEASE,
    Host,
    name,
    work,
)
from cyborg.fixtures.drivers import LONG, Able


def test_the_first_failure_ends_a_prepare_and_undoes_nothing(host: Host) -> None:
    host.hand.errors["prepare"] = DriverFailed("no air")
    state, error = host.do(work("p", PREPARE, "h1", "h2"))
    assert (state, error) == ("failed", "prepare of h1: no air")
    assert host.hand.acts == [("prepare", "h1")]


def test_a_release_takes_back_what_it_can(host: Host) -> None:
    host.hand.errors["release"] = DriverFailed("stuck")
    state, error = host.do(work("r", RELEASE, "h1", "h2"))
    assert (state, error) == ("failed", "release of h1: stuck; release of h2: stuck")


def test_what_a_driver_says_is_cut_short(host: Host) -> None:
    host.hand.errors["prepare"] = SystemExit("x" * 5000)
    state, error = host.do(work("p"))
    assert state == "failed"
    assert error is not None
    assert len(error) == 1000


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (work("p", backend="b9"), "prepare of h1: this host has no backend 'b9'; it has b0, plain"),
        (
            work("p", backend="plain"),
            "prepare of h1: backend plain (driver puppet) cannot prepare as it is configured",
        ),
        (
            work("x", PROGRAM, backend="plain"),
            "program of h1: backend plain (driver puppet) cannot program as it is configured",
        ),
    ],
)
def test_a_driver_that_is_not_there_or_cannot(host: Host, asked: Work, told: str) -> None:
    host.start()
    assert host.do(asked) == ("failed", told)


def test_who_prepares_nothing_has_nothing_to_take_back(host: Host) -> None:
    host.start()
    assert host.do(work("r", RELEASE, backend="plain")) == ("done", None)
    host.stop()


def test_nothing_begins_unless_all_can(host: Host) -> None:
    items = (Item("b0", CARD, CARD, "h1"), Item("plain", CARD, CARD, "h2"))
    state, error = host.do(Work(name("p"), PREPARE, items, LONG))
    assert (state, str(error)[:16]) == ("failed", "prepare of h2: b")
    assert host.hand.acts == []


def test_what_is_no_longer_prepared_is_still_released(host: Host) -> None:
    host.driver.able = frozenset({Ability.PROGRAMS})
    assert host.do(work("p"))[0] == "failed"
    assert host.do(work("r", RELEASE)) == ("done", None)


def test_a_backend_that_was_given_up_takes_back_and_no_more() -> None:
    gone = Able("b9")
    for kind, told in ((RELEASE, None), (PREPARE, "prepare of h1: this host has no backend 'b9'")):
        error = carry_out(work("x", kind, backend="b9"), {}, retired={"b9": gone}.get)
        assert (error or "").startswith(told or "")
        assert (error is None) is (told is None)
    assert gone.hand.acts == [("release", "h1")]


def test_one_that_cannot_be_made_again_says_why() -> None:
    def gone(backend: str) -> Able | None:
        raise DriverFailed(f"driver of {backend} cannot be loaded: it left")

    told = carry_out(work("r", RELEASE, "h1", "h2", backend="b9"), {}, retired=gone)
    assert told is not None
    assert told.startswith("release of h1: driver of b9 cannot be loaded: it left; release of h2")
