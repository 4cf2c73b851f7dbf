# SPDX-License-Identifier: Apache-2.0
"""Topology of PCI functions in simulated sysfs trees."""

from pathlib import Path

import pytest

from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.sysfs import Sysfs
from cyborg.testing.sysfs_tree import SysfsTree

PF = "0000:3d:00.0"
LINK = {
    "current_link_width": "8",
    "max_link_width": "16",
    "current_link_speed": "16.0 GT/s PCIe",
    "max_link_speed": "32.0 GT/s PCIe",
}


class Env:
    """A simulated card, and a driver that discovers it."""

    def __init__(self, root: Path) -> None:
        self.tree = SysfsTree(root)
        self.folder = self.tree.add_function(PF, iommu_group="7", numa_node=1)
        self.driver = GenericDriver("gen0", {"devices": ["vendor=8086"]}, root)

    def write(self, **files: str) -> None:
        for name, value in files.items():
            (self.folder / name).write_text(f"{value}\n")

    def set_power(self, status: str) -> None:
        (self.folder / "power").mkdir(exist_ok=True)
        (self.folder / "power/runtime_status").write_text(f"{status}\n")

    def topology(self) -> dict[str, str]:
        (device,) = self.driver.discover()
        return dict(device.topology)


@pytest.fixture
def env(tmp_path: Path) -> Env:
    return Env(tmp_path / "sys")


def test_topology_has_all_values(env: Env) -> None:
    env.write(reset_method="flr bus", **LINK)
    assert env.topology() == {
        "pci_root": "0000:00",
        "pci_path": PF,
        "iommu_group": "7",
        "max_link_width": "16",
        "max_link_speed": "32.0 GT/s PCIe",
        "reset_methods": "flr bus",
    }


@pytest.mark.parametrize(
    "values",
    [
        {},
        {name: "Unknown" if "speed" in name else "0" for name in LINK},
        {name: "Unknown speed" if "speed" in name else "255" for name in LINK},
        {name: "64.0 GT/s PCIe" if "speed" in name else "63" for name in LINK},
        dict.fromkeys(LINK, ""),
    ],
    ids=["no files", "no link", "integrated", "no power", "empty"],
)
def test_topology_leaves_out_unknown_values(env: Env, values: dict[str, str]) -> None:
    env.write(**values)
    assert env.topology() == {"pci_root": "0000:00", "pci_path": PF, "iommu_group": "7"}


def test_topology_does_not_follow_the_current_link(env: Env) -> None:
    """An idle card lowers the speed of its link; a report of each change would never end."""
    env.write(**LINK)
    first = env.topology()
    env.write(current_link_speed="2.5 GT/s PCIe", current_link_width="1")
    assert env.topology() == first


@pytest.mark.parametrize("status", ["suspended", "suspending", "resuming", "error"])
def test_topology_of_inactive_function_keeps_the_last_link(env: Env, status: str) -> None:
    env.write(**LINK)
    first = env.topology()
    env.set_power(status)
    env.write(max_link_speed="64.0 GT/s PCIe", max_link_width="32")
    assert env.topology() == first
    env.set_power("active")
    expected = {"max_link_speed": "64.0 GT/s PCIe", "max_link_width": "32"}
    assert env.topology() == first | expected


def test_topology_of_inactive_function_reads_no_register(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    plain = Sysfs.read_bytes

    def read_bytes(sysfs: Sysfs, path: str | Path, size: int = 4096) -> bytes | None:
        read.append(Path(path).name)
        return plain(sysfs, path, size)

    monkeypatch.setattr(Sysfs, "read_bytes", read_bytes)
    env.write(**LINK)
    env.set_power("suspended")
    assert "max_link_width" not in env.topology()
    assert set(LINK).isdisjoint(read)
    env.set_power("unsupported")
    assert env.topology()["max_link_width"] == "16"
    assert set(LINK) & set(read) == {"max_link_width", "max_link_speed"}


def test_topology_link_of_a_removed_function_is_forgotten(env: Env) -> None:
    env.write(**LINK)
    env.topology()
    link = (env.tree.bus / PF).readlink()
    (env.tree.bus / PF).unlink()
    assert env.driver.discover() == []
    (env.tree.bus / PF).symlink_to(link)
    env.set_power("suspended")
    assert "max_link_width" not in env.topology()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"reset": "", "reset_method": "flr bus"}, True),
        ({"reset": "", "reset_method": ""}, False),
        ({"reset": ""}, True),
        ({}, False),
    ],
    ids=["methods", "disabled", "before Linux 5.15", "none"],
)
def test_remarks_name_functions_that_cannot_be_reset(
    env: Env, files: dict[str, str], expected: bool
) -> None:
    (env.folder / "reset").unlink()
    env.write(**files)
    env.topology()
    text = f"the kernel has no method to reset {PF}: a server may find data of the previous server"
    assert env.driver.remarks == (() if expected else (text,))


def test_remarks_about_resets_are_for_offered_functions(env: Env) -> None:
    """One remark, without functions that the host uses and with a limited length."""
    (env.folder / "reset").unlink()
    for number in range(8):
        folder = env.tree.add_function(f"0000:4{number}:00.0")
        (folder / "reset").unlink()
    (env.tree.root / "kernel/iommu_groups/7/reserved_regions").write_text("0x0 0xffff direct\n")
    env.driver.discover()
    (text,) = env.driver.remarks
    assert text.startswith("the kernel has no method to reset 0000:40:00.0, 0000:41:00.0, ")
    assert "0000:44:00.0, 3 more: a server" in text
    options = {"devices": ["vendor=8086"], "check_iommu": False}
    unchecked = GenericDriver("gen0", options, env.tree.root)
    unchecked.discover()
    assert unchecked.remarks == (), "not without the check"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0",
            ("0000:3a", ["0000:3a:00.0", "0000:3b:00.0"]),
        ),
        (
            "../../../devices/pci0000:00/0000:00:0e.0/pci10000:00/10000:00:02.0/10000:01:00.0",
            ("0000:00", ["0000:00:0e.0", "10000:00:02.0", "10000:01:00.0"]),
        ),
        (
            "../../../devices/platform/soc/1c00000.pci/pci0002:00/0002:00:00.0",
            ("0002:00", ["0002:00:00.0"]),
        ),
        ("../../../devices/virtual/x", (None, [])),
    ],
    ids=["root port", "Intel VMD", "platform", "other"],
)
def test_pci_path_of_link(
    tmp_path: Path, target: str, expected: tuple[str | None, list[str]]
) -> None:
    bus = tmp_path / "bus/pci/devices"
    bus.mkdir(parents=True)
    (bus / PF).symlink_to(target)
    assert Sysfs(tmp_path).pci_path(PF) == expected
    assert Sysfs(tmp_path).pci_path("0000:77:00.0") == (None, [])
