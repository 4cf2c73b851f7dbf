# SPDX-License-Identifier: Apache-2.0
"""The nvme driver on a real kernel: data of a tenant is gone after the erasure."""

from collections.abc import Mapping
from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest
from cyborg.tests.lab.programs.drive import SIZE

pytestmark = pytest.mark.lab

DRIVE_PROGRAM = "erase"
SECRETS = 3 * 4096


@pytest.fixture(scope="module")
def results(drive_programs: Mapping[str, str]) -> Any:
    """Return the results of the program ``erase``."""
    return guest.read_result(drive_programs[DRIVE_PROGRAM])


def test_discover_describes_the_drive(results: Any) -> None:
    device, *_ = results
    assert (device["type"], device["serial"]) == ("SSD", "lab0")
    assert device["std_board_info"]["capacity_bytes"] == str(SIZE)
    assert device["std_board_info"]["model_number"] == "QEMU NVMe Ctrl"
    (part,) = device["deployables"]
    assert part["resource_class"] == "CUSTOM_NVME"


@pytest.mark.parametrize("case", [0, 1, 2], ids=["nvme", "vfio-pci", "no kernel driver"])
def test_sanitise_leaves_no_data_of_a_tenant(results: Any, case: int) -> None:
    counts = results[1]
    assert counts[case] == [SECRETS, 0]


def test_sanitise_leaves_the_kernel_driver_as_it_was(results: Any) -> None:
    """Without a driver, libvirt may be about to bind it to nvme."""
    assert results[3] == ["nvme", "vfio-pci", "nvme"]


def test_sanitise_drive_in_use_is_refused(results: Any) -> None:
    counts = results[1]
    assert counts[3] == ["/dev/nvme0n1 cannot be opened: Device or resource busy", SECRETS]


def test_class_by_capacity_stays_while_the_kernel_does_not_show_the_capacity(results: Any) -> None:
    assert results[2] == ["CUSTOM_NVME_SSD_16_8MB"] * 3
