# SPDX-License-Identifier: Apache-2.0
"""The generic driver on the PCI bus of a real kernel: an NVMe drive with SR-IOV, and its IOMMU."""

from collections.abc import Mapping
from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest

pytestmark = [pytest.mark.lab, pytest.mark.matrix]

# Functions that share an IOMMU group.
FIRST, SECOND = "0000:00:1a.0", "0000:00:1a.1"
DRIVE_PROGRAM = "virtual_functions"


@pytest.fixture(scope="module")
def devices(drive_programs: Mapping[str, str]) -> list[Any]:
    """Return the devices in the guest before and after the creation of two VFs.

    Then those before vfio-pci is loaded, the functions of each IOMMU group, errors of resets,
    and what their check says.
    """
    devices: list[Any] = guest.read_result(drive_programs[DRIVE_PROGRAM])
    return devices


def test_drive_without_sriov_is_one_handle(devices: list[Any]) -> None:
    before = {d["address"]: d for d in devices[0]}
    drives = [d for d in before.values() if d["type"] == "SSD"]
    assert len(drives) == 1
    (part,) = drives[0]["deployables"]
    assert [h["address"] for h in part["handles"]] == [drives[0]["address"]]
    assert any(d["vendor"] == "1234" for d in before.values())


def test_virtual_functions_become_handles_of_one_provider(devices: list[Any]) -> None:
    drives = [d for d in devices[1] if d["type"] == "SSD"]
    assert len(drives) == 1, "the VFs are handles of their drive, not devices"
    (part,) = drives[0]["deployables"]
    addresses = [h["address"] for h in part["handles"]]
    assert len(addresses) == 2
    assert drives[0]["address"] not in addresses
    assert all(h["type"] == "PCI" for h in part["handles"])


def test_function_with_own_group_is_deliverable(devices: list[Any]) -> None:
    groups = devices[3].values()
    for device in (*devices[0], *devices[1]):
        if device["address"] not in (FIRST, SECOND):
            assert device.get("deliverable", True), device
            assert [device["address"]] in groups


def test_functions_with_one_group_name_each_other(devices: list[Any]) -> None:
    assert [FIRST, SECOND] in devices[3].values(), "the kernel put them into one group"
    reasons = {d["address"]: d.get("undeliverable_reason", "") for d in devices[0]}
    assert f"with {SECOND} (offered too): bind these" in reasons[FIRST]
    assert f"with {FIRST} (offered too): bind these" in reasons[SECOND]


def test_installed_vfio_that_is_not_loaded_changes_nothing(devices: list[Any]) -> None:
    assert {d["address"]: d.get("deliverable", True) for d in devices[2]} == {
        d["address"]: d.get("deliverable", True) for d in devices[0]
    }


def test_topology_of_the_drive(devices: list[Any]) -> None:
    (drive,) = (d for d in devices[0] if d["type"] == "SSD")
    topology = drive["topology"]
    port, function = topology["pci_path"].split("/")
    assert (topology["pci_root"], function) == ("0000:00", drive["address"])
    assert port.startswith("0000:00:")
    assert drive["address"] in devices[3][topology["iommu_group"]]
    assert topology["max_link_width"] == "1"
    assert topology["max_link_speed"].endswith("GT/s PCIe")
    assert "flr" in topology["reset_methods"].split()


def test_virtual_function_is_reset_unless_a_process_uses_it(devices: list[Any]) -> None:
    resets = devices[4]
    assert resets["no kernel driver"] == ""
    assert resets["driver"] == "vfio-pci"
    assert resets["vfio-pci"] == ""
    assert "may still be used by a process: /dev/vfio/" in resets["in use"]
    assert resets["free again"] == ""


def test_reset_of_a_function_with_msi_is_checked(devices: list[Any]) -> None:
    """The kernel resets the bus of the function; QEMU clears the register, the kernel leaves it."""
    found = devices[5]
    assert (found["marked"], found["left"]) == (True, False)
    assert found["with MSI"] == "bus; checked"
    assert "; checked" not in found["without MSI"]


def test_functions_that_must_not_or_cannot_be_reset(devices: list[Any]) -> None:
    resets = devices[4]
    assert "the kernel driver nvme" in resets["with virtual functions"]
    assert "the kernel has no method to reset it" in resets["no method"]
    assert resets["no method, if possible"] == ""
