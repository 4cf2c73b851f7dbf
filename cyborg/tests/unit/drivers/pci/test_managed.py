# SPDX-License-Identifier: Apache-2.0
"""Adoptions that a change of the options adds, from the request of an operator to the driver."""

from typing import Any

import pytest

from cyborg.core.drivers.desired_state import managed_options
from cyborg.core.errors import Misconfigured
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.pci.managed import added_addresses

A, B = "0000:01:00.0", "0000:02:00.0"


def make_driver(**options: Any) -> GenericDriver:
    return GenericDriver("gen0", options, "/nowhere/sys")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"adopt": [A]}, ([A], [])),
        ({}, {"adopt_in_use": [f"{A}@1"]}, ([A], [A])),
        ({"adopt": [A]}, {"adopt_in_use": [f"{A}@1"]}, ([A], [A])),
        ({"adopt_in_use": [f"{A}@1"]}, {"adopt_in_use": [f"{A}@2", f"{B}@1"]}, ([A, B], [A, B])),
        ({"adopt_in_use": [f"{A}@1"]}, {"adopt_in_use": [f"{A}@1"]}, ([], [])),
        ({"adopt_in_use": ["01:00.0@1"]}, {"adopt_in_use": [f"{A}@1"]}, ([], [])),
        ({"adopt_in_use": [f"{A}@1"]}, {"adopt": [A]}, ([A], [])),
        (None, {"adopt": [A], "adopt_in_use": [f"{B}@1"]}, ([A], [])),
    ],
)
def test_added_addresses(before: Any, after: Any, expected: Any) -> None:
    """An agent that starts does not know that an operator has just forced an adoption."""
    previous = None if before is None else make_driver(**before)
    assert added_addresses(make_driver(**after), previous) == expected


def test_repeated_force_is_a_new_adoption() -> None:
    first = managed_options({}, A, "adopt_in_use", "06:00")
    second = {**first, **managed_options(first, A, "adopt_in_use", "07:00")}
    assert second["adopt_in_use"] == [f"{A}@07:00"]
    assert added_addresses(make_driver(**second), make_driver(**first)) == ([A], [A])
    last = {**second, **managed_options(second, A, "release")}
    assert last == {"adopt_in_use": [], "release": [A]}


def test_address_that_is_adopted_and_released_is_misconfigured() -> None:
    with pytest.raises(Misconfigured, match="no address that is also in adopt"):
        make_driver(adopt_in_use=[f"{A}@1"], release=[A])
    with pytest.raises(Misconfigured, match="PCI addresses such as"):
        make_driver(adopt_in_use=["eth0@1"])
