# SPDX-License-Identifier: Apache-2.0
"""Trees of real machines, made from what ``lspci -nnk``, ``lsblk`` and ``ip`` printed there.

A machine is a JSON object in ``captures/machines``; ``doc/source/contributor/captures.rst``
describes it. It has the facts of a public source, and the devices that its operator expects.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cyborg.testing.host_tree import HostTree

FOLDER = Path(__file__).parent / "captures/machines"
KEYS = frozenset(
    {
        *("source", "functions", "disks", "volumes", "mounts", "swaps", "interfaces"),
        *("displays", "nvidia_minors", "nodes", "modules", "noiommu_groups"),
        *("without_iommu", "active_port", "expected"),
    }
)


def machine_names() -> list[str]:
    """Return the names of the machines."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_machine(name: str) -> Mapping[str, Any]:
    """Return the facts of the machine with this name. Raise ValueError for unknown keys."""
    return read_machine(FOLDER / f"{name}.json")


def read_machine(path: Path) -> Mapping[str, Any]:
    """Return the facts of the machine in a file. Raise ValueError for unknown keys, or OSError."""
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if unknown := sorted(facts.keys() - KEYS):
        raise ValueError(f"{path.stem}: unknown keys {', '.join(unknown)}")
    return facts


def rule_of_machine(facts: Mapping[str, Any]) -> str:
    """Return the rule with which a driver selects all devices of a machine."""
    ports = facts.get("active_port")
    return "address=*,functions=all" + (f",active_port={ports}" if ports else "")


def build_machine(facts: Mapping[str, Any], folder: Path) -> HostTree:
    """Create the tree of a machine in a folder."""
    tree = HostTree(folder, iommu=not facts.get("without_iommu", False))
    paths: dict[str, str] = {}
    for function in facts["functions"]:
        paths[function["address"]] = _add_function(tree, function)
    for disk in facts.get("disks", ()):
        _add_disk(tree, disk, paths)
    for volume in facts.get("volumes", ()):
        tree.add_disk(volume["name"], "virtual/block", slaves=volume["of"])
    for name, mount_point in facts.get("mounts", {}).items():
        tree.mount(name, mount_point)
    for name in facts.get("swaps", ()):
        tree.enable_swap(f"/dev/{name}")
    for interface in facts.get("interfaces", ()):
        _add_interface(tree, interface)
    for display in facts.get("displays", ()):
        tree.add_display(display["function"], display["name"], enabled=display.get("enabled"))
    for address, minor in facts.get("nvidia_minors", {}).items():
        tree.add_nvidia_gpu(address, minor)
    for group in facts.get("noiommu_groups", ()):
        (tree.root / f"kernel/iommu_groups/{group}/name").write_text("vfio-noiommu\n")
    for name in facts.get("modules", ()):
        (tree.root / "module" / name).mkdir(parents=True)
    for node, programs in facts.get("nodes", {}).items():
        tree.open_node(node, *programs)
    return tree


def _add_function(tree: HostTree, function: Mapping[str, Any]) -> str:
    """Add a PCI function; return the path of its folder below ``devices``."""
    address = function["address"]
    vendor, product = function["id"].split(":")
    group = function.get("iommu_group")
    parent = function.get("parent", f"pci{address[:7]}")
    folder = tree.add_function(
        address,
        vendor,
        product,
        function["class"].ljust(6, "0"),
        kernel_driver=function.get("driver"),
        iommu_group=None if group is None else str(group),
        numa_node=function.get("numa_node", -1),
        totalvfs=function.get("totalvfs", 0),
        parent=parent,
    )
    tree.list_in_group(address)
    if (subsystem := function.get("subsystem")) is not None:
        for name, value in zip(("vendor", "device"), subsystem.split(":"), strict=True):
            (folder / f"subsystem_{name}").write_text(f"0x{value}\n")
    if function.get("boot_vga"):
        (folder / "boot_vga").write_text("1\n")
    if (physfn := function.get("physfn")) is not None:
        tree.add_virtual_function(address, physfn)
    return f"{parent}/{address}"


def _add_disk(tree: HostTree, disk: Mapping[str, Any], paths: Mapping[str, str]) -> None:
    name: str = disk["name"]
    below = paths[disk["function"]] if "function" in disk else "virtual"
    tree.add_disk(name, f"{below}/{disk['path']}", disk.get("partitions", ()))
    # Of a drive with several paths, whose folder is that of its subsystem.
    for controller, address in disk.get("controllers", {}).items():
        tree.add_controller(name, f"{paths[address]}/nvme/{controller}")
    for controller, port in disk.get("fibre_channel", {}).items():
        tree.add_fc_controller(name, controller, port["function"], port["port_name"])
    if (signature := disk.get("holds")) is not None:
        tree.sign_disk(name, signature)


def _add_interface(tree: HostTree, interface: Mapping[str, Any]) -> None:
    name: str = interface["name"]
    tree.add_interface(
        name,
        interface.get("function"),
        flags=0x1003 if interface.get("up", True) else 0x1002,
        carrier="1" if interface.get("link", True) else "0",
    )
    lowers: Sequence[str] = interface.get("lower", ())
    for lower in lowers:
        tree.stack_interfaces(name, lower, master=interface.get("is_master", True))
    if (use := interface.get("use")) is not None:
        tree.add_route(name, use)
