# SPDX-License-Identifier: Apache-2.0
"""Simulated kernel of a replayed host: host work changes the tree of the capture, and only that.

It imports no privileged function. What each operation does follows the kernel:

* mediated devices: ``Documentation/ABI/testing/sysfs-bus-vfio-mdev`` and ``drivers/vfio/mdev`` of
  Linux. Types of NVIDIA exclude each other ("Virtual GPU Software User Guide", homogeneous vGPUs);
  the devices of other parents share it in proportion, as those of ``samples/vfio-mdev/mtty.c``;
* QAT: ``drivers/crypto/intel/qat/qat_common/adf_sysfs.c``;
* virtual functions: ``sriov_numvfs_store``, ``sriov_enable`` and ``pci_iov_add_virtfn`` of
  ``drivers/pci/iov.c`` of Linux. New virtual functions have no kernel driver, also with
  ``sriov_drivers_autoprobe``: what a kernel driver would show is not simulated;
* DFL cards: ``fme_pr`` of ``drivers/fpga/dfl-fme-pr.c``, ``fpga_region_program_fpga`` of
  ``fpga-region.c`` and ``dfl-afu-main.c`` of Linux: the port is put into reset, the image is
  loaded, and the port leaves the reset. After a failure the port stays in reset, ``afu_id`` cannot
  be read (EBUSY), and later images do not change that, because the resets of a port are counted;
* NVMe drives: data that a server left are simulated by a note, which an erasure removes.
"""

import contextlib
import errno
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyborg.core.capture.model import Fault, FaultKind, Operation
from cyborg.core.errors import DriverFailed
from cyborg.drivers.fpga.cards import MANAGERS, REGIONS, Region, read_regions
from cyborg.drivers.fpga.images import read_header
from cyborg.drivers.host_use.check import used_functions
from cyborg.drivers.kernel import interfaces
from cyborg.drivers.kernel.mdev import DEVICES, is_present, types_folder
from cyborg.drivers.pci import sriov
from cyborg.drivers.sysfs import PCI_DEVICES, Sysfs

_MAX_INSTANCE = re.compile(r"max_instance=([0-9]{1,4})")  # in the description of NVIDIA's types
_ERRORS: Mapping[FaultKind, int] = {
    FaultKind.EIO: errno.EIO,
    FaultKind.EBUSY: errno.EBUSY,
    # The kernel reports that a function did not come back from a reset.
    FaultKind.STUCK_RESET: errno.ETIMEDOUT,
    FaultKind.DISAPPEARS: errno.ENODEV,
}
# Folders with links to devices.
_PLACES = (
    *("bus/pci/devices", "bus/mdev/devices", "bus/platform/devices"),
    *("class/mdev_bus", "class/net", "class/block", "class/fpga_manager", "class/fpga_region"),
)
_SAMPLES = 16  # of each namespace, as privileged.nvme takes


@dataclass
class _PendingFault:
    """A fault, and how many more operations it affects; None: all of them."""

    fault: Fault
    left: int | None


