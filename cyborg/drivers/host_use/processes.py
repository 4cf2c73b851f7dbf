# SPDX-License-Identifier: Apache-2.0
"""PCI functions that programs of the host use through device nodes.

A kernel driver gives programs access to a device by nodes in ``/dev``: a program that computes on a
GPU has ``/dev/nvidia0`` or ``/dev/dri/renderD128`` open, one with RDMA ``/dev/infiniband/uverbs0``,
and a guest with a drive as its disk ``/dev/nvme0n1``. The links in ``/proc/PID/fd`` name them
(proc_pid_fd(5) of the Linux manual pages).

A tree that is not /sys has the open nodes as a file: so does a capture.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from cyborg.core.codec import Serializable
from cyborg.core.errors import CyborgError
from cyborg.core.inventory.delivery import is_vfio
from cyborg.drivers.host_use import open_nodes
from cyborg.drivers.host_use.disks import DiskReader
from cyborg.drivers.sysfs import PciFunction, Sysfs, read_facts

# Path of the facts below the directory that contains ``sys``.
FILE = "proc/open_devices.json"

# Programs that manage GPUs and keep their nodes open, also those of GPUs that compute for nobody.
# The names are those of ``/proc/PID/comm``: 15 characters (``TASK_COMM_LEN`` of
# ``include/linux/sched.h`` of Linux). NVIDIA documents the programs: the manual page
# nvidia-persistenced(1), the "Fabric Manager User Guide", and ``nvidia-dcgm.service.in`` of DCGM.
GPU_MANAGERS = {
    "nvidia-persiste": "nvidia-persistenced",
    "nv-fabricmanage": "Fabric Manager",
    "nv-hostengine": "DCGM",
    "dcgm-exporter": "dcgm-exporter",
}

# Programs that do not use a device, as ``/proc/PID/comm`` names them.
IGNORED = frozenset(
    {
        *GPU_MANAGERS,
        *open_nodes.MANAGERS,
        # The managers of vGPUs.
        "nvidia-vgpu-mgr",
        "nvidia-vgpud",
        "vgpu",
        # They manage the ports of RDMA cards, whoever uses these.
        "ibacm",
        "srp_daemon",
        # An agent, as another process of this package sees it.
        "cyborg-agent",
        "privsep-helper",
        "cyborg-standalo",
        # They open a node for a moment, to read facts or errors; udev starts many of them for each
        # disk that appears. What they then hold is found by holders and mounts.
        *("nvidia-smi", "nvme", "smartctl", "smartd", "lspci", "lsblk", "blkid"),
        *("systemd-udevd", "(udev-worker)", "udevd", "udisksd", "ata_id", "scsi_id"),
        *("lvm", "pvscan", "dmsetup", "dmeventd", "mdadm", "multipath", "multipathd", "kpartx"),
        *("btrfs", "zed", "probe-bcache", "bcache-register", "cryptsetup", "mpathpersist"),
    }
)

_VMMS = frozenset({"qemu-kvm", "kvm", "cloud-hyperviso", "crosvm", "libvirtd", "virtqemud"})


def _is_vmm(program: str) -> bool:
    """Return whether a program has a device by VFIO for a guest."""
    # The guest may be a server with an accelerator, which this host cannot tell from another guest.
    # Other programs of QEMU, such as qemu-storage-daemon, work for the host.
    return program in _VMMS or program.startswith("qemu-system")


# The classes in sysfs of the nodes whose path in ``/dev`` begins so.
# Sources in Linux: ``drivers/gpu/drm/drm_sysfs.c``, ``drivers/accel/drm_accel.c``,
# ``drivers/infiniband/core/uverbs_main.c`` and ``user_mad.c``, ``drivers/uio/uio.c``,
# ``drivers/scsi/sg.c`` and ``st.c``, and ``drivers/misc/habanalabs/common/device.c`` of Linux 6.1.
_CLASSES: Mapping[str, tuple[str, ...]] = {
    "dri/": ("drm",),
    "accel/": ("accel",),
    "infiniband/uverbs": ("infiniband_verbs",),
    "infiniband/umad": ("infiniband_mad",),
    "infiniband/issm": ("infiniband_mad",),
    "uio": ("uio",),
    "sg": ("scsi_generic",),
    "st": ("scsi_tape",),
    "nst": ("scsi_tape",),
    "hl": ("habanalabs",),  # of Gaudi, before its driver moved to accel
    **open_nodes.CLASSES,
}
# The bus in sysfs of the nodes whose path in ``/dev`` begins so: work queues of Intel DSA and IAA
# (``Documentation/ABI/stable/sysfs-driver-dma-idxd``, ``drivers/dma/idxd/cdev.c``), and engines and
# ports of an FPGA (``Documentation/ABI/testing/sysfs-platform-dfl-fme`` and
# ``sysfs-platform-dfl-port``).
_BUSES = {"dsa/wq": "dsa", "iax/wq": "dsa", "dfl-fme.": "platform", "dfl-port.": "platform"}


class _NodeKind(NamedTuple):
    """A folder in /dev, "" for /dev itself, and the class in sysfs of the nodes there."""

    folder: str
    class_: str


_RDMA, _VFIO = "/dev/infiniband/", "/dev/vfio/"
_VFIO_DEVICE = re.compile(r"vfio[0-9]+")
_NVIDIA = re.compile(r"nvidia([0-9]{1,4})")
_NVME = re.compile(r"nvme[0-9]{1,5}")
_MINOR = re.compile(r"Device Minor:\s*([0-9]+)")
_SHARED = open_nodes.SharedScan()


@dataclass(frozen=True, slots=True)
class ProcessFacts(Serializable):
    """Names of the programs that have a device node open, by the path of the node.

    ``error``: why not all processes could be read, None if they were.
    """

    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    error: str | None = None


def _places_in_sysfs(path: str) -> list[str]:
    """Return the paths in sysfs that a node may have, by its path in ``/dev``; empty if unknown."""
    # The name there is the last part or, if the kernel driver names the node so, the whole path
    # with exclamation marks instead of slashes.
    names = dict.fromkeys((path.rpartition("/")[2], path.replace("/", "!")))
    for prefix, classes in _CLASSES.items():
        if path.startswith(prefix):
            return [f"class/{class_}/{name}" for class_ in classes for name in names]
    for prefix, bus in _BUSES.items():
        if path.startswith(prefix):
            return [f"bus/{bus}/devices/{name}" for name in names]
    return []


def read(sysfs_root: Path) -> ProcessFacts:
    """Return the open device nodes of this host, or of the tree that ``sysfs_root`` is in.

    A tree without the file has none. The error of a failed read is in the result.
    """
    return read_facts(
        sysfs_root, FILE, ProcessFacts, lambda error: ProcessFacts(error=error), _read_local
    )


def _read_local() -> ProcessFacts:
    try:
        return ProcessFacts(_SHARED.read())
    except (CyborgError, OSError) as exc:
        return ProcessFacts(error=f"the processes of the host cannot be read: {exc}")


@dataclass(slots=True)
class ProcessReader:
    """Reader of the PCI functions that processes use.

    ``functions`` are those of the bus; they are read when they are needed if it is None.
    """

    sysfs: Sysfs
    facts: ProcessFacts
    functions: Collection[PciFunction] | None = None

    def used_functions(
        self,
        *,
        interfaces: bool = True,
        is_accepted: Callable[[str, str], bool] = lambda address, reason: False,
    ) -> dict[str, str]:
        """Return the PCI functions whose device nodes are open: a reason by address.

        Each function with a device node counts as used if the processes could not be read. If
        ``interfaces`` is False, nodes of network cards do not count. A use for which
        ``is_accepted(address, reason)`` is True does not count either.
        """
        found: dict[str, str] = {}
        for node, reasons in self._uses():
            if not interfaces and node.startswith(_RDMA):
                continue
            for address in self.functions_of(node):
                for reason in reasons:
                    if not is_accepted(address, reason):
                        found.setdefault(address, reason)
        return found

    def _uses(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield each node that is open or may be open, and the reasons: one for each program."""
        for node, programs in sorted(self.facts.programs.items()):
            used_by = [name for name in programs if name not in IGNORED]
            if node.startswith(_VFIO):
                used_by = [name for name in used_by if not _is_vmm(name)]
            if used_by:
                yield node, [f"the process {program} has {node} open" for program in used_by]
        if self.facts.error is not None:
            for node in self.nodes():
                yield node, [f"{node} may be open: {self.facts.error}"]

    def functions_of(self, node: str) -> list[str]:
        """Return the addresses of the PCI functions that a node gives access to."""
        path = node.removeprefix("/dev/")
        name = path.rpartition("/")[2]
        if (match := _NVIDIA.fullmatch(path)) is not None:
            return [address for address, minor in self._nvidia_minors() if minor == match[1]]
        if node.startswith(_VFIO):
            if _VFIO_DEVICE.fullmatch(name):
                return self._functions_below(f"class/vfio-dev/{name}")
            return self._functions_of_group(name.removeprefix("noiommu-"))
        if places := _places_in_sysfs(path):
            return list(chain.from_iterable(self._functions_below(place) for place in places))
        # Without a device in sysfs: each function of the maker may be the one.
        if (maker := open_nodes.find_maker(path)) is not None:
            return [f.address for f in self._all_functions() if maker.has(f)]
        if self.sysfs.list_names(f"class/block/{name}"):
            return DiskReader(self.sysfs).functions_of_disk(name)
        if _NVME.fullmatch(path):
            return self._functions_below(f"class/nvme/{name}")
        # With native multipath the generic node of a disk (ng0n1) is below the subsystem, which is
        # virtual.
        generic = f"class/nvme-generic/{name}"
        folder = self.sysfs.resolve(generic)
        if folder is None:
            return []
        disks = DiskReader(self.sysfs)
        # The kernel adds a folder for the class of the node, except below a device of a class.
        for parent in (folder.parent, folder.parent.parent):
            if found := disks.functions_of_nvme(parent):
                return found
        return self._functions_below(generic)

    def managers_by_function(self) -> dict[str, list[str]]:
        """Return the names of the managers that have a node of a GPU open, by address."""
        found: dict[str, dict[str, None]] = {}  # each name once, in the order of the nodes
        for node, programs in sorted(self.facts.programs.items()):
            if names := [GPU_MANAGERS[name] for name in programs if name in GPU_MANAGERS]:
                for address in self.functions_of(node):
                    found.setdefault(address, {}).update(dict.fromkeys(names))
        return {address: list(names) for address, names in found.items()}

    def _functions_of_group(self, group: str) -> list[str]:
        """Return the functions of an IOMMU group that VFIO has; the others are not used by it."""
        # ``Documentation/ABI/testing/sysfs-kernel-iommu_groups`` of Linux describes the group.
        return [
            address
            for address in self.sysfs.list_names(f"kernel/iommu_groups/{group}/devices")
            if is_vfio(self.sysfs.read_link(f"bus/pci/devices/{address}/driver"))
        ]

    def _all_functions(self) -> Collection[PciFunction]:
        if self.functions is None:
            self.functions = tuple(self.sysfs.pci_functions())
        return self.functions

    def _functions_below(self, path: str) -> list[str]:
        # The first is the device itself; those above it are bridges.
        return self.sysfs.functions_of(path)[:1]

    def _nvidia_minors(self) -> Iterator[tuple[str, str]]:
        """Yield the address and the minor number of each GPU of the kernel driver nvidia."""
        # The nodes have no device in sysfs.
        # Sources: README of the NVIDIA driver for Linux, "The /proc/driver/nvidia Interface", and
        # ``nv_procfs_read_gpu_info`` of ``nv-procfs.c`` of NVIDIA's open kernel modules.
        proc = Sysfs(self.sysfs.root.parent / "proc")
        for address in proc.list_names("driver/nvidia/gpus"):
            text = proc.read_text(f"driver/nvidia/gpus/{address}/information") or ""
            if (match := _MINOR.search(text)) is not None:
                yield address, match[1]

    def nodes(self) -> Iterator[str]:
        """Yield the paths of the nodes that a process could have open.

        Nodes of VFIO are none of them: the kernel gives a group to one process only.
        """
        kinds = {
            _NodeKind(prefix.rpartition("/")[0], class_)
            for prefix, classes in _CLASSES.items()
            for class_ in classes
        }
        kinds |= {_NodeKind("", class_) for class_ in ("nvme", "nvme-generic", "block")}
        for folder, class_ in sorted(kinds):
            for name in self.sysfs.list_names(f"class/{class_}"):
                path = name.replace("!", "/")  # sysfs writes the slash of a name as "!"
                node = f"/dev/{folder}/{path}" if folder and "/" not in path else f"/dev/{path}"
                if open_nodes.NODE.fullmatch(node):
                    yield node
        for prefix, bus in _BUSES.items():
            folder, _, start = prefix.rpartition("/")
            for name in self.sysfs.list_names(f"bus/{bus}/devices"):
                # The work queues of dsa and of iax are on one bus: a queue gets a path for each,
                # of which one does not exist.
                if name.startswith(start):
                    yield f"/dev/{folder}/{name}" if folder else f"/dev/{name}"
        yield from open_nodes.list_nodes(self._all_functions())
        for _, minor in self._nvidia_minors():
            yield f"/dev/nvidia{minor}"
