# SPDX-License-Identifier: Apache-2.0
"""Reading a sysfs that is complete, broken, or changes while it is read."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cyborg.drivers.sysfs import MAX_BYTES, PciFunction, Sysfs
from cyborg.fixtures.sysfs_tree import SysfsTree


@pytest.fixture
def tree(tmp_path: Path) -> SysfsTree:
    return SysfsTree(tmp_path / "sys")


def test_a_function_with_everything(tree: SysfsTree) -> None:
    tree.function("0000:3d:00.0", kernel_driver="4xxx", iommu_group="17", numa_node=1, totalvfs=16)
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


def test_virtual_functions_know_their_physical_one(tree: SysfsTree) -> None:
    tree.function("0000:3d:00.0", totalvfs=16)
    made = tree.virtual_functions("0000:3d:00.0", 9)
    found = {f.address: f for f in Sysfs(tree.root).pci_functions()}
    assert found["0000:3d:00.0"].numvfs == 9
    assert [a for a, f in found.items() if f.physfn == "0000:3d:00.0"] == made
    assert made[-1] == "0000:3d:01.1"


class Moving(Sysfs):
    """A sysfs in which somebody acts each time that the number of virtual functions is read."""

    def __init__(self, root: Path, *acts: Callable[[], object]) -> None:
        super().__init__(root)
        self.acts = list(acts)

    def number(self, path: str | Path) -> int | None:
        if Path(path).name == "sriov_numvfs" and self.acts:
            self.acts.pop(0)()
        return super().number(path)


def test_virtual_functions_that_come_or_go_meanwhile_are_counted_again(tree: SysfsTree) -> None:
    card = tree.function("0000:3d:00.0", totalvfs=16)
    come = Moving(tree.root, lambda: tree.virtual_functions("0000:3d:00.0", 2))
    assert [f.numvfs for f in come.pci_functions()] == [2, 0, 0]
    # One is gone, and the number follows when the kernel is done with the other.
    tree.remove("0000:3d:00.1")
    gone = Moving(
        tree.root,
        lambda: tree.remove("0000:3d:00.2"),
        lambda: (card / "sriov_numvfs").write_text("0\n"),
    )
    assert [(f.address, f.numvfs) for f in gone.pci_functions()] == [("0000:3d:00.0", 0)]


def test_a_number_that_is_wrong_for_good_stops_nothing(tree: SysfsTree) -> None:
    card = tree.function("0000:3d:00.0", totalvfs=16)
    (card / "sriov_numvfs").write_text("3\n")
    assert [f.numvfs for f in Sysfs(tree.root).pci_functions()] == [3]


def test_the_order_is_the_bus_s(tree: SysfsTree) -> None:
    addresses = ["10000:e1:00.0", "0000:0a:00.1", "0000:0a:00.0", "0000:02:1f.7"]
    for address in addresses:
        tree.function(address)
    found = [f.address for f in Sysfs(tree.root).pci_functions()]
    assert found == ["0000:02:1f.7", "0000:0a:00.0", "0000:0a:00.1", "10000:e1:00.0"]


def test_a_function_that_just_vanished_is_left_out(tree: SysfsTree) -> None:
    tree.function("0000:01:00.0")
    tree.function("0000:02:00.0")
    tree.remove("0000:01:00.0")
    assert [f.address for f in Sysfs(tree.root).pci_functions()] == ["0000:02:00.0"]


@pytest.mark.parametrize("missing", ["vendor", "device", "class"])
def test_without_its_identity_it_is_left_out(tree: SysfsTree, missing: str) -> None:
    (tree.function("0000:01:00.0") / missing).unlink()
    assert Sysfs(tree.root).pci_functions() == []


@pytest.mark.parametrize("missing", ["revision", "subsystem_vendor", "numa_node"])
def test_without_anything_else_it_is_there(tree: SysfsTree, missing: str) -> None:
    (tree.function("0000:01:00.0") / missing).unlink()
    assert len(Sysfs(tree.root).pci_functions()) == 1


@pytest.mark.parametrize("content", ["", "0x", "nonsense", "\x00\x01", "-5"])
def test_what_is_no_number_is_nothing(tree: SysfsTree, content: str) -> None:
    (tree.function("0000:01:00.0") / "vendor").write_text(content)
    assert Sysfs(tree.root).pci_functions() == []


def test_names_that_are_no_address_are_passed_over(tree: SysfsTree) -> None:
    (tree.bus / "README").write_text("")
    (tree.bus / "0000:zz:00.0").mkdir()
    assert Sysfs(tree.root).pci_functions() == []


def test_an_endless_file_is_read_up_to_a_page(tree: SysfsTree) -> None:
    (tree.root / "long").write_text("x" * (3 * MAX_BYTES))
    assert Sysfs(tree.root).text("long") == "x" * MAX_BYTES


def test_nothing_there_is_nothing(tmp_path: Path) -> None:
    sysfs = Sysfs(tmp_path / "none")
    assert sysfs.pci_functions() == []
    assert (sysfs.text("a"), sysfs.number("a"), sysfs.link("a")) == (None, None, None)
    assert (Sysfs(tmp_path).text("."), Sysfs(tmp_path).link(".")) == (None, None)
