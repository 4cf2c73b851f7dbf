# SPDX-License-Identifier: Apache-2.0
"""Run several programs for the NVMe drive one after the other, in one process of one guest.

The name of each program is printed before its output.
"""

import runpy
import subprocess
import sys
import traceback

from cyborg.drivers.host_use import open_nodes
from cyborg.tests.lab.programs.drive import load_driver

# Seconds. On a machine with high load a guest does not read all open files in the 5 s that a host
# has: the drive would count as used, and not be offered.
MAX_SECONDS = 120.0


def reset_drive() -> None:
    """Remove the virtual functions and the kernel drivers, as after a boot."""
    drive = load_driver()
    (drive / "sriov_numvfs").write_text("0")
    (drive / "sriov_drivers_autoprobe").write_text("1")
    subprocess.run(["modprobe", "-r", "nvme", "vfio-pci"], check=True)


def main() -> None:
    """Run the programs; one that fails does not prevent the others."""
    open_nodes.scan.__defaults__ = (open_nodes.PROC, MAX_SECONDS)
    for number, name in enumerate(sys.argv[1:]):
        print(f"PROGRAM {name}", flush=True)  # noqa: T201
        try:
            if number:
                reset_drive()
            runpy.run_module(f"{__package__}.{name}")
        except Exception:  # noqa: BLE001  (the test of this program shows it)
            traceback.print_exc()


main()
