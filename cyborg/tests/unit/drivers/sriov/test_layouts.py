# SPDX-License-Identifier: Apache-2.0
"""The layouts of the generic driver: numbers of virtual functions."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.inventory.device import NOT_OFFERED, Ability, Device, count_handles
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.pci import sriov
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.privileged import pci
from cyborg.drivers.sysfs import Sysfs
from cyborg.tests.unit.drivers.sriov.simulated_sriov import CARD, VIRTUAL, SimulatedSriov

NVME = "010802"
ALL = ["address=*"]
ONLY_VIRTUAL = ["vendor=8086,product=1889"]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedSriov:
    kernel = SimulatedSriov(tmp_path)
    kernel.redirect(monkeypatch)
    kernel.add_card(class_code=NVME, driver="nvme")
    return kernel


def make_driver(host: SimulatedSriov, rules: list[str], **options: Any) -> GenericDriver:
    options = {"devices": rules, "vf_counts": ["0", "2", "4", "8"]} | options
    access = replace(HostAccess.of(host.root), set_count=pci.set_count)
    return GenericDriver("g", options, host.root, access)


def discover(driver: GenericDriver, address: str = CARD) -> Device:
    (device,) = (device for device in driver.discover() if device.address == address)
    return device


def layouts_of(driver: GenericDriver, device: Device) -> Mapping[str, Mapping[str, int]]:
    return {layout.name: dict(layout.offers) for layout in driver.layouts(device)}


def current(driver: GenericDriver, device: Device) -> str | None:
    """Return the layout of a device as the agent finds it."""
    return next((lay.name for lay in driver.layouts(device) if lay.matches(device)), None)


def test_layouts_without_the_option_do_not_exist(host: SimulatedSriov) -> None:
    driver = GenericDriver("g", {"devices": ALL}, host.root)
    assert driver.abilities == {Ability.MEASURES}
    device = discover(driver)
    assert sriov.NUMVFS not in device.std_board_info
    assert "CUSTOM_SRIOV_VFS_0" not in device.deployables[0].traits
    assert GenericDriver("g", {"devices": ONLY_VIRTUAL}, host.root).discover() == []


def test_layouts_are_the_numbers_that_the_card_can_have(host: SimulatedSriov) -> None:
    driver = make_driver(host, ALL)
    assert Ability.PARTITIONS in driver.abilities
    device = discover(driver)
    one, two, four = ({"CUSTOM_NVME": n} for n in (1, 2, 4))
    assert layouts_of(driver, device) == {"vfs-0": one, "vfs-2": two, "vfs-4": four}
    assert current(driver, device) == "vfs-0"
    assert device.std_board_info[sriov.NUMVFS] == "0"


def test_partition_changes_what_is_offered_and_back(host: SimulatedSriov) -> None:
    driver = make_driver(host, ALL)
    item = WorkItem("g", CARD, "")
    driver.discover()
    for layout, addresses in (("vfs-2", VIRTUAL[:2]), ("vfs-4", VIRTUAL), ("vfs-0", (CARD,))):
        driver.partition(item, layout)
        driver.partition(item, layout)
        for observer in (driver, make_driver(host, ALL)):
            device = discover(observer)
            (part,) = device.deployables
            assert tuple(handle.address for handle in part.handles) == addresses
            assert current(observer, device) == layout
    values = [text for name, text in host.writes if name == "sriov_numvfs"]
    assert values == ["2", "0", "4", "0"]


def test_layout_of_one_virtual_function_differs_from_the_whole_card(host: SimulatedSriov) -> None:
    driver = make_driver(host, ALL, vf_counts=["0", "1"])
    whole = discover(driver)
    driver.partition(WorkItem("g", CARD, ""), "vfs-1")
    one = discover(driver)
    assert count_handles(whole) == count_handles(one)
    assert (current(driver, whole), current(driver, one)) == ("vfs-0", "vfs-1")


def test_card_that_no_rule_selects_is_shown_for_its_virtual_functions(
    host: SimulatedSriov,
) -> None:
    driver = make_driver(host, ONLY_VIRTUAL)
    device = discover(driver)
    assert device.deployables == ()
    assert (device.deliverable, device.undeliverable_reason) == (True, None)
    assert device.vendor_board_info[NOT_OFFERED] == sriov.NOT_SELECTED
    assert layouts_of(driver, device) == {
        "vfs-0": {},
        "vfs-2": {"CUSTOM_NVME": 2},
        "vfs-4": {"CUSTOM_NVME": 4},
    }
    assert driver.remarks == ()
    driver.partition(WorkItem("g", CARD, ""), "vfs-4")
    assert count_handles(discover(driver)) == {"CUSTOM_NVME": 4}


def test_card_that_the_host_uses_is_shown_with_its_layouts_and_not_changed(
    host: SimulatedSriov,
) -> None:
    host.mount("nvme0n1", "/srv")
    driver = make_driver(host, ALL)
    device = discover(driver)
    assert device.deployables == ()
    assert "nvme0n1 holds the file system /srv" in device.vendor_board_info[NOT_OFFERED]
    assert layouts_of(driver, device)["vfs-0"] == {}
    with pytest.raises(DriverFailed, match="the host uses it: nvme0n1 holds the file system /srv"):
        driver.partition(WorkItem("g", CARD, ""), "vfs-2")
    assert host.writes == []


def test_layout_whose_virtual_functions_no_rule_selects_does_not_exist(
    host: SimulatedSriov,
) -> None:
    driver = make_driver(host, ["product=1592"])
    device = discover(driver)
    assert layouts_of(driver, device) == {"vfs-0": {"CUSTOM_NVME": 1}}
    with pytest.raises(DriverFailed, match="no layout 'vfs-2': expected one of vfs-0"):
        driver.partition(WorkItem("g", CARD, ""), "vfs-2")
    assert host.writes == []


def test_layout_counts_the_virtual_functions_that_a_rule_selects_by_address(
    host: SimulatedSriov,
) -> None:
    driver = make_driver(host, [f"address={VIRTUAL[0]},resource_class=CUSTOM_A", "address=*"])
    layouts = layouts_of(driver, discover(driver))
    assert layouts["vfs-4"] == {"CUSTOM_A": 1, "CUSTOM_NVME": 3}
    driver.partition(WorkItem("g", CARD, ""), "vfs-4")
    device = discover(driver)
    assert count_handles(device) == layouts["vfs-4"]
    assert current(driver, device) == "vfs-4"


def test_number_that_the_host_has_set_is_the_current_layout(host: SimulatedSriov) -> None:
    host.enable(3)
    driver = make_driver(host, ALL)
    device = discover(driver)
    assert current(driver, device) == "vfs-3"
    assert list(layouts_of(driver, device)) == ["vfs-3", "vfs-0", "vfs-2", "vfs-4"]


@pytest.mark.parametrize("layout", ["", "vfs-", "vfs-02", "vfs-8", "vfs-3", "vfs-2\n", "fixed"])
def test_partition_unknown_layout_is_refused(host: SimulatedSriov, layout: str) -> None:
    driver = make_driver(host, ALL)
    driver.discover()
    with pytest.raises(DriverFailed, match="expected one of vfs-0, vfs-2, vfs-4"):
        driver.partition(WorkItem("g", CARD, ""), layout)
    assert host.writes == []


def test_device_without_sriov_has_the_layout_fixed(host: SimulatedSriov) -> None:
    host.add_function("0000:04:00.0")
    driver = make_driver(host, ALL)
    device = discover(driver, "0000:04:00.0")
    assert layouts_of(driver, device) == {"fixed": {"CUSTOM_QAT": 1}}
    driver.partition(WorkItem("g", "0000:04:00.0", ""), "fixed")
    with pytest.raises(DriverFailed, match="no layout 'vfs-2': expected one of fixed"):
        driver.partition(WorkItem("g", "0000:04:00.0", ""), "vfs-2")


def test_partition_missing_device_is_refused(host: SimulatedSriov) -> None:
    with pytest.raises(DriverFailed, match=r"there is no device 0000:0f:00\.0"):
        make_driver(host, ALL).partition(WorkItem("g", "0000:0f:00.0", ""), "vfs-2")


def test_released_card_has_no_layouts(host: SimulatedSriov) -> None:
    assert make_driver(host, ONLY_VIRTUAL, release=[CARD]).discover() == []


def test_driver_on_another_sysfs_changes_nothing(host: SimulatedSriov) -> None:
    driver = GenericDriver("g", {"devices": ALL, "vf_counts": ["0", "2"]}, host.root)
    driver.discover()
    with pytest.raises(DriverFailed, match="it is not a device of this host"):
        driver.partition(WorkItem("g", CARD, ""), "vfs-2")
    assert host.writes == []


@pytest.mark.parametrize("counts", [["x"], ["-1"], ["02"], ["65536"], [str(n) for n in range(64)]])
def test_vf_counts_invalid_is_misconfigured(host: SimulatedSriov, counts: list[str]) -> None:
    with pytest.raises(Misconfigured, match="vf_counts"):
        make_driver(host, ALL, vf_counts=counts)


@pytest.mark.parametrize(
    ("files", "addresses"),
    [
        ({"sriov_offset": "16", "sriov_stride": "2"}, ["0000:3b:02.0", "0000:3b:02.2"]),
        ({"sriov_offset": "256", "sriov_stride": "8"}, ["0000:3c:00.0", "0000:3c:01.0"]),
        ({"sriov_offset": "0", "sriov_stride": "0"}, [CARD, CARD]),
        ({"sriov_offset": "60000"}, [CARD, CARD]),
        ({"sriov_vf_device": "ffffffff"}, []),
    ],
)
def test_predict_follows_the_registers(
    host: SimulatedSriov, files: dict[str, str], addresses: list[str]
) -> None:
    for name, value in files.items():
        (host.bus / CARD / name).write_text(f"{value}\n")
    sysfs = Sysfs(host.root)
    card = sysfs.pci_function(CARD)
    assert card is not None
    assert [function.address for function in sriov.predict(sysfs, card, 2)] == addresses
