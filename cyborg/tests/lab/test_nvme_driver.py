# SPDX-License-Identifier: Apache-2.0
"""The nvme driver on a real kernel: data of a tenant is gone after the erasure."""

from pathlib import Path
from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest

pytestmark = [pytest.mark.lab, pytest.mark.long]

SIZE = 16 << 20
SECRETS = 3 * 4096


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of the program ``erase``."""
    disk: Path = tmp_path_factory.mktemp("disk") / "disk.raw"
    disk.write_bytes(bytes(SIZE))
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME]
    devices += ["-drive", f"file={disk},format=raw,if=none,id=disk0"]
    devices += ["-device", "nvme-ns,drive=disk0,bus=nvme0"]
    return guest.run_program("erase", devices)


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
    assert results[4] == ["nvme", "vfio-pci", "nvme"]


def test_sanitise_drive_in_use_is_refused(results: Any) -> None:
    counts = results[1]
    assert counts[3] == ["/dev/nvme0n1 cannot be opened: Device or resource busy", SECRETS]


def test_drive_with_partitions_is_not_offered_until_they_are_erased(results: Any) -> None:
    """The guest has no udev: the disk itself is read."""
    before, after = results[3]
    reason = "nvme0n1 holds a partition table (dos); erase it, for example with wipefs, or adopt "
    assert before == [reason + "the device", ["/dev/nvme0n1p1"]]
    assert after == [None, []]


def test_class_by_capacity_stays_while_the_kernel_does_not_show_the_capacity(results: Any) -> None:
    assert results[2] == ["CUSTOM_NVME_SSD_16_8MB"] * 3


@pytest.mark.parametrize("policy", ["purge", "block|crypto"])
def test_drive_without_a_permitted_method_is_neither_scheduled_nor_erased(
    results: Any, policy: str
) -> None:
    """QEMU's controller supports only Format NVM with user data erase."""
    reason, error, lines, secrets = results[5][policy]
    assert "can be erased only by: format, user data erase. Permit that with erase=clear" in reason
    assert error == reason
    assert lines == []
    assert secrets == SECRETS


def test_drive_is_erased_by_the_second_choice_of_its_rule(results: Any) -> None:
    reason, error, lines, secrets = results[5]["block|clear"]
    assert (reason, error, secrets) == (None, "", 0)
    (line,) = lines
    assert line.startswith(
        "Erased 1 namespaces by format, user data erase (policy erase=block|clear), verified: "
    )
