# SPDX-License-Identifier: Apache-2.0
"""Reading a sysfs that is complete, broken, or changes while it is read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cyborg.drivers.sysfs import MAX_BYTES, PciFunction, Sysfs
from cyborg.testing.sysfs_tree import SysfsTree


@pytest.fixture
def tree(tmp_path: Path) -> SysfsTree:
    return SysfsTree(tmp_path / "sys")


def test_pci_functions_returns_all_attributes(tree: SysfsTree) -> None:
    tree.add_function(
        "0000:3d:00.0", kernel_driver="4xxx", iommu_group="17", numa_node=1, totalvfs=16
    )
    assert Sysfs(tree.root).pci_functions() == [
        PciFunction(
            address="0000:3d:00.0",
            vendor="8086",
            product="37c8",
            class_code="0b4000",
            revision="04",
            subsystem_vendor="8086",
            subsystem_product="0001",
            kernel_driver="4xxx",
            iommu_group="17",
            numa_node=1,
            totalvfs=16,
        )
    ]


def test_pci_functions_virtual_function_has_physfn(tree: SysfsTree) -> None:
    tree.add_function("0000:3d:00.0", totalvfs=16)
    addresses = tree.enable_virtual_functions("0000:3d:00.0", 9)
    functions = {f.address: f for f in Sysfs(tree.root).pci_functions()}
    assert functions["0000:3d:00.0"].numvfs == 9
    assert [a for a, f in functions.items() if f.physfn == "0000:3d:00.0"] == addresses
    assert addresses[-1] == "0000:3d:01.1"


class ChangingSysfs(Sysfs):
    """A sysfs tree that changes each time the number of virtual functions is read."""

    def __init__(self, root: Path, *acts: Callable[[], object]) -> None:
        super().__init__(root)
        self.acts = list(acts)

    def read_int(self, path: str | Path) -> int | None:
        if Path(path).name == "sriov_numvfs" and self.acts:
            self.acts.pop(0)()
        return super().read_int(path)


def test_pci_functions_rescans_while_virtual_functions_change(tree: SysfsTree) -> None:
    card = tree.add_function("0000:3d:00.0", totalvfs=16)
    adding = ChangingSysfs(tree.root, lambda: tree.enable_virtual_functions("0000:3d:00.0", 2))
    assert [f.numvfs for f in adding.pci_functions()] == [2, 0, 0]
    # The kernel updates the number after it has removed the last function.
    tree.remove_function("0000:3d:00.1")
    removing = ChangingSysfs(
        tree.root,
        lambda: tree.remove_function("0000:3d:00.2"),
        lambda: (card / "sriov_numvfs").write_text("0\n"),
    )
    assert [(f.address, f.numvfs) for f in removing.pci_functions()] == [("0000:3d:00.0", 0)]


def test_pci_functions_permanently_wrong_count_is_returned(tree: SysfsTree) -> None:
    card = tree.add_function("0000:3d:00.0", totalvfs=16)
    (card / "sriov_numvfs").write_text("3\n")
    assert [f.numvfs for f in Sysfs(tree.root).pci_functions()] == [3]


def test_pci_functions_are_sorted_by_address(tree: SysfsTree) -> None:
    addresses = ["10000:e1:00.0", "0000:0a:00.1", "0000:0a:00.0", "0000:02:1f.7"]
    for address in addresses:
        tree.add_function(address)
    actual = [f.address for f in Sysfs(tree.root).pci_functions()]
    assert actual == ["0000:02:1f.7", "0000:0a:00.0", "0000:0a:00.1", "10000:e1:00.0"]


def test_pci_functions_removed_function_is_omitted(tree: SysfsTree) -> None:
    tree.add_function("0000:01:00.0")
    tree.add_function("0000:02:00.0")
    tree.remove_function("0000:01:00.0")
    assert [f.address for f in Sysfs(tree.root).pci_functions()] == ["0000:02:00.0"]


@pytest.mark.parametrize("missing", ["vendor", "device", "class"])
def test_pci_functions_function_without_ids_is_omitted(tree: SysfsTree, missing: str) -> None:
    (tree.add_function("0000:01:00.0") / missing).unlink()
    assert Sysfs(tree.root).pci_functions() == []


@pytest.mark.parametrize("missing", ["revision", "subsystem_vendor", "numa_node"])
def test_pci_functions_optional_attributes_may_be_missing(tree: SysfsTree, missing: str) -> None:
    (tree.add_function("0000:01:00.0") / missing).unlink()
    assert len(Sysfs(tree.root).pci_functions()) == 1


@pytest.mark.parametrize("content", ["", "0x", "nonsense", "\x00\x01", "-5"])
def test_pci_functions_invalid_number_is_ignored(tree: SysfsTree, content: str) -> None:
    (tree.add_function("0000:01:00.0") / "vendor").write_text(content)
    assert Sysfs(tree.root).pci_functions() == []


def test_pci_functions_other_names_are_skipped(tree: SysfsTree) -> None:
    (tree.bus / "README").write_text("")
    (tree.bus / "0000:zz:00.0").mkdir()
    assert Sysfs(tree.root).pci_functions() == []


def test_read_text_is_limited_to_one_page(tree: SysfsTree) -> None:
    (tree.root / "long").write_text("x" * (3 * MAX_BYTES))
    assert Sysfs(tree.root).read_text("long") == "x" * MAX_BYTES


def test_missing_files_return_none(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path / "none")
    assert sysfs.pci_functions() == []
    assert (sysfs.read_text("a"), sysfs.read_int("a"), sysfs.read_link("a")) == (None, None, None)
    assert (Sysfs(tmp_path).read_text("."), Sysfs(tmp_path).read_link(".")) == (None, None)
