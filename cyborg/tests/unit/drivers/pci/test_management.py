# SPDX-License-Identifier: Apache-2.0
"""The management function of an FPGA card stays on the host, unless it is adopted."""

from dataclasses import replace
from pathlib import Path

import pytest

from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.pci.classes import describe_management, find_user_function
from cyborg.drivers.sysfs import PciFunction
from cyborg.testing.sysfs_tree import SysfsTree

MANAGEMENT = PciFunction("0000:04:00.0", "10ee", "5004", "120000")
USER = replace(MANAGEMENT, address="0000:04:00.1", product="5005")


def test_find_user_function_of_the_same_slot() -> None:
    other = replace(USER, address="0000:05:00.1")
    bus = {function.address: function for function in (MANAGEMENT, USER, other)}
    assert find_user_function(MANAGEMENT, bus) == USER
    assert find_user_function(USER, bus) is None
    del bus[USER.address]
    assert find_user_function(MANAGEMENT, bus) is None


def test_management_function_is_withheld_unless_adopted(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    for function in (MANAGEMENT, USER):
        tree.add_function(function.address, function.vendor, function.product, function.class_code)
    options = {"devices": ["class=12"]}
    first, second = GenericDriver("g", options, tree.root).discover()
    assert first.vendor_board_info[NOT_OFFERED].startswith(
        "it manages the FPGA card (Alveo U250) whose user function is 0000:04:00.1; adopt it"
    )
    assert (len(first.deployables), len(second.deployables)) == (0, 1)
    driver = GenericDriver("g", options | {"adopt": [MANAGEMENT.address]}, tree.root)
    assert all(device.deployables for device in driver.discover())


@pytest.mark.parametrize(
    ("vendor", "product", "card"),
    [
        ("10ee", "50b4", "Alveo V80"),
        ("10ee", "d004", "golden image"),
        ("10ee", "5000", "Alveo U200"),
        ("1d0f", "1041", "AWS F1"),
        ("1d0f", "9248", "AWS F2"),
        ("8086", "0b30", "Intel N3000"),
        ("10ee", "50b5", None),
        ("1d0f", "f001", None),
        ("8086", "0d8f", None),
    ],
)
def test_management_function_without_user_function_is_known_by_its_ids(
    vendor: str, product: str, card: str | None
) -> None:
    function = replace(MANAGEMENT, vendor=vendor, product=product)
    reason = describe_management(function, {function.address: function})
    assert (reason is None) == (card is None)
    assert card is None or f"FPGA card ({card}); adopt it" in str(reason)


def test_find_user_function_of_a_v80() -> None:
    manager = replace(MANAGEMENT, product="50b4")
    user = replace(USER, product="50c1")
    assert find_user_function(manager, {f.address: f for f in (manager, user)}) == user
