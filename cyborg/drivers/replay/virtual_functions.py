# SPDX-License-Identifier: Apache-2.0
"""Simulated creation and removal of the virtual functions of a replayed host.

It follows ``sriov_numvfs_store``, ``sriov_enable`` and ``pci_iov_add_virtfn`` of
``drivers/pci/iov.c`` of Linux. New virtual functions have no kernel driver, also with
``sriov_drivers_autoprobe``: what a kernel driver would show is not simulated.
"""

import errno
import os
import re
from pathlib import Path

from cyborg.core.capture.model import Operation
from cyborg.drivers.nic import interfaces
from cyborg.drivers.pci import sriov
from cyborg.drivers.replay.kernel import SimulatedKernel, make_link

_COPIED = ("class", "numa_node", "revision", "subsystem_device", "subsystem_vendor", "vendor")
_GROUPS = Path("kernel/iommu_groups")
_NUMBER = re.compile(r"[0-9]{1,9}")


class SimulatedSriov:
    """Virtual functions in the tree of a replayed host."""

    def __init__(self, kernel: SimulatedKernel) -> None:
        self._kernel = kernel

    def set_count(self, address: str, count: int, autoprobe: bool, allow_network: bool) -> None:
        """Set the number of virtual functions of a physical function, as a ``sriov.SetCount``."""
        # Its checks and its order of writes, on the attributes of the tree.
        from cyborg.drivers.privileged import sriov as privileged

        kernel = self._kernel
        with kernel.lock:
            dev = kernel.root.parent / "dev"
            self._make_group_nodes(dev / "vfio")
            host = privileged.Host(kernel.root, dev, self._write)
            privileged.change(host, address, count, autoprobe, allow_network)

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
