# SPDX-License-Identifier: Apache-2.0
"""The generic driver on hosts that cannot deliver all of their functions."""

from pathlib import Path
from typing import Any

import pytest

from cyborg.core.inventory.device import NOT_OFFERED, Device
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.sysfs import Sysfs
from cyborg.testing.machine import HostTree
from cyborg.testing.sysfs_tree import SysfsTree

PF, SECOND, OTHER = "0000:3d:00.0", "0000:3d:00.1", "0000:3e:00.0"


@pytest.fixture
def tree(tmp_path: Path) -> SysfsTree:
    return SysfsTree(tmp_path / "sys")


def discover(tree: SysfsTree, *rules: str, **options: Any) -> dict[str, Device]:
    driver = GenericDriver("gen0", {"devices": rules or ("vendor=8086",), **options}, tree.root)
    return {device.address: device for device in driver.discover()}


def handles(device: Device) -> list[str]:
    return [handle.address for part in device.deployables for handle in part.handles]


def test_discover_function_with_own_group_is_deliverable(tree: SysfsTree) -> None:
    tree.add_function(PF)
    device = discover(tree)[PF]
    assert (device.deliverable, device.undeliverable_reason) == (True, None)
    assert {"deliverable", "undeliverable_reason"}.isdisjoint(device.to_dict())


def test_discover_host_without_iommu_shows_undeliverable_device(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path / "sys", iommu=False)
    tree.add_function(PF)
    device = discover(tree)[PF]
    assert not device.deliverable
    assert str(device.undeliverable_reason).startswith("the host has no IOMMU: enable VT-d")
    assert handles(device) == [PF], "its provider stays"
    assert discover(tree, check_iommu=False)[PF].deliverable


RELEASE = "6.1.0-56-amd64"
DEPENDENCIES = """kernel/drivers/vfio/vfio.ko.xz:
kernel/drivers/vfio/pci/vfio-pci-core.ko.xz: kernel/drivers/vfio/vfio.ko.xz
"""
MODULE = "kernel/drivers/vfio/pci/vfio-pci.ko"


@pytest.mark.parametrize(
    ("release", "files", "deliverable"),
    [
        (RELEASE, {"modules.dep": DEPENDENCIES, "modules.builtin": "kernel/fs/ext4.ko\n"}, False),
        (RELEASE, {"modules.dep": f"{DEPENDENCIES}{MODULE}.xz: {DEPENDENCIES}"}, True),
        (RELEASE, {"modules.dep": DEPENDENCIES, "modules.builtin": f"{MODULE}\n"}, True),
        (RELEASE, {}, True),
        (None, {"modules.dep": DEPENDENCIES}, True),
    ],
    ids=["not installed", "module", "built in", "no modules visible", "no release"],
)
def test_discover_vfio_that_is_not_loaded(
    tmp_path: Path, release: str | None, files: dict[str, str], deliverable: bool
) -> None:
    """libvirt loads the driver, so it only has to be installed."""
    tree = SysfsTree(tmp_path / "sys", iommu=False)
    tree.add_function(PF, product="4940", iommu_group="1")
    for path, text in files.items():
        (tmp_path / "lib/modules" / RELEASE).mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib/modules" / RELEASE / path).write_text(text)
    if release is not None:
        (tmp_path / "proc/sys/kernel").mkdir(parents=True)
        (tmp_path / "proc/sys/kernel/osrelease").write_text(f"{release}\n")
    device = discover(tree)[PF]
    assert device.deliverable is deliverable
    assert deliverable or "neither loaded nor installed" in str(device.undeliverable_reason)
    tree.add_function(OTHER, "15b3", "101e", iommu_group="2", kernel_driver="mlx5_vfio_pci")
    assert discover(tree)[PF].deliverable, "a host with a variant has VFIO"
    (tree.bus / OTHER / "driver").unlink()
    (tree.root / "bus/pci/drivers/mlx5_vfio_pci").rmdir()
    (tree.root / "module/vfio_pci").mkdir(parents=True)
    assert discover(tree)[PF].deliverable, "loaded"


