# SPDX-License-Identifier: Apache-2.0
"""The generic driver on simulated PCI buses."""

from dataclasses import replace
from pathlib import Path

import pytest

from cyborg.core.errors import Misconfigured
from cyborg.core.inventory.device import Device, DeviceType, HandleType
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.pci.access import HostAccess
from cyborg.drivers.pci.classes import Names
from cyborg.testing.sysfs_tree import SysfsTree

PF = "0000:3d:00.0"


@pytest.fixture
def tree(tmp_path: Path) -> SysfsTree:
    return SysfsTree(tmp_path / "sys")


def discover(tree: SysfsTree, *rules: str) -> list[Device]:
    return list(GenericDriver("gen0", {"devices": rules}, tree.root).discover())


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(p.relative_to(root)): (p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else b"")
        for p in root.rglob("*")
    }


def test_discover_plain_function_is_one_handle(tree: SysfsTree) -> None:
    tree.add_function(PF, numa_node=1, iommu_group="17", kernel_driver="vfio-pci", totalvfs=16)
    (device,) = discover(tree, "vendor=8086")
    (deployable,) = device.deployables
    (handle,) = deployable.handles
    assert (device.address, device.vendor, device.model) == (PF, "8086", "8086:37c8")
    assert (device.type, device.backend, device.numa_node) == (DeviceType.QAT, "gen0", 1)
    assert device.std_board_info == {
        "vendor_id": "8086",
        "product_id": "37c8",
        "class": "0b4000",
        "revision": "04",
        "subsystem_vendor_id": "8086",
        "subsystem_product_id": "0001",
    }
    assert (deployable.address, deployable.resource_class) == (PF, "CUSTOM_QAT")
    assert deployable.traits == {
        "CUSTOM_PCI_VENDOR_8086",
        "CUSTOM_PCI_PRODUCT_8086_37C8",
        "CUSTOM_NUMA_NODE_1",
        "CUSTOM_PCIE_ROOT_0000_00",
    }
    assert deployable.attributes == {
        "class": "0b4000",
        "iommu_group": "17",
        "kernel_driver": "vfio-pci",
        "numa_node": "1",
        "revision": "04",
        "sriov_totalvfs": "16",
        "subsystem_product": "0001",
        "subsystem_vendor": "8086",
    }
    assert (handle.address, handle.type) == (PF, HandleType.PCI)
    assert handle.info == {"domain": "0000", "bus": "3d", "device": "00", "function": "0"}


@pytest.mark.parametrize(
    ("vendor", "product", "class_code", "type_", "resource_class"),
    [
        ("10de", "20b5", "030200", DeviceType.GPU, "PGPU"),
        ("10ee", "5001", "120000", DeviceType.OTHER, "CUSTOM_ACCELERATOR"),
        ("8086", "7d1d", "120000", DeviceType.OTHER, "CUSTOM_ACCELERATOR"),
        ("8086", "0b25", "088000", DeviceType.OTHER, "CUSTOM_DSA"),
        ("8086", "1216", "088000", DeviceType.OTHER, "CUSTOM_IAA"),
        ("8086", "2710", "0b4000", DeviceType.OTHER, "CUSTOM_PCI_8086_2710"),
        ("1002", "74a1", "120000", DeviceType.GPU, "PGPU"),
        ("1002", "740f", "038000", DeviceType.GPU, "PGPU"),
        ("1da3", "1020", "120000", DeviceType.AICHIP, "CUSTOM_AICHIP"),
        ("19e5", "d802", "120000", DeviceType.AICHIP, "CUSTOM_AICHIP"),
        ("144d", "a80a", "010802", DeviceType.SSD, "CUSTOM_NVME"),
        ("1000", "0014", "010400", DeviceType.OTHER, "CUSTOM_PCI_1000_0014"),
        ("8086", "4940", "0b4000", DeviceType.QAT, "CUSTOM_QAT"),
        ("177d", "a0f3", "0b4000", DeviceType.OTHER, "CUSTOM_COPROCESSOR"),
        ("15b3", "101e", "020000", DeviceType.NIC, "CUSTOM_NIC"),
        ("1cc7", "0200", "108000", DeviceType.CRYPTO, "CUSTOM_CRYPTO"),
        ("1af4", "1045", "ffff00", DeviceType.OTHER, "CUSTOM_PCI_1AF4_1045"),
    ],
)
def test_discover_class_code_sets_type_and_resource_class(
    tree: SysfsTree,
    vendor: str,
    product: str,
    class_code: str,
    type_: DeviceType,
    resource_class: str,
) -> None:
    tree.add_function(PF, vendor, product, class_code, kernel_driver="vfio-pci")
    (device,) = discover(tree, "address=*")
    assert (device.type, device.deployables[0].resource_class) == (type_, resource_class)


