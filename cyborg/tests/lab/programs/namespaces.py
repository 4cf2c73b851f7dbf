# SPDX-License-Identifier: Apache-2.0
"""Prepare the virtual functions of an NVMe drive as an operator does with nvme-cli.

The arguments are the sysfs folder of the drive, and the namespace of each virtual function in their
order. The drive has no virtual functions yet, and all its namespaces. Each virtual function gets
queues, an interrupt and its namespace, is set online, and is bound to the kernel driver nvme.

The commands are those of the NVM Express Base Specification, revision 2.0: Identify (5.17),
Namespace Attachment (5.20) and Virtualization Management (5.29). Only the standard library is
imported: Python is slow in the guest.
"""

import ctypes
import fcntl
import os
import struct
import sys
from pathlib import Path

ADMIN_IOCTL = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD of <linux/nvme_ioctl.h>
IDENTIFY, ATTACHMENT, VIRTUALIZATION = 0x06, 0x15, 0x1C
SECONDARY_CONTROLLERS = 0x15
ATTACH, DETACH = 0, 1
QUEUES, INTERRUPTS = 0x000, 0x100
ASSIGN, ONLINE = 0x8, 0x9
LIST_BYTES = 4096


def send(
    drive: int, opcode: int, namespace: int, words: tuple[int, int], data: bytes = b""
) -> bytes:
    """Send an admin command with its dwords 10 and 11; return its data. Raise OSError."""
    buffer = ctypes.create_string_buffer(data, LIST_BYTES)
    transfer = (0, 0) if opcode == VIRTUALIZATION else (ctypes.addressof(buffer), LIST_BYTES)
    # struct nvme_passthru_cmd: the metadata is empty, the timeout is 10 s.
    command = struct.pack(
        "<BBHIIIQQII8I",
        *(opcode, 0, 0, namespace, 0, 0, 0, transfer[0], 0, transfer[1]),
        *(*words, 0, 0, 0, 0, 10_000, 0),
    )
    if status := fcntl.ioctl(drive, ADMIN_IOCTL, bytearray(command)):
        raise OSError(f"admin command {opcode:#x} failed with status {status:#x}")
    return buffer.raw


def list_controllers(*numbers: int) -> bytes:
    """Return a Controller List data structure."""
    return struct.pack(f"<{len(numbers) + 1}H", len(numbers), *numbers)


def find_secondary(drive: int) -> tuple[int, dict[int, int]]:
    """Return the id of the primary controller, and those of the others by virtual function."""
    data = send(drive, IDENTIFY, 0, (SECONDARY_CONTROLLERS, 0))
    entries = [struct.unpack_from("<HHB3xH", data, 32 * (n + 1)) for n in range(data[0])]
    return entries[0][1], {function: number for number, _, _, function in entries}


def main(folder: Path, namespaces: list[int]) -> None:
    """Create the virtual functions and bind them."""
    (name,) = (path.name for path in (folder / "nvme").glob("nvme*"))
    (folder / "sriov_drivers_autoprobe").write_text("0")
    (folder / "sriov_numvfs").write_text(str(len(namespaces)))
    drive = os.open(f"/dev/{name}", os.O_RDWR)
    primary, secondary = find_secondary(drive)
    for index, namespace in enumerate(namespaces):
        controller = secondary[index + 1]
        send(drive, VIRTUALIZATION, 0, (controller << 16 | QUEUES | ASSIGN, 2))
        send(drive, VIRTUALIZATION, 0, (controller << 16 | INTERRUPTS | ASSIGN, 1))
        send(drive, VIRTUALIZATION, 0, (controller << 16 | ONLINE, 0))
        send(drive, ATTACHMENT, namespace, (DETACH, 0), list_controllers(primary))
        send(drive, ATTACHMENT, namespace, (ATTACH, 0), list_controllers(controller))
        virtual = (folder / f"virtfn{index}").resolve()
        (virtual / "driver_override").write_text("nvme")
        Path("/sys/bus/pci/drivers_probe").write_text(virtual.name)


main(Path(sys.argv[1]), [int(text) for text in sys.argv[2:]])