@pytest.mark.parametrize(
    ("vendor", "product", "denied"),
    [
        *((("8086", p, True)) for p in ("0435", "0443", "37c8", "37c9", "19e2", "19e3")),
        ("8086", "0b25", True),
        ("8086", "0cfe", True),
        ("8086", "4940", False),
        ("10de", "37c8", False),
    ],
)
def test_discover_model_of_the_denylist_is_undeliverable(
    tmp_path: Path, vendor: str, product: str, denied: bool
) -> None:
    tree = SysfsTree(tmp_path / "sys")
    tree.add_function(PF, vendor, product)
    rule = f"vendor={vendor}"
    assert discover(tree, rule)[PF].deliverable, "loaded with disable_denylist=1"
    tree.load_vfio(disable_denylist=False)
    device = discover(tree, rule)[PF]
    assert device.deliverable is not denied
    assert not denied or "disable_denylist=1" in str(device.undeliverable_reason)
    (tree.bus / PF / "driver").symlink_to("../../../bus/pci/drivers/vfio-pci")
    assert discover(tree, rule)[PF].deliverable, "the driver has accepted it"


def test_discover_denylist_of_drivers_without_the_parameter(tmp_path: Path) -> None:
    """A loaded driver without the parameter is older than the list, one not loaded is unknown."""
    tree = SysfsTree(tmp_path / "sys", iommu=False)
    tree.add_function(PF, iommu_group="1")
    assert not discover(tree)[PF].deliverable
    (tree.root / "module/vfio_pci").mkdir(parents=True)
    assert discover(tree)[PF].deliverable


@pytest.mark.parametrize(
    ("types", "deliverable"),
    [(["msi", "reserved", "direct-relaxable"], True), (["direct", "msi"], False), ([], True)],
)
def test_discover_group_with_direct_mapping_is_undeliverable(
    tree: SysfsTree, types: list[str], deliverable: bool
) -> None:
    tree.add_function(PF, iommu_group="7")
    tree.add_function(OTHER, iommu_group="8")
    lines = [
        f"0x00000000fee0{n}000 0x00000000fee0{n}fff {type_}\n" for n, type_ in enumerate(types)
    ]
    (tree.root / "kernel/iommu_groups/7/reserved_regions").write_text("".join(lines))
    devices = discover(tree)
    assert devices[PF].deliverable is deliverable
    assert deliverable or "IOMMU group 7 (RMRR or IVMD)" in str(devices[PF].undeliverable_reason)
    assert devices[OTHER].deliverable, "the regions are those of a group"


def test_discover_function_outside_of_the_iommu_is_undeliverable(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path / "sys", iommu=False)
    tree.add_function(PF)
    (tree.root / "kernel/iommu_groups/0").mkdir(parents=True)
    assert "does not cover" in str(discover(tree)[PF].undeliverable_reason)


def test_discover_group_of_vfio_without_an_iommu_is_none(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path / "sys", iommu=False)
    tree.add_function(PF, kernel_driver="vfio-pci", iommu_group="0")
    tree.add_function(OTHER)
    (tree.root / "kernel/iommu_groups/0/name").write_text("vfio-noiommu\n")
    for device in discover(tree).values():
        assert str(device.undeliverable_reason).startswith("the host has no IOMMU: enable")


def test_discover_shared_group_names_the_other_function(tree: SysfsTree) -> None:
    tree.add_function("0000:3c:00.0", class_code="060400", iommu_group="7")
    tree.add_function(PF, iommu_group="7")
    tree.add_function(OTHER, "1af4", "1000", "020000", iommu_group="7", kernel_driver="virtio-pci")
    device = discover(tree)[PF]
    assert device.undeliverable_reason == (
        f"it shares IOMMU group 7 with {OTHER} (virtio-pci): use another slot, or one with ACS"
    )


@pytest.mark.parametrize("driver", [None, "vfio-pci"])
def test_discover_function_of_another_slot_that_is_not_offered_does_not_block(
    tree: SysfsTree, driver: str | None
) -> None:
    """VFIO gives the whole group to one instance; nobody else can get the other function."""
    tree.add_function(PF, iommu_group="7")
    tree.add_function(OTHER, "1af4", "1000", "020000", iommu_group="7", kernel_driver=driver)
    assert discover(tree)[PF].deliverable
    both = discover(tree, "vendor=8086|1af4")
    assert [device.deliverable for device in both.values()] == [False, False]


@pytest.mark.parametrize(("driver", "blocks"), [(None, False), ("tegra194-pcie", True)])
def test_discover_group_with_a_device_of_another_bus(
    tree: SysfsTree, driver: str | None, blocks: bool
) -> None:
    tree.add_function(PF, iommu_group="7")
    folder = tree.root / "devices/platform/141a0000.pcie"
    folder.mkdir(parents=True)
    if driver is not None:
        (folder / "driver").symlink_to(f"../../../bus/platform/drivers/{driver}")
    members = tree.root / "kernel/iommu_groups/7/devices"
    members.mkdir()
    (members / "141a0000.pcie").symlink_to("../../../../devices/platform/141a0000.pcie")
    (members / PF).symlink_to(f"../../../../devices/pci0000:00/{PF}")
    device = discover(tree)[PF]
    assert device.deliverable is not blocks
    reason = str(device.undeliverable_reason)
    assert not blocks or f"with 141a0000.pcie ({driver}): use another slot" in reason