def test_discover_rule_overrides_class_code(tree: SysfsTree) -> None:
    tree.add_function(PF)
    (device,) = discover(tree, "class=0b,type=CRYPTO,resource_class=CUSTOM_X,traits=CUSTOM_Y")
    assert (device.type, device.deployables[0].resource_class) == (DeviceType.CRYPTO, "CUSTOM_X")
    assert "CUSTOM_Y" in device.deployables[0].traits


def test_discover_without_rules_returns_nothing(tree: SysfsTree) -> None:
    tree.add_function(PF)
    assert discover(tree) == []
    assert discover(tree, "vendor=10de") == []


def test_discover_bridges_are_never_offered(tree: SysfsTree) -> None:
    tree.add_function("0000:00:00.0", class_code="060000")
    tree.add_function("0000:00:1c.0", class_code="060400")
    tree.add_function(PF)
    assert [d.address for d in discover(tree, "class=06", "address=*")] == [PF]


def test_discover_virtual_functions_are_handles_of_physical_function(tree: SysfsTree) -> None:
    tree.add_function(PF, totalvfs=16)
    functions = tree.enable_virtual_functions(PF, 3)
    (device,) = discover(tree, "vendor=8086")
    (deployable,) = device.deployables
    assert (device.address, deployable.address) == (PF, PF)
    assert [h.address for h in deployable.handles] == functions
    assert deployable.traits == {
        "CUSTOM_PCI_VENDOR_8086",
        "CUSTOM_PCI_PRODUCT_8086_37C9",
        "CUSTOM_PCIE_ROOT_0000_00",
    }
    assert deployable.attributes["sriov_totalvfs"] == "16"
    assert device.std_board_info["product_id"] == "37c8"


def test_discover_function_with_virtual_functions_is_not_offered(tree: SysfsTree) -> None:
    tree.add_function(PF, totalvfs=16)
    assert [d.address for d in discover(tree, "product=37c8")] == [PF]
    tree.enable_virtual_functions(PF, 2)
    assert discover(tree, "product=37c8") == []


def test_discover_only_matching_virtual_functions_are_handles(tree: SysfsTree) -> None:
    tree.add_function(PF, totalvfs=16)
    functions = tree.enable_virtual_functions(PF, 4)
    (device,) = discover(tree, f"address={functions[0]},action=skip", "product=37c9")
    assert [h.address for h in device.deployables[0].handles] == functions[1:]


def test_discover_each_resource_class_is_a_deployable(tree: SysfsTree) -> None:
    tree.add_function(PF, totalvfs=16)
    functions = tree.enable_virtual_functions(PF, 3)
    (device,) = discover(tree, f"address={functions[1]},resource_class=CUSTOM_FAST", "product=37c9")
    deployables = {p.address: (p.resource_class, len(p.handles)) for p in device.deployables}
    assert deployables == {PF: ("CUSTOM_QAT", 2), f"{PF}-CUSTOM_FAST": ("CUSTOM_FAST", 1)}


def test_discover_virtual_functions_without_physical_function_are_omitted(tree: SysfsTree) -> None:
    tree.add_function(PF, totalvfs=16)
    tree.enable_virtual_functions(PF, 2)
    tree.remove_function(PF)
    assert discover(tree, "vendor=8086") == []


def test_discover_follows_added_and_removed_devices(tree: SysfsTree) -> None:
    driver = GenericDriver("gen0", {"devices": ["vendor=8086"]}, tree.root)
    assert driver.discover() == []
    tree.add_function(PF)
    tree.add_function("0000:02:00.0")
    assert [d.address for d in driver.discover()] == ["0000:02:00.0", PF]
    tree.remove_function("0000:02:00.0")
    assert [d.address for d in driver.discover()] == [PF]


def test_discover_sets_display_names(tree: SysfsTree) -> None:
    tree.add_function(PF)
    names = {PF: Names("Intel Corporation", "C62x Chipset QuickAssist")}
    access = replace(HostAccess.of(tree.root), lookup=names.__getitem__)
    driver = GenericDriver("gen0", {"devices": ["vendor=8086"]}, tree.root, access)
    (device,) = driver.discover()
    assert (device.vendor, device.model) == ("8086", "C62x Chipset QuickAssist")
    assert device.std_board_info["vendor_name"] == "Intel Corporation"


