# SPDX-License-Identifier: Apache-2.0
"""The generic driver on the PCI bus of a real kernel: an NVMe drive with SR-IOV."""

from typing import Any

import pytest

from cyborg.tests.fixtures.machine import guest

pytestmark = pytest.mark.lab

DEVICES = (*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME, *guest.EDU)


@pytest.fixture(scope="module")
def devices() -> list[Any]:
    """Return the devices in the guest before and after the creation of two VFs."""
    devices: list[Any] = guest.run_program("virtual_functions", DEVICES)
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
