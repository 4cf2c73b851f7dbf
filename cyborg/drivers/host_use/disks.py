# SPDX-License-Identifier: Apache-2.0
"""PCI functions whose disks the host uses.

This reads the mounts and swap areas of the agent's own namespaces in ``/proc``. It does not detect
file systems whose devices the kernel does not list there, such as ZFS, nor disks that are mounted
only in another mount namespace: ``signatures`` finds what is on these.

Sources in Linux: ``Documentation/filesystems/proc.rst`` (``mountinfo``), ``swap_show`` of
``mm/swapfile.c``, ``mangle_path`` of ``fs/seq_file.c`` (octal escapes),
``Documentation/ABI/testing/sysfs-dev`` (``/sys/dev/block``), ``bd_link_disk_holder`` of
``block/holder.c`` (``holders``, ``slaves``), ``btrfs_sysfs_add_fsid`` of ``fs/btrfs/sysfs.c``,
``Documentation/ABI/testing/sysfs-block-dm`` (``dm/name``), ``kobject_set_name_vargs`` of
``lib/kobject.c`` ("!" for "/" in names), and ``drivers/nvme/host`` (``core.c`` and ``multipath.c``)
for the names of NVMe devices.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from cyborg.drivers.sysfs import LOCAL_ROOT, Sysfs, functions_on, read_file

MAX_PROC_BYTES = 4 * 1024 * 1024  # of one file in /proc; a container host has thousands of mounts
MAX_DEPTH = 16  # of stacked block devices
_ROOT_USE = "the root file system"
_OCTAL = re.compile(r"\\([0-7]{3})")


class DiskReader:
    """Reader of the disks of a host."""

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs
        self._proc = Sysfs(sysfs.root.parent / "proc")

    def used_functions(self) -> dict[str, str]:
        """Return the PCI functions whose disks the host uses: a reason by address."""
        uses: dict[str, str] = {}  # by the name of a block device
        for name, mount_point in self._mounts():
            use = _ROOT_USE if mount_point == "/" else f"the file system {mount_point}"
            if use == _ROOT_USE or name not in uses:
                uses[name] = use
        for name in self._swap_devices():
            uses.setdefault(name, "swap")
        for system in self._sysfs.list_names("fs/btrfs"):
            # A mount lists only one of the disks, and "holders" lists none.
            for name in self._sysfs.list_names(f"fs/btrfs/{system}/devices"):
                uses.setdefault(name, "a part of a btrfs file system")
        reasons: dict[str, str] = {}
        for path, user in self._kernel_users():
            if (device := self._block_name(path)) is not None:
                uses.setdefault(device, user)
            elif re.fullmatch(r"/dev/nvme[0-9]+", path):
                controller = path.removeprefix("/dev/")
                # The first function is the controller itself; the others on its path are bridges.
                functions = self._sysfs.functions_of(f"class/nvme/{controller}")[:1]
                reasons |= dict.fromkeys(functions, f"{controller} holds {user}")
        for name in self._sysfs.list_names("class/block"):
            # An unmounted volume of LVM, RAID or encryption is in use as well: what it is made of.
            if holders := self._sysfs.list_names(f"class/block/{name}/holders"):
                uses.setdefault(name, f"a part of {holders[0]}")
        # The root file system first: it is the most important of several reasons.
        for name in sorted(uses, key=lambda name: uses[name] != _ROOT_USE):
            for address in self.functions_of_disk(name):
                reasons.setdefault(address, f"{name} holds {uses[name]}")
        return reasons

    def _mounts(self) -> Iterable[tuple[str, str]]:
        """Yield the name and the mount point of each mounted block device."""
        for process in ("self", "1"):  # "1" is for a root agent in its own mount namespace
            for line in self._lines(f"{process}/mountinfo"):
                mount, _, file_system = line.partition(" - ")
                # Two ids, major:minor, the root in the file system, the mount point, options; then
                # the type, the source and more options.
                columns, details = mount.split(), file_system.split()
                if len(columns) < 5 or len(details) < 2:
                    continue
                _, _, number, _, mount_point, *_ = columns
                _, source, *_ = details
                name = self._sysfs.read_link(f"dev/block/{number}")
                # btrfs and overlays have a number without a device; btrfs has one disk as source.
                if name is None and source.startswith("/dev/"):
                    name = self._block_name(_unescape(source))
                if name is not None:
                    yield name, _unescape(mount_point)

    def _swap_devices(self) -> Iterable[str]:
        for line in self._lines("swaps")[1:]:
            path, _, rest = line.partition(" ")
            name = self._block_name(_unescape(path)) if path.startswith("/dev/") else None
            if name is not None and rest.split()[:1] == ["partition"]:
                yield name

    def _kernel_users(self) -> Iterable[tuple[str, str]]:
        """Yield the paths of block devices that the kernel itself uses, and their use."""
        # Sources in Linux: ``Documentation/ABI/testing/sysfs-block-loop`` (``backing_file``) and
        # ``sysfs-block-zram`` (``backing_dev``); ``/sys/kernel/config``, if it is mounted there,
        # has the targets of NVMe (``drivers/nvme/target/configfs.c``) and of SCSI (``udev_path`` of
        # ``drivers/target/target_core_configfs.c``).
        files = [
            (f"class/block/{name}/{attribute}", f"the data of {name}")
            for prefix, attribute in (("loop", "loop/backing_file"), ("zram", "backing_dev"))
            for name in self._sysfs.list_names("class/block")
            if name.startswith(prefix)
        ]
        config = "kernel/config/nvmet/subsystems"
        for subsystem in self._sysfs.list_names(config):
            path = f"{config}/{subsystem}/passthru/device_path"
            files.append((path, f"the NVMe target {subsystem}"))
            for number in self._sysfs.list_names(f"{config}/{subsystem}/namespaces"):
                path = f"{config}/{subsystem}/namespaces/{number}/device_path"
                files.append((path, f"a namespace of the NVMe target {subsystem}"))
        config = "kernel/config/target/core"
        for group in self._sysfs.list_names(config):
            for name in self._sysfs.list_names(f"{config}/{group}"):
                if group.startswith(("iblock_", "pscsi_")):
                    path = f"{config}/{group}/{name}/udev_path"
                    files.append((path, f"the SCSI target {name}"))
        for path, user in files:
            if (text := self._sysfs.read_text(path)) and text.startswith("/dev/"):
                yield text, user

    def _block_name(self, path: str) -> str | None:
        """Return the kernel name of the block device at a path in /dev; None if it is unknown."""
        if self._sysfs.root == LOCAL_ROOT:
            path = os.path.realpath(path)  # a link in /dev/disk/by-id, for example
        name = path.removeprefix("/dev/").replace("/", "!")
        if self._sysfs.list_names(f"class/block/{name}"):
            return name
        folder, _, mapped = path.rpartition("/")
        if folder != "/dev/mapper":
            return None
        for device in self._sysfs.list_names("class/block"):
            if self._sysfs.read_text(f"class/block/{device}/dm/name") == mapped:
                return device
        return None

    def functions_of_disk(self, name: str, depth: int = 0) -> list[str]:
        """Return the PCI functions on the paths to a block device and its underlying devices."""
        path = self._resolved(f"class/block/{name}")
        functions = functions_on(path)
        if depth == MAX_DEPTH:
            return functions
        for below in self._sysfs.list_names(f"class/block/{name}/slaves"):
            functions += self.functions_of_disk(below, depth + 1)
        is_partition = self._sysfs.read_text(path / "partition") is not None
        disk = path.parent if is_partition else path
        if is_partition:  # only the whole disk has the folder ``slaves``
            for below in self._sysfs.list_names(disk / "slaves"):
                functions += self.functions_of_disk(below, depth + 1)
        return functions + self.functions_of_nvme(disk.parent, disk.name)

    def functions_of_nvme(self, folder: Path, disk: str = "") -> list[str]:
        """Return the PCI functions of a virtual folder of NVMe devices; an empty list for others.

        With native multipath that is a subsystem, which has links to its controllers, otherwise a
        controller of a fabric. A controller has a path, such as nvme0c1n2, to each of its disks, as
        nvme0n2. Without any path to ``disk``, all controllers count.
        """
        if not folder.name.startswith("nvme-subsys"):
            return self._functions_of_fabric(folder)
        controllers = [
            self._resolved(folder / name)
            for name in self._sysfs.list_names(folder)
            if re.fullmatch(r"nvme[0-9]+", name)
        ]
        instance, _, number = disk.rpartition("n")
        path = re.compile(rf"{re.escape(instance)}c[0-9]+n{re.escape(number)}")
        with_path = [c for c in controllers if any(map(path.fullmatch, self._sysfs.list_names(c)))]
        return [
            function
            for controller in with_path or controllers
            for function in functions_on(controller) or self._functions_of_fabric(controller)
        ]

    def _functions_of_fabric(self, controller: Path) -> list[str]:
        """Return the functions of the Fibre Channel port of a controller of NVMe over Fabrics."""
        # With TCP and RDMA the interface has an address, which is a use of its own.
        # The address of such a controller has ``host_traddr=nn-NODE:pn-PORT`` (``nvmf_get_address``
        # of ``drivers/nvme/host/fabrics.c`` and ``nvme_fc_parse_traddr`` of ``fc.c`` of Linux), and
        # ``fc_host`` the ``port_name`` of each port (``drivers/scsi/scsi_transport_fc.c``).
        if self._sysfs.read_text(controller / "transport") != "fc":
            return []
        address = self._sysfs.read_text(controller / "address") or ""
        match = re.search(r"host_traddr=nn-0x[0-9a-fA-F]+:pn-(0x[0-9a-fA-F]+)", address)
        hosts = self._sysfs.list_names("class/fc_host")
        matching = [
            host
            for host in hosts
            if match
            and self._sysfs.read_int(f"class/fc_host/{host}/port_name") == int(match[1], 16)
        ]
        # Each port counts if the address does not say which one.
        return [
            function
            for host in matching or hosts
            for function in self._sysfs.functions_of(f"class/fc_host/{host}")
        ]

    def _resolved(self, path: str | Path) -> Path:
        return self._sysfs.resolve(path) or self._sysfs.root

    def _lines(self, path: str) -> list[str]:
        try:
            content = read_file(self._proc.root / path, MAX_PROC_BYTES)
            return content.decode(errors="replace").splitlines()
        except OSError:
            return []


def _unescape(path: str) -> str:
    """Return a path with the octal escapes of the kernel replaced by their characters."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), path)
