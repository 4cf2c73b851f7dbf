# SPDX-License-Identifier: Apache-2.0
"""The NVMe drive with SR-IOV in the guest."""

import subprocess
from pathlib import Path


def load_driver() -> Path:
    """Load the kernel's NVMe driver and return the sysfs folder of the drive."""
    subprocess.run(["modprobe", "nvme"], check=True)
    (total,) = Path("/sys/bus/pci/devices").glob("*/sriov_totalvfs")
    return total.parent