def test_discover_functions_of_one_card_are_offered_one_by_one(tree: SysfsTree) -> None:
    """The audio function of a GPU goes with it, unless it is offered itself."""
    for address in (PF, SECOND):
        tree.add_function(address, iommu_group="7")
    assert discover(tree, f"address={PF}")[PF].deliverable
    both = discover(tree)
    assert [device.deliverable for device in both.values()] == [False, False]
    assert f"{SECOND} (offered too)" in str(both[PF].undeliverable_reason)
    assert f"{PF} (offered too)" in str(both[SECOND].undeliverable_reason)


def test_discover_undeliverable_virtual_function_is_withheld(tree: SysfsTree) -> None:
    tree.add_function(PF, totalvfs=4)
    first, second = tree.enable_virtual_functions(PF, 2)
    for address in (first, OTHER):
        if address == OTHER:
            tree.add_function(address, "1af4", "1000", "020000", kernel_driver="virtio-pci")
        link = tree.bus / address / "iommu_group"
        link.unlink()
        link.symlink_to("../../../kernel/iommu_groups/7")
    device = discover(tree)[PF]
    assert device.deliverable
    assert handles(device) == [second]
    reason = (
        f"{first}: it shares IOMMU group 7 with {OTHER} (virtio-pci): use another slot, "
        "or one with ACS"
    )
    assert device.vendor_board_info == {NOT_OFFERED: reason}


def test_discover_withheld_class_keeps_the_addresses_of_others(tree: SysfsTree) -> None:
    """A handle that moved to another deployable would be offered while a server has it."""
    tree.add_function(PF, totalvfs=4)
    first, *others = tree.enable_virtual_functions(PF, 3)
    rules = (f"address={first},resource_class=CUSTOM_A", "product=37c9,resource_class=CUSTOM_B")
    expected = {PF: [first], f"{PF}-CUSTOM_B": others}
    device = discover(tree, *rules)[PF]
    assert {d.address: [h.address for h in d.handles] for d in device.deployables} == expected
    tree.add_function(OTHER, "1af4", "1000", "020000", iommu_group="7", kernel_driver="virtio-pci")
    link = tree.bus / first / "iommu_group"
    link.unlink()
    link.symlink_to("../../../kernel/iommu_groups/7")
    device = discover(tree, *rules)[PF]
    del expected[PF]
    assert {d.address: [h.address for h in d.handles] for d in device.deployables} == expected


def test_discover_virtual_functions_in_one_group_are_undeliverable(tree: SysfsTree) -> None:
    tree.add_function(PF, totalvfs=4)
    addresses = tree.enable_virtual_functions(PF, 2)
    for address in (PF, *addresses):
        link = tree.bus / address / "iommu_group"
        link.unlink()
        link.symlink_to("../../../kernel/iommu_groups/7")
    device = discover(tree)[PF]
    assert not device.deliverable
    assert handles(device) == addresses


@pytest.mark.parametrize("check", [True, False])
def test_discover_function_of_the_host_is_undeliverable(tmp_path: Path, check: bool) -> None:
    host = HostTree(tmp_path)
    host.add_function(PF, "144d", "a80a", "010802")
    host.add_disk("nvme0n1", f"pci0000:00/{PF}/nvme/nvme0")
    host.mount("nvme0n1", "/")
    device = discover(host, "class=01", check_iommu=check)[PF]
    assert str(device.undeliverable_reason).startswith(
        "the host uses it: nvme0n1 holds the root file system;"
    )
    assert device.deployables == ()


def test_discover_reads_each_function_and_the_groups_once(
    tree: SysfsTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reads of the bus grow with the number of functions, not with its square."""
    read: list[str] = []
    plain = Sysfs.list_names

    def list_names(sysfs: Sysfs, path: str | Path) -> list[str]:
        read.append(str(path))
        return plain(sysfs, path)

    monkeypatch.setattr(Sysfs, "list_names", list_names)
    for number in range(16):
        tree.add_function(f"0000:{number:02x}:00.0", iommu_group="7")
    discover(tree)
    for path in ("bus/pci/devices", "module", "kernel/iommu_groups/7/devices"):
        assert read.count(path) == 1
