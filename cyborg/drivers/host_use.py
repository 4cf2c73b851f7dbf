# SPDX-License-Identifier: Apache-2.0
"""Detection of PCI functions that the host uses: disks, active NICs and displays, mdev parents.

This protects the host against rules that select too much. It reads sysfs, and the mounts, swap
areas and routes of the agent's own namespaces in ``/proc``. It does not detect file systems whose
devices the kernel does not list there, such as ZFS. It does not detect disks that are mounted only
in another mount namespace either.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import Invalid
from cyborg.core.inventory.delivery import is_vfio
from cyborg.drivers.sysfs import Sysfs, read_file

MAX_PROC_BYTES = 4 * 1024 * 1024  # of one file in /proc; a container host has thousands of mounts
MAX_DEPTH = 16  # of stacked block or network devices
_UP = 0x1  # IFF_UP of <linux/if.h>
_GLOBAL = "00"  # scope of an address in if_inet6
_CARD, _CONNECTOR = re.compile(r"card[0-9]+"), re.compile(r"card[0-9]+-.+")
_FRAMEBUFFER = re.compile(r"fb[0-9]+")
_OCTAL = re.compile(r"\\([0-7]{3})")


def used_functions(
    sysfs_root: Path, previous: Mapping[str, str] | None = None, *, interfaces: bool = True
) -> dict[str, str]:
    """Return a dict from the address of each PCI function that the host uses to the reason.

    ``/proc`` is the directory next to ``sysfs_root``. A device whose files cannot be read counts as
    unused. ``previous`` is the result of an earlier call. A network interface that was in use then
    still counts as used if it is up without a link, because a network manager may remove its
    addresses until the link is back. If ``interfaces`` is False, network interfaces do not count as
    a use.
    """
    host = _Host(sysfs_root)
    found: dict[str, str] = {}
    # The parents last: a driver that creates mediated devices ignores this reason only.
    parents = mediated_parents(sysfs_root)
    network = host.interfaces() if interfaces else {}
    for reasons in (host.disks(), network, host.displays(), parents):
        for address, reason in reasons.items():
            found.setdefault(address, reason)
    if missing := (previous or {}).keys() - found.keys():
        unlinked = host.unlinked()
        found |= {address: (previous or {})[address] for address in missing & unlinked}
    return found


def mediated_parents(sysfs_root: Path) -> dict[str, str]:
    """Return the PCI functions with mediated devices: a text with the reason by address.

    A server may use a mediated device, which disappears without its parent. If the parent is a
    virtual function, its physical function is also returned. The sysfs folder of a mediated device
    is in the folder of its parent (``Documentation/driver-api/vfio-mediated-device.rst`` of the
    Linux kernel).
    """
    sysfs = Sysfs(sysfs_root)
    devices = Path("bus/mdev/devices")
    parents: set[str] = set()
    for name in sysfs.list_names(devices):
        # A device may disappear meanwhile, and a parent need not be on the PCI bus.
        with contextlib.suppress(OSError, Invalid):
            folder = Path(os.readlink(sysfs_root / devices / name))
            parents.add(str(PciAddress.parse(folder.parent.name)))
    found = dict.fromkeys(parents, "it has mediated devices, which servers may use")
    for parent in sorted(parents):
        if physfn := sysfs.read_link(f"bus/pci/devices/{parent}/physfn"):
            found.setdefault(physfn, f"its virtual function {parent} has mediated devices")
    return found


class _Host:
    """Reader of the current state of a host."""

    def __init__(self, sysfs_root: Path) -> None:
        self._root = sysfs_root
        self._sysfs = Sysfs(sysfs_root)
        self._proc = Sysfs(sysfs_root.parent / "proc")

    def disks(self) -> dict[str, str]:
        """Return the PCI functions whose disks the host uses: a reason by address."""
        uses: dict[str, str] = {}  # by the name of a block device
        for name, mount_point in self._mounts():
            root = mount_point == "/"
            if root or name not in uses:
                uses[name] = "the root file system" if root else f"the file system {mount_point}"
        for name in self._swap_devices():
            uses.setdefault(name, "swap")
        for system in self._sysfs.list_names("fs/btrfs"):
            # A mount lists only one of the disks, and "holders" lists none.
            for name in self._sysfs.list_names(f"fs/btrfs/{system}/devices"):
                uses.setdefault(name, "a part of a btrfs file system")
        for name in self._sysfs.list_names("class/block"):
            # An unmounted volume of LVM, RAID or encryption is in use as well.
            if holders := self._sysfs.list_names(f"class/block/{name}/holders"):
                uses.setdefault(name, f"a part of {holders[0]}")
        found: dict[str, str] = {}
        # The root file system first: it is the most important of several reasons.
        for name in sorted(uses, key=lambda name: "root" not in uses[name]):
            for address in self._functions_of_disk(name):
                found.setdefault(address, f"{name} holds {uses[name]}")
        return found

    def interfaces(self) -> dict[str, str]:
        """Return the PCI functions whose network interfaces the host uses: a reason by address."""
        used = self._routed_interfaces()
        found: dict[str, str] = {}
        for name in self._sysfs.list_names("class/net"):
            reason = self._interface_use(name, used, 0)
            if reason is None:
                continue
            for address in _functions(self._resolved(f"class/net/{name}/device")):
                found.setdefault(address, f"{name} {reason}")
        return found

    def displays(self) -> dict[str, str]:
        """Return the PCI functions that are displays of the host: a reason by address.

        A PCI function is a display of the host if it has a framebuffer or an enabled connector, or
        if it is the VGA device of the boot and has a display device of a kernel driver. A compute
        GPU without a screen counts as unused, although its kernel driver creates a DRM device. A
        PCI function that is bound to VFIO counts as unused: ``vfio_pci_vga_init`` of
        ``drivers/vfio/pci/vfio_pci_core.c`` removes the framebuffer of the firmware.

        Sources: ``Documentation/gpu/vgaarbiter.rst`` (the default VGA device),
        ``drivers/pci/pci-sysfs.c`` (``boot_vga``), ``Documentation/fb/framebuffer.rst``,
        ``Documentation/admin-guide/sysfs-rules.rst`` (a class device is below its device) and
        ``drivers/gpu/drm/drm_sysfs.c`` (``enabled`` of a connector) of the Linux kernel.
        """
        cards = self._displays_of("drm", _CARD)
        framebuffers = self._displays_of("graphics", _FRAMEBUFFER)
        found: dict[str, str] = {}
        for address in cards | framebuffers:
            folder = Path("bus/pci/devices") / address
            driver = self._sysfs.read_link(folder / "driver")
            if driver is not None and self._sysfs.read_text(folder / "boot_vga") == "1":
                found[address] = f"it is the VGA device of the boot, bound to {driver}"
        for address, name in framebuffers.items():
            found.setdefault(address, f"it has the framebuffer {name}")
        for address, connector in self._displays_of("drm", _CONNECTOR, enabled=True).items():
            found.setdefault(address, f"its display output {connector} is enabled")
        return found

    def _displays_of(
        self, class_: str, pattern: re.Pattern[str], *, enabled: bool = False
    ) -> dict[str, str]:
        """Return the PCI functions with a device of a class: the first device name by address.

        With ``enabled`` only enabled devices count. PCI functions that are bound to VFIO are
        omitted.
        """
        found: dict[str, str] = {}
        for name in self._sysfs.list_names(f"class/{class_}"):
            path = f"class/{class_}/{name}"
            if not pattern.fullmatch(name):
                continue
            if enabled and self._sysfs.read_text(f"{path}/enabled") != "enabled":
                continue
            # The first is the device itself; those above it are bridges.
            for address in _functions(self._resolved(path))[:1]:
                if not is_vfio(self._sysfs.read_link(f"bus/pci/devices/{address}/driver")):
                    found.setdefault(address, name)
        return found

    def unlinked(self) -> set[str]:
        """Return the PCI functions with a network interface that is up and has no link."""
        found: set[str] = set()
        for name in self._sysfs.list_names("class/net"):
            if self._is_up(name) and self._sysfs.read_text(f"class/net/{name}/carrier") == "0":
                found.update(_functions(self._resolved(f"class/net/{name}/device")))
        return found

    def _mounts(self) -> Iterable[tuple[str, str]]:
        """Yield the name and the mount point of each mounted block device."""
        for process in ("self", "1"):  # "1" is for a root agent in its own mount namespace
            for line in self._lines(f"{process}/mountinfo"):
                fields, _, source = line.partition(" - ")
                columns, device = fields.split(), source.split()
                if len(columns) < 5 or len(device) < 2:
                    continue
                mount_point = _unescape(columns[4])
                name = self._sysfs.read_link(f"dev/block/{columns[2]}")
                # btrfs and overlays have a number without a device; btrfs has one disk as source.
                if name is None and device[1].startswith("/dev/"):
                    name = self._block_name(_unescape(device[1]))
                if name is not None:
                    yield name, mount_point

    def _swap_devices(self) -> Iterable[str]:
        for line in self._lines("swaps")[1:]:
            path, _, rest = line.partition(" ")
            name = self._block_name(_unescape(path)) if path.startswith("/dev/") else None
            if name is not None and rest.split()[:1] == ["partition"]:
                yield name

    def _block_name(self, path: str) -> str | None:
        """Return the kernel name of the block device at a path in /dev; None if it is unknown."""
        name = path.removeprefix("/dev/").replace("/", "!")
        if self._sysfs.list_names(f"class/block/{name}"):
            return name
        mapped = path.removeprefix("/dev/mapper/")
        for device in self._sysfs.list_names("class/block"):
            if mapped != path and self._sysfs.read_text(f"class/block/{device}/dm/name") == mapped:
                return device
        return None

    def _functions_of_disk(self, name: str, depth: int = 0) -> list[str]:
        """Return the PCI functions on the paths to a block device and its underlying devices."""
        path = self._resolved(f"class/block/{name}")
        found = _functions(path)
        if depth == MAX_DEPTH:
            return found
        for below in self._sysfs.list_names(f"class/block/{name}/slaves"):
            found += self._functions_of_disk(below, depth + 1)
        disk = path if self._sysfs.read_text(path / "partition") is None else path.parent
        if disk != path:
            for below in self._sysfs.list_names(disk / "slaves"):
                found += self._functions_of_disk(below, depth + 1)
        if disk.parent.name.startswith("nvme-subsys"):
            # Multi-path NVMe: the subsystem has links to its controllers.
            for controller in self._sysfs.list_names(disk.parent):
                if re.fullmatch(r"nvme[0-9]+", controller):
                    found += _functions(self._resolved(disk.parent / controller))
        return found

    def _routed_interfaces(self) -> dict[str, str]:
        """Return a dict from the name of each interface with routes or addresses to the reason."""
        found: dict[str, str] = {}
        for line in self._lines("self/net/if_inet6"):
            fields = line.split()
            if len(fields) == 6 and fields[3] == _GLOBAL and fields[5] != "lo":
                found[fields[5]] = "has an address of the host"
        for line in self._lines("self/net/route")[1:]:
            fields = line.split()
            if len(fields) < 8:
                continue
            # A connected network is a route too, so an IPv4 address shows here.
            default = fields[1] == "00000000" and fields[7] == "00000000"
            if default or fields[0] not in found:
                found[fields[0]] = f"has {'the default route' if default else 'a route'}"
        for line in self._lines("self/net/ipv6_route"):
            fields = line.split()
            if len(fields) == 10 and fields[9] != "lo" and fields[:2] == ["0" * 32, "00"]:
                found[fields[9]] = "has the default route"
        return found

    def _interface_use(self, name: str, used: Mapping[str, str], depth: int) -> str | None:
        """Return how the host uses an interface; None if it does not."""
        if name in used:
            return used[name]
        if depth == MAX_DEPTH:
            return None
        folder = f"class/net/{name}"
        uppers = [
            link.removeprefix("upper_")
            for link in self._sysfs.list_names(folder)
            if link.startswith("upper_")
        ]
        for upper in uppers:
            if (reason := self._interface_use(upper, used, depth + 1)) is not None:
                return f"is below {upper}, which {reason}" if depth == 0 else reason
        master = self._sysfs.read_link(f"{folder}/master")
        # The carrier is ignored: a NIC must not be offered while its switch restarts.
        if not self._is_up(name):
            return None
        if master is not None:
            return f"is an active port of {master}"
        # For example a macvtap of a server, which has no address on the host.
        active = [upper for upper in uppers if self._is_up(upper)]
        return f"is below {active[0]}" if active else None

    def _is_up(self, name: str) -> bool:
        return bool((self._sysfs.read_int(f"class/net/{name}/flags") or 0) & _UP)

    def _resolved(self, path: str | Path) -> Path:
        return self._sysfs.resolve(path) or self._root

    def _lines(self, path: str) -> list[str]:
        try:
            content = read_file(self._proc.root / path, MAX_PROC_BYTES)
            return content.decode(errors="replace").splitlines()
        except OSError:
            return []


def _functions(path: Path) -> list[str]:
    """Return the addresses of the PCI functions on a sysfs path, the last one on the path first.

    The first address is the device itself. The others are bridges or, for NVMe drives behind Intel
    VMD, a controller that is not a bridge.
    """
    found: list[str] = []
    for part in reversed(path.parts):
        with contextlib.suppress(Invalid):
            found.append(str(PciAddress.parse(part)))
    return found


def _unescape(path: str) -> str:
    """Return a path with the octal escapes of the kernel replaced by their characters."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), path)
