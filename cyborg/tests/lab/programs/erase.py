# SPDX-License-Identifier: Apache-2.0
"""Write to an NVMe drive as a tenant does, erase it with the nvme driver, and print what is left.

Four times: bound to the nvme kernel driver, bound to vfio-pci, bound to nothing, and while the host
uses the drive. Also print its resource class by capacity in the first three cases.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from cyborg.agent.state_file import MemoryFile
from cyborg.core.errors import DriverFailed
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.lab.programs.drive import DISK, count_secrets, write_pattern

BUS = Path("/sys/bus/pci")


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
    print("RESULT " + json.dumps([device.to_dict(), results, classes, drivers]))  # noqa: T201


main()
