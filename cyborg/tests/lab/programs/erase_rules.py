# SPDX-License-Identifier: Apache-2.0
"""Erase an NVMe drive with the nvme driver by rules of its options, and print what is left.

First print why it is not offered, with its partitions, before and after the erasure of a partition
table. Then erase it with rules that permit other methods and the method of QEMU's controller.
"""

import fcntl
import json
import logging
import os
import subprocess
from typing import Any

from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import NOT_OFFERED
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.lab.programs.drive import DISK, count_secrets, write_pattern


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
    subprocess.run(["modprobe", "nvme"], check=True)
    wait_until("the disk is there", DISK.exists)
    driver = NvmeDriver("nvme0", {"devices": ["class=0108"]})
    (device,) = driver.discover()
    write_pattern()
    write_partition_table()
    tables = [describe()]
    driver.sanitise(WorkItem("nvme0", device.address, device.address, device.address))
    tables.append(describe())
    policies = {name: erase_by_rule(name) for name in ("purge", "block|crypto", "block|clear")}
    print("RESULT " + json.dumps([tables, policies]))  # noqa: T201


main()
