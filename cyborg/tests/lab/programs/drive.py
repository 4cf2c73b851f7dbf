# SPDX-License-Identifier: Apache-2.0
"""The NVMe drive with SR-IOV in the guest, and the data of a tenant on it."""

import os
import subprocess
from pathlib import Path

from cyborg.tests.fixtures.machine.processes import wait_until

DISK = Path("/dev/nvme0n1")
SIZE = 16 << 20  # bytes
PATTERN = b"secret of a tenant! " * 4096
OFFSETS = (0, 8 << 20, SIZE - len(PATTERN))


def load_driver() -> Path:
    """Load the kernel's NVMe driver and return the sysfs folder of the drive."""
    subprocess.run(["modprobe", "nvme"], check=True)
    (total,) = Path("/sys/bus/pci/devices").glob("*/sriov_totalvfs")
    return total.parent


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
