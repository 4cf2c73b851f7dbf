# SPDX-License-Identifier: Apache-2.0
"""Trees of /sys and /proc with disks, mounts, interfaces and displays, also of real machines.

Those of real machines are made from what ``lspci -nnk``, ``lsblk`` and ``ip`` printed there.

A machine is a JSON object in ``captures/machines``; ``doc/source/contributor/captures.rst``
describes it. It has the facts of a public source, and the devices that its operator expects.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cyborg.testing.sysfs_tree import SysfsTree


class HostTree(SysfsTree):
    """Simulated host with PCI functions, disks, interfaces and displays; ``proc`` is its /proc."""

    def __init__(self, folder: Path, *, iommu: bool = True) -> None:
        super().__init__(folder / "sys", iommu=iommu)
        self.proc = folder / "proc"
        (self.proc / "self/net").mkdir(parents=True)
        self._mounts: list[str] = []
        self._swaps = ["Filename Type Size Used Priority"]
        # What a capture has as files: the readers of cyborg.drivers.host_use name them.
        self._networks: dict[str, dict[str, str]] = {"reasons": {}, "lower": {}}
        self._open_nodes: dict[str, list[str]] = {}
        self._domains: dict[str, str] = {}
        self._disks: dict[str, dict[str, str]] = {"signatures": {}, "errors": {}}
        self._devices = 0  # block devices
        self.write()

    def write(self) -> None:
        """Write the files of /proc."""
        (self.proc / "self/mountinfo").write_text("".join(f"{m}\n" for m in self._mounts))
        (self.proc / "swaps").write_text("".join(f"{s}\n" for s in self._swaps))
        for name, facts in (
            ("self/net/rtnetlink.json", self._networks),
            ("open_devices.json", {"programs": self._open_nodes}),
            ("libvirt_domains.json", {"users": self._domains}),
            ("disk_signatures.json", self._disks),
        ):
            (self.proc / name).write_text(json.dumps(facts))

    def add_disk(
        self, name: str, below: str, partitions: Sequence[str] = (), slaves: Sequence[str] = ()
    ) -> None:
        """Add a disk in the device folder ``below``, such as ``0000:01:00.0/nvme/nvme0``.

        ``slaves`` are the block devices of which a volume, added as a disk, consists.
        """
        folder = self.root / "devices" / below / name
        self._add_block_device(folder)
        # Partitions are folders below the disk, volumes are linked to it in both directions.
        for partition in partitions:
            self.add_partition(name, partition)
        for slave in slaves:
            self._link(folder / "slaves" / slave, (self.root / "class/block" / slave).resolve())
            holders = (self.root / "class/block" / slave).resolve() / "holders"
            self._link(holders / name, folder)

    def add_controller(self, disk: str, folder: str) -> None:
        """Add a controller of a drive with several paths, in the device folder ``folder``."""
        subsystem = (self.root / "class/block" / disk).resolve().parent
        path = self.root / "devices" / folder
        self._link(subsystem / path.name, path)

    def add_fc_controller(self, disk: str, controller: str, function: str, port: str) -> None:
        """Add a controller of NVMe over Fibre Channel, through a port of a function.

        ``port`` is the name of the port: ``0x`` and 16 hexadecimal digits.
        """
        name = f"virtual/nvme-fabrics/ctl/{controller}"
        self.add_controller(disk, name)
        folder = self.root / "devices" / name
        (folder / "transport").write_text("fc\n")
        # The form of nvmf_get_address of drivers/nvme/host/fabrics.c of Linux. The name of the node
        # of a port differs from that of the port in its first digits.
        remote = "traddr=nn-0x200000a098000001:pn-0x200100a098000001"
        local = f"host_traddr=nn-0x2000{port[6:]}:pn-{port}"
        (folder / "address").write_text(f"{remote},{local}\n")
        # Any number, the same for all controllers of a port.
        host = (self.bus / function).resolve() / f"host{int(port[-2:], 16)}"
        if not host.exists():
            fc_host = host / "fc_host" / host.name
            self._link(self.root / "class/fc_host" / host.name, fc_host)
            (fc_host / "port_name").write_text(f"{port}\n")

    def add_partition(self, disk: str, name: str) -> None:
        """Add a partition of a disk."""
        folder = (self.root / "class/block" / disk).resolve() / name
        self._add_block_device(folder)
        (folder / "partition").write_text("1\n")

    def _add_block_device(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        # 240 to 254 are for local use (Documentation/admin-guide/devices.txt of Linux).
        self._devices += 1
        (folder / "dev").write_text(f"254:{self._devices}\n")
        for kind in ("holders", "slaves"):
            (folder / kind).mkdir()
        self._link(self.root / "class/block" / folder.name, folder)
        self._link(self.root / "dev/block" / f"254:{self._devices}", folder)

    def sign_disk(self, name: str, signature: str | None, error: str | None = None) -> None:
        """Let a disk hold something, such as "a partition table (gpt)", or be unreadable."""
        for kind, text in (("signatures", signature), ("errors", error)):
            self._disks[kind].pop(name, None)
            if text is not None:
                self._disks[kind][name] = text
        self.write()

    def mount(self, name: str, mount_point: str, source: str = "", number: str = "") -> None:
        """Mount a block device; ``number`` overrides its device number, as for btrfs."""
        # mountinfo has the number of the device; that of btrfs belongs to no block device.
        path = self.root / "class/block" / name / "dev"
        number = number or path.read_text().strip()
        self._mounts.append(
            f"27 1 {number} / {mount_point} rw - ext4 {source or f'/dev/{name}'} rw"
        )
        self.write()

    def unmount_all(self) -> None:
        """Unmount all file systems."""
        self._mounts.clear()
        self.write()

    def disable_swap(self) -> None:
        """Disable all swap areas."""
        del self._swaps[1:]
        self.write()

    def enable_swap(self, path: str, kind: str = "partition") -> None:
        """Enable a swap area."""
        self._swaps.append(f"{path} {kind} 1000 0 -2")
        self.write()

    def add_interface(
        self, name: str, function: str | None = None, *, flags: int = 0x1003, carrier: str = "1"
    ) -> None:
        """Add a network interface of a PCI function, or a virtual one; by default it is up.

        ``flags`` are those of <linux/if.h>; ``carrier`` is "1" with a link, "0" without one.
        """
        folder = self.root / "class/net" / name
        folder.mkdir(parents=True)
        (folder / "flags").write_text(f"{flags:#x}\n")
        (folder / "carrier").write_text(f"{carrier}\n")
        if function is not None:
            # A virtio card: its interface is below the virtio device, not below the function.
            virtio = (self.bus / function).resolve() / "virtio0"
            virtio.mkdir(exist_ok=True)
            self._link(folder / "device", virtio)

    def stack_interfaces(self, upper: str, lower: str, *, master: bool = True) -> None:
        """Stack an interface, such as a bridge, bond or VLAN, on another interface.

        With ``master`` the other one is a port of it, as of a bridge or a bond.
        """
        above, below = (self.root / "class/net" / name for name in (upper, lower))
        self._link(below / f"upper_{upper}", above)
        if master:
            self._link(below / "master", above)

    def add_route(self, name: str, reason: str = "has the default route") -> None:
        """Let an interface have a route, by default the default route, or another use."""
        self._networks["reasons"][name] = reason
        self.write()

    def remove_routes(self) -> None:
        """Remove all routes."""
        self._networks["reasons"].clear()
        self.write()

    def add_tunnel(self, name: str, lower: str) -> None:
        """Add a tunnel that sends its packets through an interface."""
        self.add_interface(name)
        self._networks["lower"][name] = lower
        self.write()

    def open_node(self, node: str, *programs: str) -> None:
        """Let programs have a device node open, such as ``/dev/nvidia0``."""
        self._open_nodes[node] = list(programs)
        self.write()

    def close_nodes(self) -> None:
        """Close all device nodes."""
        self._open_nodes.clear()
        self.write()

    def give_to_domain(self, function: str, domain: str | None) -> None:
        """Let a domain of libvirt have a function, or none."""
        self._domains.pop(function, None)
        if domain is not None:
            self._domains[function] = domain
        self.write()

    def add_class_device(self, function: str, class_: str, name: str) -> Path:
        """Add a device of a class, such as ``uio0``, to a function; return its folder."""
        folder = (self.bus / function).resolve() / class_ / name
        self._link(self.root / "class" / class_ / name, folder)
        return folder

    def add_nvidia_gpu(self, function: str, minor: int) -> None:
        """Add what the kernel driver nvidia says in ``/proc`` about a GPU."""
        folder = self.proc / "driver/nvidia/gpus" / function
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t Example\nBus Location: \t {function}\nDevice Minor: \t {minor}\n"
        )

    def add_display(self, function: str, name: str, *, enabled: bool | None = None) -> None:
        """Add a framebuffer, DRM device or connector of a function; connectors can be enabled."""
        # Framebuffers have a class of their own, and connectors that of their card.
        class_ = "graphics" if name.startswith("fb") else "drm"
        folder = self.add_class_device(function, class_, name)
        if enabled is not None:
            (folder / "enabled").write_text("enabled\n" if enabled else "disabled\n")


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
    # A key that is misspelled would be ignored, and the machine would show less than it has.
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
    # In this order: disks name functions, and volumes and mounts name disks.
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
    # By default it is on the root bus that has the number in its address.
    parent = function.get("parent", f"pci{address[:7]}")
    folder = tree.add_function(
        address,
        vendor,
        product,
        function["class"].ljust(6, "0"),  # lspci prints no programming interface
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
        # IFF_UP, IFF_BROADCAST and IFF_MULTICAST of <linux/if.h>; 0x1002 is not up.
        flags=0x1003 if interface.get("up", True) else 0x1002,
        carrier="1" if interface.get("link", True) else "0",
    )
    lowers: Sequence[str] = interface.get("lower", ())
    for lower in lowers:
        tree.stack_interfaces(name, lower, master=interface.get("is_master", True))
    if (use := interface.get("use")) is not None:
        tree.add_route(name, use)