class SimulatedKernel:
    """The kernel of a replayed host. Thread-safe.

    ``data`` has what servers left on drives, by PCI address: tests write it.
    """

    def __init__(self, sysfs_root: Path, faults: Iterable[Fault] = ()) -> None:
        self.root = sysfs_root
        self.sysfs = Sysfs(sysfs_root)
        self.data: dict[str, str] = {}
        self.lock = threading.RLock()  # reentrant: a fault removes functions during an operation
        self._faults: list[_PendingFault] = []
        self._capacities: dict[tuple[str, str], int] = {}  # by parent and type
        for fault in faults:
            self.add_fault(fault)

    def add_fault(self, fault: Fault) -> None:
        """Let a device show a fault from now on."""
        with self.lock:
            self._faults.append(_PendingFault(fault, fault.count))

    def check_fault(self, address: str, operation: Operation, *, resets: bool = True) -> None:
        """Raise OSError if a fault of a device affects an operation; count the fault.

        ``resets`` tells whether this step of the operation resets the device. A device that
        disappears is removed from the tree.
        """
        with self.lock:
            for pending in self._faults:
                fault = pending.fault
                if fault.address != address or fault.operation not in (None, operation):
                    continue
                if pending.left == 0 or (fault.kind is FaultKind.STUCK_RESET and not resets):
                    continue
                if pending.left is not None:
                    pending.left -= 1
                if fault.kind is FaultKind.DISAPPEARS:
                    self.remove_function(address)
                raise OSError(_ERRORS[fault.kind], os.strerror(_ERRORS[fault.kind]))

    def remove_function(self, address: str) -> None:
        """Remove a PCI function with its virtual functions."""
        with self.lock:
            for virtual in interfaces.virtual_functions(self.sysfs, address).values():
                self.remove_function(virtual)
            entry = self.root / "bus/pci/devices" / address
            if entry.is_symlink():
                self.remove_device(entry.resolve())

    def remove_device(self, folder: Path) -> None:
        """Remove the folder of a device and its entries in other folders."""
        with self.lock:
            if (self.root / "devices").resolve() not in folder.parents:
                return  # a uevent of a capture may name any path
            shutil.rmtree(folder, ignore_errors=True)
            for place in _PLACES:
                self._remove_dangling(self.root / place)
            for group in (self.root / "kernel/iommu_groups").glob("*/devices"):
                self._remove_dangling(group)
                if not self.sysfs.list_names(group):
                    shutil.rmtree(group.parent)

    def count_virtual_functions(self, physical: Path) -> None:
        """Update ``sriov_numvfs``, if the folder has it, and the links of virtual functions."""
        number = physical / "sriov_numvfs"
        if number.is_file():
            self._remove_dangling(physical)
            number.write_text(f"{len(list(physical.glob('virtfn*')))}\n")

    @staticmethod
    def _remove_dangling(folder: Path) -> None:
        for name in Sysfs(folder).list_names("."):
            if not (folder / name).exists():
                (folder / name).unlink(missing_ok=True)

    def create(self, parent: str, type_: str, device: str) -> None:
        """Create a mediated device; if it exists, create it again. Raise DriverFailed."""
        with self.lock, failures(f"a device of type {type_} could not be created at {parent}"):
            self.check_fault(parent, Operation.CREATE)
            self._remove(parent, type_, device)
            folder = self.root / types_folder(parent) / type_
            if type_ not in self.sysfs.list_names(folder.parent):
                raise DriverFailed(f"{parent} has no type {type_} of mediated devices")
            if not self.sysfs.read_int(types_folder(parent) / type_ / "available_instances"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._learn_capacities(parent)
            path = folder.resolve().parent.parent / device
            path.mkdir()
            make_link(path / "mdev_type", folder.resolve())
            make_link(folder.resolve() / "devices" / device, path)
            make_link(self.root / DEVICES / device, path)
            self._count_instances(parent)

    def remove(self, parent: str, type_: str, device: str) -> None:
        """Remove a mediated device; do nothing if it does not exist. Raise DriverFailed."""
        with self.lock, failures(f"{device} could not be removed"):
            if is_present(self.root, device):
                self.check_fault(parent, Operation.REMOVE)
                self._remove(parent, type_, device)

    def _remove(self, parent: str, type_: str, device: str) -> None:
        """Remove a mediated device; do nothing if it does not exist."""
        if not is_present(self.root, device):
            return
        types = types_folder(parent)
        if device not in self.sysfs.list_names(types / type_ / "devices"):
            raise DriverFailed(f"{device} is no device of {parent}, type {type_}")
        self._learn_capacities(parent)
        path = (self.root / DEVICES / device).resolve()
        (self.root / types / type_ / "devices" / device).unlink()
        (self.root / DEVICES / device).unlink()
        shutil.rmtree(path)
        self._count_instances(parent)

    def _learn_capacities(self, parent: str) -> None:
        """Store how many devices of each type an empty parent can have."""
        types = types_folder(parent)
        for name in self.sysfs.list_names(types):
            if (parent, name) in self._capacities:
                continue
            text = self.sysfs.read_text(types / name / "description") or ""
            match = _MAX_INSTANCE.search(text)
            available = self.sysfs.read_int(types / name / "available_instances") or 0
            existing = len(self.sysfs.list_names(types / name / "devices"))
            self._capacities[parent, name] = int(match[1]) if match else available + existing

    def _count_instances(self, parent: str) -> None:
        """Write the available instances of each type of a parent."""
        types = types_folder(parent)
        names = self.sysfs.list_names(types)
        counts = {name: len(self.sysfs.list_names(types / name / "devices")) for name in names}
        capacity = {name: self._capacities[parent, name] for name in names}
        used = sum(counts[name] / capacity[name] for name in names if capacity[name])
        for name in names:
            others = any(counts[other] for other in names if other != name)
            # A GPU of NVIDIA has devices of one type at a time; others divide what is left.
            if name.startswith("nvidia-"):
                free = 0 if others else capacity[name] - counts[name]
            else:
                free = int(capacity[name] * (1 - used) + 1e-9)  # 0.999... is 1
            (self.root / types / name / "available_instances").write_text(f"{max(0, free)}\n")

    def set_instances(self, address: str, instances: Mapping[str, int]) -> None:
        """Raise DriverFailed: a capture has the types of mediated devices for one profile only."""
        raise DriverFailed(f"{address} cannot be changed: MIG instances are not simulated")

    def set_services(self, address: str, layout: str) -> None:
        """Give a QAT device the services of a layout. Raise DriverFailed."""
        # Its checks and its order of writes, on the attributes of the tree.
        from cyborg.drivers.privileged import qat

        with self.lock:
            qat.check_unused(self.sysfs, address)
            folder = self.root / PCI_DEVICES / address / "qat"
            qat.change(address, qat.SysfsAttributes(folder, self._write_qat), layout)

    def _write_qat(self, path: Path, value: str) -> None:
        """Write an attribute of a QAT device. Raise OSError as the kernel does."""
        # adf_dev_restart resets the device when it starts.
        resets = (path.name, value) == ("state", "up")
        self.check_fault(path.parent.parent.name, Operation.CONFIGURE, resets=resets)
        # It refuses services of a device that runs: cfg_services_store.
        if path.name == "cfg_services" and Sysfs(path.parent).read_text("state") == "up":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        path.write_text(f"{value}\n")

    def reset(self, address: str) -> str | None:
        """Reset a function; return the methods, None if it disappeared. Raise DriverFailed."""
        with self.lock, failures(f"{address} could not be reset"):
            if self.sysfs.pci_function(address) is None:
                return None
            self.check_fault(address, Operation.RESET)
            return self.sysfs.read_text(f"bus/pci/devices/{address}/reset_method") or "reset"

    def erase(self, address: str, timeout: float, methods: Sequence[str]) -> Mapping[str, Any]:
        """Erase a drive; return the method and counts, as ``privileged.nvme.erase`` does."""
        del timeout, methods  # a capture has no commands of drives
        with self.lock, failures(f"{address} could not be erased"):
            drive = self.sysfs.pci_function(address)
            if drive is None:
                self.data.pop(address, None)
                return {"method": None, "namespaces": 0, "samples": 0}
            if drive.numvfs:
                raise DriverFailed(f"{address} has virtual functions, which others may use")
            if (reason := used_functions(self.root).get(address)) is not None:
                raise DriverFailed(f"{address} cannot be erased: {reason}")
            self.check_fault(address, Operation.ERASE)
            self.data.pop(address, None)
            folder = PCI_DEVICES / address / "nvme"
            count = sum(
                name.startswith("nvme")
                for controller in self.sysfs.list_names(folder)
                for name in self.sysfs.list_names(folder / controller)
            )
            return {"method": "simulated", "namespaces": count, "samples": _SAMPLES * count}


@contextlib.contextmanager
def failures(subject: str) -> Iterator[None]:
    """Convert an error of the kernel to DriverFailed, as the privileged functions do."""
    try:
        yield
    except OSError as exc:
        raise DriverFailed(f"{subject}: {exc.strerror or exc}") from exc


def make_link(path: Path, target: Path) -> None:
    """Create a relative link, as the kernel has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent.resolve()))


_COPIED = ("class", "numa_node", "revision", "subsystem_device", "subsystem_vendor", "vendor")
_GROUPS = Path("kernel/iommu_groups")
_NUMBER = re.compile(r"[0-9]{1,9}")


class SimulatedSriov:
    """Virtual functions in the tree of a replayed host."""

    def __init__(self, kernel: SimulatedKernel) -> None:
        self._kernel = kernel

    def set_count(self, address: str, count: int, autoprobe: bool, allow_network: bool) -> None:
        """Set the number of virtual functions, as ``privileged.pci.set_count`` does."""
        # Its checks and its order of writes, on the attributes of the tree.
        from cyborg.drivers.privileged import pci

        kernel = self._kernel
        with kernel.lock:
            dev = kernel.root.parent / "dev"
            self._make_group_nodes(dev / "vfio")
            host = pci.Host(kernel.root, dev, self._write)
            pci.change(host, address, count, autoprobe, allow_network)

    def _make_group_nodes(self, folder: Path) -> None:
        """Create a node for each VFIO group: no server of the replayed host has it open."""
        folder.mkdir(parents=True, exist_ok=True)
        for group in self._kernel.sysfs.list_names(_GROUPS):
            (folder / group).touch()

    def _write(self, path: Path, text: str) -> None:
        """Write an attribute of a physical function as the kernel does. Raise OSError."""
        if path.name == sriov.NUMVFS:
            self._change(path.parent.name, int(text))
        else:
            path.write_text(f"{text}\n")

    def _change(self, address: str, count: int) -> None:
        """Create or remove the virtual functions of a card, with the errors of the kernel."""
        kernel = self._kernel
        kernel.check_fault(address, Operation.CREATE if count else Operation.REMOVE)
        folder = (kernel.root / "bus/pci/devices" / address).resolve()
        current = interfaces.virtual_functions(kernel.sysfs, address)
        if count and current:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        for number, virtual in current.items():
            kernel.remove_function(virtual)
            (folder / f"virtfn{number}").unlink()
        if (card := kernel.sysfs.pci_function(address)) is None:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        predicted = sriov.predict(kernel.sysfs, card, count)
        if len({function.address for function in predicted}) != count:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))  # the bus has no room
        for number, function in enumerate(predicted):
            self._create(folder, number, function.address, function.product)
        (folder / sriov.NUMVFS).write_text(f"{count}\n")

    def _create(self, card: Path, number: int, address: str, product: str) -> None:
        """Write the folder of a virtual function, and the links to it."""
        root = self._kernel.root
        folder = card.parent / address
        (folder / "power").mkdir(parents=True)
        (folder / "power/runtime_status").write_text("active\n")
        for name in filter(lambda name: (card / name).is_file(), _COPIED):
            (folder / name).write_bytes((card / name).read_bytes())
        (folder / "device").write_text(f"0x{product}\n")
        (folder / "reset_method").write_text("flr\n")
        (folder / "reset").mkdir()  # it exists, and its content is unknown
        make_link(folder / "physfn", card)
        make_link(card / f"virtfn{number}", folder)
        make_link(root / "bus/pci/devices" / address, folder)
        if (card / "iommu_group").exists():
            self._add_group(folder)

    def _add_group(self, folder: Path) -> None:
        """Give a function an IOMMU group of its own."""
        groups = self._kernel.root / _GROUPS
        numbers = [int(name) for name in os.listdir(groups) if _NUMBER.fullmatch(name)]
        group = groups / str(max(numbers, default=-1) + 1)
        make_link(group / "devices" / folder.name, folder)
        make_link(folder / "iommu_group", group)


# What the manager shows after a fault. EBUSY is refused before the manager starts.
_STATES = {errno.EIO: "write error"}


class SimulatedControl:
    """Programming in the tree of a replayed host; takes the place of ``privileged.fpga``."""

    def __init__(self, kernel: SimulatedKernel) -> None:
        self._kernel = kernel

    def load_firmware(self, manager: str, image: str, path: str, size: int) -> None:
        """Raise DriverFailed: upstream Linux has no attribute ``firmware`` to follow."""
        raise _error(manager)

    def run_tool(self, tool: str, address: str, path: str, size: int, timeout: float) -> None:
        """Raise DriverFailed: the tools of vendors are not simulated."""
        raise _error(address)

    def reconfigure(self, fme: str, port: int, path: str, size: int, offset: int) -> None:
        """Let a port of a DFL card show the function of a GBS file. Raise DriverFailed."""
        kernel = self._kernel
        with kernel.lock, failures(f"port {port} of {fme} refused the image"):
            card, region = self._find_region(fme, port)
            afu_id = self._find_port(card, port) / "afu_id"
            assert region.manager  # each region of a DFL card has one
            state = kernel.root / MANAGERS / region.manager / "state"
            function = read_header(Path(path)).function_id
            if function is None:
                raise DriverFailed("the image does not state the function that the port would show")
            try:
                kernel.check_fault(card, Operation.PROGRAM)
            except OSError as exc:
                # EBUSY is that of a region in use (fpga_region_get), before the port is touched.
                if exc.errno in (errno.EIO, errno.ETIMEDOUT) and afu_id.is_file():
                    afu_id.unlink()
                    afu_id.mkdir()  # reads fail
                if exc.errno in _STATES:
                    state.write_text(f"{_STATES[exc.errno]}\n")
                raise
            state.write_text("operating\n")
            if afu_id.is_file():
                afu_id.write_text(f"{function}\n")

    def _find_region(self, fme: str, port: int) -> tuple[str, Region]:
        """Return the card and the region of a port. Raise DriverFailed."""
        sysfs = self._kernel.sysfs
        for card, found in read_regions(sysfs, sysfs.pci_functions()).items():
            for region in found.regions:
                if (region.fme, region.port) == (fme, port):
                    return card, region
        raise DriverFailed(f"there is no port {port} of {fme}")

    def _find_port(self, card: str, port: int) -> Path:
        """Return the folder of a port of a card: below it, or below a virtual function."""
        sysfs, root = self._kernel.sysfs, self._kernel.root
        functions = {card, *interfaces.virtual_functions(sysfs, card).values()}
        for folder in (root / REGIONS).glob("*/dfl-port.*"):
            path = folder.resolve()
            if functions & set(path.parts) and sysfs.read_int(path / "id") == port:
                return path
        raise DriverFailed(f"{card} has no port {port}")


def _error(name: str) -> DriverFailed:
    return DriverFailed(f"{name} cannot be programmed: only DFL cards are simulated")
