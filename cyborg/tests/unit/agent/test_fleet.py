# SPDX-License-Identifier: Apache-2.0
"""Backends that come and go while others look at them."""

from itertools import permutations

import pytest

from cyborg.agent.backend import Backend
from cyborg.agent.fleet import Fleet
from cyborg.fixtures.drivers import Puppet

NAMES = ("z", "a", "new", "also", "sock")


def backend(name: str) -> Backend:
    return Backend(Puppet(name), 3600, 3600)


@pytest.mark.parametrize("order", list(permutations(NAMES))[::17])
def test_the_order_does_not_depend_on_when_one_came(order: tuple[str, ...]) -> None:
    fleet = Fleet(["z", "a"], ["sock"])
    for name in order:
        assert fleet.put(backend(name)) is None
    assert [one.name for one in fleet] == ["z", "a", "also", "new", "sock"]
    assert (len(fleet), fleet[0].name, [one.name for one in fleet[-2:]]) == (
        5,
        "z",
        ["new", "sock"],
    )


def test_one_takes_the_place_of_the_one_before() -> None:
    fleet, old, new = Fleet(), backend("a"), backend("a")
    fleet.put(backend("b"))
    fleet.put(old)
    seen = iter(fleet)
    assert next(seen) is old
    assert fleet.put(new) is old
    assert fleet[0] is new
    assert next(seen).name == "b", "who goes through it sees what there was"
    assert (fleet.get("a"), fleet.get("x")) == (new, None)
    assert fleet.remove("a") is new
    assert fleet.remove("a") is None
    assert [one.name for one in fleet] == ["b"]
