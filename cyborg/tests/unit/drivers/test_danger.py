# SPDX-License-Identifier: Apache-2.0
"""Dangerous devices and arguments: each driver refuses them, and writes nothing.

The environment of the conformance kit records what a call writes: opened files, changed folders,
processes and connections. Each test asserts that the record is empty and the tree is unchanged.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import NOT_OFFERED, Device
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.crypto.driver import CryptoDriver
from cyborg.drivers.fpga.driver import FpgaDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.drivers.kernel.nvme import Method
from cyborg.drivers.nic.driver import NicDriver
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.drivers.pci.driver import PciDriver
from cyborg.drivers.privileged import CONTEXT, fpga, gpu, nvme, pci, qat
from cyborg.testing.conformance.environment import CallResult, DriverUnderTest, Environment
from cyborg.testing.machine import HostTree
from cyborg.tests.fixtures.drivers import family_drivers

DRIVE, CARD, GPU, ACCELERATOR = "0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0"
PROGRAMMABLE = "0000:05:00.0"
METHODS = [method.value for method in Method]
FAMILIES: dict[str, tuple[type[PciDriver], tuple[str, str, str], str]] = {
    DRIVE: (NvmeDriver, ("144d", "a80a", "010802"), "nvme"),
    CARD: (NicDriver, ("8086", "10fb", "020000"), "ixgbe"),
    GPU: (GpuDriver, ("10de", "1eb8", "030200"), "nvidia"),
    ACCELERATOR: (CryptoDriver, ("8086", "4940", "0b4000"), "4xxx"),
    PROGRAMMABLE: (FpgaDriver, ("8086", "bcce", "120000"), "dfl-pci"),
}
EVERYTHING = {"devices": ("address=*,functions=all",), "health": ()}


def test_families_have_each_driver_of_a_family() -> None:
    assert {driver for driver, _, _ in FAMILIES.values()} == set(family_drivers().values())


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostTree:
    """Return a host with one function of each family; privileged functions see it as the host."""
    tree = HostTree(tmp_path)
    for address, (_, ids, kernel_driver) in FAMILIES.items():
        tree.add_function(address, *ids, kernel_driver=kernel_driver, totalvfs=4)
    tree.add_disk("nvme0n1", f"pci0000:00/{DRIVE}/nvme/nvme0", ["nvme0n1p1"])
    attributes = tree.bus / ACCELERATOR / "qat"
    attributes.mkdir()
    (attributes / "state").write_text("up\n")
    (attributes / "cfg_services").write_text("sym;asym\n")
    for module in (fpga, gpu, nvme, qat, pci):
        monkeypatch.setattr(module, "_SYS", tree.root)
    for module in (fpga, gpu, nvme, pci):
        monkeypatch.setattr(module, "_DEV", tmp_path / "dev")
    monkeypatch.setattr(CONTEXT, "client_mode", False)
    return tree


def snapshot(host: HostTree) -> dict[str, str]:
    """Return the files and links of the tree with their content."""
    found = {}
    for path in sorted(host.root.rglob("*")):
        if path.is_symlink():
            found[str(path)] = f"link to {path.readlink()}"
        elif path.is_file():
            found[str(path)] = path.read_text()
    return found


def call_without_effect(host: HostTree, act: Callable[[], Any]) -> CallResult:
    """Call a function; fail if it writes anything, or does not return."""
    before = snapshot(host)
    call = Environment(DriverUnderTest(driver=None)).call(act)
    assert not call.timed_out
    # An open VFIO group shows whether a process uses it; nothing is written to it.
    assert [effect for effect in call.effects if "/dev/vfio/" not in effect] == []
    assert snapshot(host) == before
    return call


def assert_refused(host: HostTree, act: Callable[[], Any], reason: str) -> None:
    """Fail unless the call raises DriverFailed with this reason, and writes nothing."""
    error = call_without_effect(host, act).error
    assert isinstance(error, DriverFailed), error
    assert reason in str(error)


def discover(host: HostTree, driver: type[PciDriver], address: str, **options: Any) -> Device:
    """Return the device at an address as the driver reports it."""
    subject = driver("b", EVERYTHING | options, host.root)
    call = call_without_effect(host, subject.discover)
    assert call.error is None
    (device,) = [device for device in call.value if device.address == address]
    assert isinstance(device, Device)
    return device


def assert_not_offered(device: Device, reason: str) -> None:
    assert device.deployables == ()
    assert reason in device.vendor_board_info[NOT_OFFERED]


def item(address: str, handle: str | None = None) -> WorkItem:
    return WorkItem("b", address, address, address if handle is None else handle)


@pytest.mark.parametrize("driver", [GenericDriver, NvmeDriver])
def test_boot_disk_is_refused(host: HostTree, driver: type[PciDriver]) -> None:
    host.mount("nvme0n1p1", "/")
    reason = "nvme0n1p1 holds the root file system"
    assert_not_offered(discover(host, driver, DRIVE), reason)
    subject = driver("b", EVERYTHING, host.root)
    assert_refused(host, lambda: subject.check_adoption([DRIVE]), reason)


@pytest.mark.parametrize("use", ["file system", "swap", "part of a volume"])
def test_disk_of_the_host_is_not_erased(host: HostTree, use: str) -> None:
    if use == "file system":
        host.mount("nvme0n1p1", "/srv")
    elif use == "swap":
        host.enable_swap("/dev/nvme0n1p1")
    else:
        host.add_disk("dm-0", "virtual/block", slaves=["nvme0n1p1"])
        host.mount("dm-0", "/srv")
    assert_refused(host, lambda: nvme.erase(DRIVE, 60.0, METHODS), f"{DRIVE} cannot be erased")


@pytest.mark.parametrize("driver", [GenericDriver, NicDriver])
def test_network_card_in_use_is_refused(host: HostTree, driver: type[PciDriver]) -> None:
    host.add_interface("eth0", CARD)
    host.add_route("eth0")
    reason = "eth0 has the default route"
    assert_not_offered(discover(host, driver, CARD), reason)
    subject = driver("b", EVERYTHING, host.root)
    assert_refused(host, lambda: subject.check_adoption([CARD]), reason)


@pytest.mark.parametrize("address", FAMILIES)
def test_shared_iommu_group_is_refused(host: HostTree, address: str) -> None:
    """The other function of the group has a driver of the host."""
    other = "0000:0a:00.0"
    host.add_function(other, "8086", "1533", "020000", kernel_driver="igb", iommu_group="7")
    group = host.bus / address / "iommu_group"
    target = group.resolve()
    group.unlink()
    group.symlink_to(target.parent / "7")
    device = discover(host, FAMILIES[address][0], address)
    assert not device.deliverable
    assert f"it shares IOMMU group 7 with {other} (igb" in str(device.undeliverable_reason)


@pytest.mark.parametrize("address", FAMILIES)
def test_physical_function_of_a_bound_virtual_function_is_not_offered(
    host: HostTree, address: str
) -> None:
    driver, (_, product, class_code), _ = FAMILIES[address]
    virtual, other = host.enable_virtual_functions(address, 2, product, class_code)
    if driver in (CryptoDriver, FpgaDriver):
        for name in (virtual, other):
            (host.bus / name / "device").write_text(
                "0x4941\n" if driver is CryptoDriver else "0xbccf\n"
            )
    device = discover(host, driver, address)
    handles = {handle.address for unit in device.deployables for handle in unit.handles}
    assert handles == {virtual, other}


def test_physical_function_of_a_bound_virtual_function_is_not_changed(host: HostTree) -> None:
    host.enable_virtual_functions(DRIVE, 1, "a80a", "010802")
    assert_refused(host, lambda: nvme.erase(DRIVE, 60.0, METHODS), "has virtual functions")
    host.enable_virtual_functions(ACCELERATOR, 1, "4941", "0b4000")
    assert_refused(host, lambda: qat.set_services(ACCELERATOR, "dc"), "virtual functions")


@pytest.mark.parametrize("count", [0, 4])
def test_virtual_function_in_use_is_not_removed(host: HostTree, count: int) -> None:
    (virtual,) = host.enable_virtual_functions(CARD, 1, "10ed", "020000")
    (host.bus / virtual / "driver").symlink_to(host.root / "bus/pci/drivers/vfio-pci")
    reason = f"the virtual function {virtual} is or may be in use"
    assert_refused(host, lambda: pci.set_count(CARD, count, False, True), reason)


@pytest.mark.parametrize("address", [DRIVE, CARD])
def test_card_of_the_host_gets_no_virtual_functions(host: HostTree, address: str) -> None:
    host.mount("nvme0n1p1", "/")
    host.add_interface("eth0", CARD)
    host.add_route("eth0")
    assert_refused(host, lambda: pci.set_count(address, 2, False, False), "the host uses it")


def test_active_display_is_refused(host: HostTree) -> None:
    host.add_display(GPU, "card0-DP-1", enabled=True)
    for driver in (GpuDriver, GenericDriver):
        device = discover(host, driver, GPU)
        assert device.deployables == ()
        assert not device.deliverable or NOT_OFFERED in device.vendor_board_info
    subject = GpuDriver("b", EVERYTHING, host.root)
    assert_refused(host, lambda: subject.prepare(item(GPU), None), "cannot be given to a server")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["..", "a/../b", "mtty-1\n", "", "x\0y"])
def test_malformed_name_of_a_mediated_device_is_refused(host: HostTree, name: str) -> None:
    device = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"
    for arguments in ((name, "mtty-1", device), ("mtty", name, device), ("mtty", "mtty-1", name)):
        for act in (gpu.create, gpu.remove):
            error = call_without_effect(host, lambda: act(*arguments)).error  # noqa: B023
            assert type(error).__name__ == "Invalid", error


IMAGE = "9a17439a-85d0-4c53-a3d3-0f68a2eac896"


@pytest.mark.parametrize(
    ("image", "path"),
    [
        ("..", "/tmp/image"),
        (f"../{IMAGE}", "/tmp/image"),
        (f"{IMAGE}\n", "/tmp/image"),
        (IMAGE, "image"),
        (IMAGE, "/tmp/../etc/shadow"),
        (IMAGE, "/tmp/image\n"),
        (IMAGE, "/tmp/im\0age"),
    ],
)
def test_malformed_name_of_an_image_is_refused(host: HostTree, image: str, path: str) -> None:
    (host.root / "class/fpga_manager/fpga0").mkdir(parents=True)
    (host.root / "class/fpga_manager/fpga0/firmware").touch()
    error = call_without_effect(host, lambda: fpga.load_firmware("fpga0", image, path, 10)).error
    assert type(error).__name__ == "Invalid", error


def test_image_of_ten_gibibytes_is_refused(host: HostTree, tmp_path: Path) -> None:
    """The image store refuses it before its data are requested; the driver's function again."""
    (host.root / "class/fpga_manager/fpga0").mkdir(parents=True)
    (host.root / "class/fpga_manager/fpga0/firmware").touch()
    large = tmp_path / "image"
    with large.open("wb") as file:
        file.truncate(10 << 30)
    assert_refused(
        host, lambda: fpga.load_firmware("fpga0", IMAGE, str(large), 10 << 30), "the limit is"
    )


@pytest.mark.parametrize("address", [f"../{DRIVE}", f"{DRIVE}\n", f"{DRIVE}/../x", ""])
def test_malformed_address_is_refused(host: HostTree, address: str) -> None:
    for act in (
        lambda: nvme.erase(address, 60.0, METHODS),
        lambda: qat.set_services(address, "dc"),
    ):
        error = call_without_effect(host, act).error
        assert type(error).__name__ == "Invalid", error
