# SPDX-License-Identifier: Apache-2.0
"""Write to an NVMe drive as a tenant does, erase it with the nvme driver, and print what is left.

Four times: bound to the nvme kernel driver, bound to vfio-pci, bound to nothing, and while the host
uses the drive. Also print its resource class by capacity in the first three cases, and why it is
not offered, with its partitions, before and after the erasure of a partition table. Last, erase it
with rules that permit other methods and the method of QEMU's controller.
"""

import fcntl
import json
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

from cyborg.agent.state_file import MemoryFile
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.tests.fixtures.machine.processes import wait_until

DISK = Path("/dev/nvme0n1")
PATTERN = b"secret of a tenant! " * 4096
OFFSETS = (0, 8 << 20, (16 << 20) - len(PATTERN))
BUS = Path("/sys/bus/pci")


def write_pattern() -> None:
    """Write the data of a tenant."""
    wait_until("the disk is there", DISK.exists)
    with open(DISK, "r+b") as disk:
        for offset in OFFSETS:
            disk.seek(offset)
            disk.write(PATTERN)
        os.fsync(disk)
    Path("/proc/sys/vm/drop_caches").write_text("3")


def count_secrets() -> int:
    """Return how often the data of the tenant can be found."""
    Path("/proc/sys/vm/drop_caches").write_text("3")
    return DISK.read_bytes().count(b"secret of a tenant!")


def bind_to_nvme(address: str) -> None:
    """Let the kernel show the disk again."""
    folder = BUS / "devices" / address
    if (folder / "driver").exists() and (folder / "driver").resolve().name != "nvme":
        (folder / "driver/unbind").write_text(address)
    (folder / "driver_override").write_text("nvme")
    (BUS / "drivers_probe").write_text(address)
    (folder / "driver_override").write_text("\n")
    wait_until("the disk is there", DISK.exists)


def find_class() -> str:
    """Return the resource class that an agent reports that has just started."""
    driver = NvmeDriver("nvme0", {"devices": ["class=0108"], "class_by_capacity": True})
    driver.memory = MemoryFile(Path("/tmp/memory.json")).of("nvme0")
    (device,) = driver.discover()
    return device.deployables[0].resource_class


def write_partition_table() -> None:
    """Create a partition of 1 MiB, as a tenant or the host does."""
    entry = bytes.fromhex("00 00 00 00 83 00 00 00") + (2048).to_bytes(4, "little") * 2
    with open(DISK, "r+b") as disk:
        disk.write(bytes(446) + entry + bytes(48) + b"\x55\xaa")
        disk.flush()
        os.fsync(disk)
        fcntl.ioctl(disk, 0x125F)  # BLKRRPART


def describe() -> list[Any]:
    """Return why the drive is not offered, and the partitions that the kernel shows."""
    driver = NvmeDriver("nvme0", {"devices": ["class=0108"]})
    (device,) = driver.discover()
    return [
        device.vendor_board_info.get(NOT_OFFERED),
        sorted(map(str, DISK.parent.glob("nvme0n1p*"))),
    ]


def erase_by_rule(policy: str) -> list[Any]:
    """Erase the drive with a rule; return the reason not to schedule it, the error, the log, data.

    The data are how often those of a tenant can be found.
    """
    write_pattern()
    driver = NvmeDriver("nvme0", {"devices": [f"class=0108,erase={policy}"], "check_iommu": False})
    (device,) = driver.discover()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("cyborg.drivers.nvme.driver")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        driver.sanitise(WorkItem("nvme0", device.address, device.address, device.address))
        error = ""
    except DriverFailed as exc:
        error = exc.message
    finally:
        logger.removeHandler(handler)
    return [device.undeliverable_reason, error, lines, count_secrets()]


def main() -> None:
    """Print the results."""
    subprocess.run(["modprobe", "-a", "nvme", "vfio-pci"], check=True)
    wait_until("the disk is there", DISK.exists)
    driver = NvmeDriver("nvme0", {"devices": ["class=0108"]})
    (device,) = driver.discover()
    item = WorkItem("nvme0", device.address, device.address, device.address)
    folder = BUS / "devices" / device.address
    results: list[list[Any]] = []
    classes: list[str] = []
    drivers: list[str] = []
    for kernel_driver in ("nvme", "vfio-pci", ""):
        write_pattern()
        written = count_secrets()
        if kernel_driver != "nvme":
            (folder / "driver/unbind").write_text(device.address)
        if kernel_driver == "vfio-pci":
            (folder / "driver_override").write_text(kernel_driver)
            (BUS / "drivers_probe").write_text(device.address)
            assert (folder / "driver").resolve().name == kernel_driver
        classes.append(find_class())
        driver.sanitise(item)
        link = folder / "driver"
        drivers.append(link.resolve().name if link.exists() else "")
        bind_to_nvme(device.address)
        results.append([written, count_secrets()])
    write_pattern()
    with open(os.open(DISK, os.O_RDWR | os.O_EXCL), "rb"):  # as a mount does
        try:
            driver.sanitise(item)
            error = ""
        except DriverFailed as exc:
            error = exc.message
    results.append([error, count_secrets()])
    write_partition_table()
    tables = [describe()]
    driver.sanitise(item)
    tables.append(describe())
    policies = {name: erase_by_rule(name) for name in ("purge", "block|crypto", "block|clear")}
    result = [device.to_dict(), results, classes, tables, drivers, policies]
    print("RESULT " + json.dumps(result))  # noqa: T201


main()