def test_discover_invalid_device_is_omitted(tree: SysfsTree) -> None:
    tree.add_function(PF)
    tree.add_function("0000:02:00.0")
    names = {PF: Names(None, "x" * 300), "0000:02:00.0": Names(None, "fine")}
    access = replace(HostAccess.of(tree.root), lookup=names.__getitem__)
    driver = GenericDriver("gen0", {"devices": ["vendor=8086"]}, tree.root, access)
    assert [d.model for d in driver.discover()] == ["fine"]


def test_discover_writes_nothing(tree: SysfsTree) -> None:
    tree.add_function(PF, totalvfs=16)
    tree.enable_virtual_functions(PF, 2)
    before = snapshot(tree.root)
    discover(tree, "address=*")
    assert snapshot(tree.root) == before


def test_invalid_rule_error_names_section_and_option(tree: SysfsTree) -> None:
    with pytest.raises(Misconfigured) as raised:
        discover(tree, "vendor=8086", "vendor=80")
    assert raised.value.message == (
        "[gen0] devices: found 'vendor=80'; expected four hexadecimal digits, such as vendor=8086"
    )


def test_discover_adopted_and_released_devices(tree: SysfsTree) -> None:
    whole, single = "0000:5e:00.0", "0000:5f:00.0"
    tree.add_function(PF, totalvfs=2)
    vf, other = tree.enable_virtual_functions(PF, 2)
    tree.add_function(whole, vendor="10de", product="20b5", class_code="030200")
    tree.add_function(single, vendor="10de", product="20b5", class_code="030200")

    def discover_handles(**options: list[str]) -> dict[str, list[str]]:
        rules = {"devices": ["vendor=10de,resource_class=CUSTOM_OURS", "action=skip,address=*"]}
        devices = GenericDriver("gen0", {**rules, **options}, tree.root).discover()
        return {d.address: [h.address for p in d.deployables for h in p.handles] for d in devices}

    expected_by_choice = {whole: [whole], single: [single]}
    assert discover_handles() == expected_by_choice
    assert discover_handles(release=[single]) == {whole: [whole]}
    assert discover_handles(adopt=[PF]) == {PF: [vf, other], **expected_by_choice}, (
        "by all of its virtual functions"
    )
    assert discover_handles(adopt=[other]) == {PF: [other], **expected_by_choice}
    assert discover_handles(adopt=["3D:00.0"], release=[vf]) == {PF: [other], **expected_by_choice}
    assert discover_handles(adopt=["0000:77:00.0"]) == expected_by_choice, (
        "what is not there is passed over"
    )
    (gpu, _) = GenericDriver("gen0", {"adopt": [whole, single]}, tree.root).discover()
    assert gpu.deployables[0].resource_class == "PGPU", "no rule says what it is"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adopt": ["here"]}, "adopt: found 'here'; expected PCI addresses such as"),
        ({"release": ["0000:3d:*"]}, "release: found '0000:3d:[*]'; expected PCI addresses"),
        ({"adopt": [PF], "release": [PF]}, f"release: found '{PF}'; expected no address that"),
    ],
)
def test_invalid_addresses_are_rejected(options: dict[str, list[str]], message: str) -> None:
    with pytest.raises(Misconfigured, match=rf"^\[gen0\] {message}"):
        GenericDriver("gen0", options)


def test_discover_virtual_functions_of_a_gpu_are_no_whole_cards(tree: SysfsTree) -> None:
    tree.add_function(PF, "10de", "2235", "030200", totalvfs=4)
    addresses = tree.enable_virtual_functions(PF, 2, "2235", "030200")
    driver = GenericDriver("gen0", {"devices": ["class=03"]}, tree.root)
    assert list(driver.discover()) == []
    assert driver.remarks == (
        f"{PF} is not offered, because it has virtual functions: a rule with functions=vf offers "
        "these",
    )
    driver = GenericDriver("gen0", {"devices": [f"address={addresses[0]}"]}, tree.root)
    assert list(driver.discover()) == []
    assert driver.remarks == (
        f"rule 'address={addresses[0]}' matches only virtual functions of GPUs, which need "
        "functions=vf",
    )
    (device,) = discover(tree, "class=03,functions=vf")
    (part,) = device.deployables
    assert (device.type, part.resource_class) == (DeviceType.GPU, "CUSTOM_GPU_VF")
    assert "CUSTOM_GPU_VF" in part.traits
    assert [handle.address for handle in part.handles] == addresses
    (device,) = discover(tree, "class=03,functions=vf,resource_class=CUSTOM_FLEX")
    assert device.deployables[0].resource_class == "CUSTOM_FLEX"
    assert "CUSTOM_GPU_VF" in device.deployables[0].traits
