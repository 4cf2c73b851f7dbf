# SPDX-License-Identifier: Apache-2.0
"""Files of the kernel that privileged functions write or hold: attributes, VFIO groups, registers.

The caller must have validated the path of an attribute. sysfs expects the whole value in the first
write (``Documentation/filesystems/sysfs.rst`` of Linux).

Whether a process uses a device of VFIO is found out by opening its group.

A mark in a register that a reset clears shows whether a reset of a PCI function happened. The
kernel reports success for each method that returns, and restores the registers that it knows
(``pci_restore_state`` of ``drivers/pci/pci.c``). It does not restore the Message Data of MSI while
MSI is disabled (``__pci_restore_msi_state`` of ``drivers/pci/msi/msi.c``), and no driver uses that
register then. A reset sets it to its default ("PCI Express Base Specification", 6.6.2 and 7.7.1).
Functions without MSI, such as most virtual functions, cannot be checked in this way.

Offsets, all little-endian: capabilities begin at the byte in 0x34 if bit 4 of the Status register
(0x06) is set; each has its id and the address of the next one. MSI has id 5, Message Control at 2
(bit 0: enabled, bit 7: addresses have 64 bits), and Message Data at 8 or, with 64 bits, at 12.
``include/uapi/linux/pci_regs.h`` of Linux has these values.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cyborg.core.errors import DriverFailed


def write(path: Path, text: str) -> None:
    """Write an attribute with one system call; do not create a file. Raise OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


_GROUP = re.compile(r"[0-9]{1,9}")


def group_path(dev: Path, group: str | None) -> Path | None:
    """Return the device node of an IOMMU group; None if ``group`` is not the number of a group."""
    # ``vfio_devnode`` of ``drivers/vfio/group.c`` of Linux names it.
    if group is None or not _GROUP.fullmatch(group):
        return None
    return dev / "vfio" / group


@contextlib.contextmanager
def hold_group(dev: Path, function: str, group: str | None) -> Iterator[None]:
    """Keep the VFIO group of a function open, so that no process can begin to use the function.

    Raise DriverFailed if a process uses it, or if this cannot be determined.
    """
    if (path := group_path(dev, group)) is None:
        raise DriverFailed(f"{function} may still be used by a process: it has no IOMMU group")
    try:
        descriptor = open_group(path)
    except OSError as exc:
        raise DriverFailed(
            f"{function} may still be used by a process: {path} cannot be opened: {exc.strerror}"
        ) from exc
    try:
        yield
    finally:
        os.close(descriptor)


def open_group(path: Path) -> int:
    """Return a descriptor of a group; no process can begin to use its devices until it is closed.

    Raise OSError if a process has it, or one of its devices, open.
    """
    # The kernel permits one open descriptor of a group (``drivers/vfio/vfio_main.c`` of Linux 6.1),
    # and none while a device is open by its own node in ``/dev/vfio/devices``
    # (``drivers/vfio/group.c`` of later versions).
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


STATUS, CAPABILITIES = 0x06, 0x34
_HAS_CAPABILITIES = 0x10
_ADDRESS = 0xFC  # the two lowest bits of the address of a capability are reserved
_MSI = 0x05
_NEXT, _CONTROL = 1, 2  # offsets in a capability
_DATA_32, _DATA_64 = 8, 12
_ENABLED, _IS_64_BIT = 0x01, 0x80
_MAX_CAPABILITIES = 48  # in 192 bytes, each of four bytes at least
_SIZE = 256
MARK = 0xC0DE
# Methods that reset the configuration space too, by the names in ``pci_reset_fn_methods`` of
# ``drivers/pci/pci.c``. Those of one kind of device, and of ACPI, may leave it: their effect cannot
# be seen there.
CHECKED = frozenset({"flr", "af_flr", "pm", "bus", "cxl_bus"})
_HEADER = 64  # bytes; capabilities are behind it


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark in the configuration space of a function, at byte ``offset`` of ``config``."""

    config: Path
    offset: int

    def is_left(self) -> bool:
        """Return whether the register still has the mark."""
        return _read(self.config, self.offset, 2) == MARK.to_bytes(2, "little")


def find_message_data(config: bytes) -> int | None:
    """Return the offset of the Message Data of MSI; None without MSI, or while it is enabled."""
    if len(config) < _SIZE or not config[STATUS] & _HAS_CAPABILITIES:
        return None
    offset = config[CAPABILITIES] & _ADDRESS
    for _ in range(_MAX_CAPABILITIES):
        if offset < _HEADER:
            return None
        if config[offset] == _MSI:
            flags = config[offset + _CONTROL]
            data = offset + (_DATA_64 if flags & _IS_64_BIT else _DATA_32)
            return None if flags & _ENABLED or data + 2 > _SIZE else data
        offset = config[offset + _NEXT] & _ADDRESS
    return None


def set_mark(config: Path) -> Mark | None:
    """Set a mark in a function, by its file ``config`` in sysfs; None if that is not possible.

    Raise OSError if the file cannot be read or written.
    """
    if not config.exists():
        return None
    offset = find_message_data(_read(config, 0, _SIZE))
    if offset is None:
        return None
    mark = Mark(config, offset)
    _write(config, offset, MARK.to_bytes(2, "little"))
    # A register that does not keep the mark now would look like one that a reset has cleared.
    return mark if mark.is_left() else None


def answers(config: Path) -> bool:
    """Return whether a function answers on the bus; reads without an answer give ones."""
    # The whole header is read: the ids of a virtual function are ones too.
    return not config.exists() or _read(config, 0, _HEADER) != b"\xff" * _HEADER


def _read(path: Path, offset: int, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, size, offset)
    finally:
        os.close(descriptor)


def _write(path: Path, offset: int, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, content, offset)
    finally:
        os.close(descriptor)
