# SPDX-License-Identifier: Apache-2.0
"""The registry while backends are added and removed."""

from itertools import permutations

import pytest

from cyborg.agent.backends.backend import Backend
from cyborg.agent.backends.inventory import BackendRegistry
from cyborg.tests.fixtures.hosts.scripted_driver import ScriptedDriver

NAMES = ("z", "a", "new", "also", "sock")


def backend(name: str) -> Backend:
    return Backend(ScriptedDriver(name), 3600, 3600)


@pytest.mark.parametrize("order", list(permutations(NAMES))[::17])
def test_registry_order_is_independent_of_insertion(order: tuple[str, ...]) -> None:
    registry = BackendRegistry(["z", "a"], ["sock"])
    for name in order:
        assert registry.replace(backend(name)) is None
    assert [backend.name for backend in registry] == ["z", "a", "also", "new", "sock"]
    assert (len(registry), registry[0].name, [backend.name for backend in registry[-2:]]) == (
        5,
        "z",
        ["new", "sock"],
    )


def test_replace_same_name_returns_old_backend() -> None:
    registry, old, new = BackendRegistry(), backend("a"), backend("a")
    registry.replace(backend("b"))
    registry.replace(old)
    iterator = iter(registry)
    assert next(iterator) is old
    assert registry.replace(new) is old
    assert registry[0] is new
    assert next(iterator).name == "b", "who goes through it sees what there was"
    assert (registry.get("a"), registry.get("x")) == (new, None)
    assert registry.remove("a") is new
    assert registry.remove("a") is None
    assert [backend.name for backend in registry] == ["b"]
