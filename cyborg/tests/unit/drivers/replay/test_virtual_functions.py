# SPDX-License-Identifier: Apache-2.0
"""Virtual functions of a replayed host, created and removed, with and without faults."""

from collections.abc import Iterator

import pytest

from cyborg.core.capture.model import parse_fault
from cyborg.core.errors import DriverFailed
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.nic.driver import NicDriver
from cyborg.drivers.replay.host import ReplayedHost
from cyborg.testing import captures

CARD, OTHER, INTEL = "0000:c1:00.0", "0000:e1:00.0", "0000:18:00.0"


@pytest.fixture
def host() -> Iterator[ReplayedHost]:
    found = ReplayedHost(captures.load_all(["connectx-6", "nic-vfs"]))
    yield found
    found.close()


def nic_of(host: ReplayedHost, **options: object) -> NicDriver:
    driver = host.create_driver(NicDriver, "nic", {**captures.DRIVERS["nic"], **options})
    assert isinstance(driver, NicDriver)
    return driver


def handles(driver: GenericDriver) -> dict[str, list[str]]:
    return {
        device.address: [handle.address for part in device.deployables for handle in part.handles]
        for device in driver.discover()
    }


def test_each_handle_has_the_network_of_its_card(host: ReplayedHost) -> None:
    devices = nic_of(host).discover()
    networks = {
        device.address: {
            handle.info["physical_network"]
            for part in device.deployables
            for handle in part.handles
        }
        for device in devices
    }
    assert networks == {CARD: {"physnet1"}, OTHER: {"physnet2"}}
    assert [len(part.handles) for device in devices for part in device.deployables] == [4, 4]


@pytest.mark.slow
def test_card_gets_another_number_of_virtual_functions(host: ReplayedHost) -> None:
    driver = nic_of(host)
    before = handles(driver)
    driver.partition(WorkItem("nic", CARD, ""), "vfs-2")
    assert handles(driver) == before | {CARD: ["0000:c1:00.1", "0000:c1:00.2"]}
    driver.partition(WorkItem("nic", CARD, ""), "vfs-4")
    assert handles(driver) == before
    assert all(device.deliverable for device in driver.discover())
    groups = host.kernel.sysfs.list_names("kernel/iommu_groups")
    assert len(groups) == 10 + 9


def test_virtual_functions_of_vfio_are_replaced(host: ReplayedHost) -> None:
    options = {**captures.DRIVERS["generic"], "vf_counts": ["3", "8"]}
    driver = host.create_driver(GenericDriver, "generic", options)
    assert isinstance(driver, GenericDriver)
    driver.partition(WorkItem("generic", INTEL, ""), "vfs-3")
    assert handles(driver) == {INTEL: ["0000:18:01.0", "0000:18:01.1", "0000:18:01.2"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("eio=1@create", "Input/output error; the previous 4 virtual functions were restored"),
        ("ebusy@remove", "cannot be removed: Device or resource busy"),
        (
            "stuck_reset=1@create",
            "Connection timed out; the previous 4 virtual functions were restored",
        ),
    ],
)
def test_fault_of_a_card_keeps_its_virtual_functions(
    host: ReplayedHost, fault: str, message: str
) -> None:
    host.kernel.add_fault(parse_fault(f"{CARD}:{fault}"))
    driver = nic_of(host)
    before = handles(driver)
    with pytest.raises(DriverFailed, match=message):
        driver.partition(WorkItem("nic", CARD, ""), "vfs-2")
    assert handles(driver) == before
    driver.partition(WorkItem("nic", OTHER, ""), "vfs-2")
    assert len(handles(driver)[OTHER]) == 2


def test_card_whose_virtual_functions_cannot_be_restored_has_none(host: ReplayedHost) -> None:
    host.kernel.add_fault(parse_fault(f"{CARD}:eio@create"))
    driver = nic_of(host)
    with pytest.raises(DriverFailed, match="its 4 virtual functions cannot be restored"):
        driver.partition(WorkItem("nic", CARD, ""), "vfs-2")
    assert {address: len(found) for address, found in handles(driver).items()} == {
        CARD: 0,
        OTHER: 4,
    }


@pytest.mark.parametrize("fault", ["disappears", "disappears=1@create"])
def test_card_that_disappears_takes_its_virtual_functions_along(
    host: ReplayedHost, fault: str
) -> None:
    host.kernel.add_fault(parse_fault(f"{CARD}:{fault}"))
    driver = nic_of(host)
    with pytest.raises(DriverFailed, match="No such device"):
        driver.partition(WorkItem("nic", CARD, ""), "vfs-2")
    assert set(handles(driver)) == {OTHER}
    assert not [name for name in host.kernel.sysfs.list_names("bus/pci/devices") if "c1:" in name]


def test_bus_without_room_keeps_the_previous_number(host: ReplayedHost) -> None:
    driver = nic_of(host, vf_counts=["2"])
    (host.sysfs_root / "bus/pci/devices" / CARD / "sriov_stride").write_text("0\n")
    with pytest.raises(DriverFailed, match="cannot get 2 virtual functions: Cannot allocate"):
        driver.partition(WorkItem("nic", CARD, ""), "vfs-2")
