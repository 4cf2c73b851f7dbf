# SPDX-License-Identifier: Apache-2.0
"""Change the number of virtual functions of an NVMe drive as its layout; use a network card.

Print the results of each step by name: the device as a report carries it, and the error of a change
that is refused.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyborg.core.errors import DriverFailed
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.nic.driver import NicDriver
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.lab.programs.drive import load_driver

BUS = Path("/sys/bus/pci")
DISK = Path("/dev/nvme0n1")
RESULTS: dict[str, Any] = {}


def attempt(work: Callable[[], None]) -> str | None:
    """Return the error of work, None if it succeeds."""
    try:
        work()
    except DriverFailed as exc:
        return exc.message
    return None


def record_drive(step: str, driver: GenericDriver, drive: Path, layout: str) -> None:
    """Apply a layout to the drive; record the error, the device and its layouts."""
    error = attempt(lambda: driver.partition(WorkItem("g", drive.name, ""), layout))
    (device,) = driver.discover()
    layouts = driver.layouts(device)
    functions = [path.resolve() for path in sorted(drive.glob("virtfn*"))]
    RESULTS[step] = {
        "error": error,
        "numvfs": (drive / "sriov_numvfs").read_text().strip(),
        "drivers": [(path / "driver").resolve().name for path in functions],
        "handles": [h.address for part in device.deployables for h in part.handles],
        "layout": next((lay.name for lay in layouts if lay.matches(device)), None),
        "layouts": {layout.name: dict(layout.offers) for layout in layouts},
    }


def change_layouts(drive: Path) -> None:
    """Create and remove virtual functions, also while one is open and while the host uses swap."""
    driver = GenericDriver("g", {"devices": ["class=0108"], "vf_counts": ["0", "2", "4"]})
    record_drive("before", driver, drive, "vfs-0")
    record_drive("two", driver, drive, "vfs-2")
    record_drive("four", driver, drive, "vfs-4")
    virtual = (drive / "virtfn1").resolve()
    (virtual / "driver_override").write_text("vfio-pci")
    (BUS / "drivers_probe").write_text(virtual.name)
    group = Path("/dev/vfio") / (virtual / "iommu_group").resolve().name
    wait_until("the group is there", group.exists)
    descriptor = os.open(group, os.O_RDWR)  # as a server does
    record_drive("open", driver, drive, "vfs-0")
    os.close(descriptor)
    record_drive("closed", driver, drive, "vfs-0")
    wait_until("the disk is there", DISK.exists)
    subprocess.run(["busybox", "mkswap", DISK], check=True, capture_output=True)
    subprocess.run(["busybox", "swapon", DISK], check=True)
    record_drive("used", driver, drive, "vfs-2")


def use_network_card() -> None:
    """Discover the network card before, while and after the host uses it."""
    subprocess.run(["modprobe", "e1000e"], check=True)
    folder = next(BUS.glob("drivers/e1000e/0000:*/net"))
    (name,) = os.listdir(folder)
    driver = NicDriver(
        "n", {"devices": ["address=*"], "physical_networks": [f"physnet1:{name}", "net2:eth9"]}
    )

    def record(step: str) -> None:
        (device,) = driver.discover()
        health = driver.measure([device])[device.address]
        RESULTS[step] = {
            "device": device.to_dict(),
            "health": [health.health, health.reason],
            "remarks": list(driver.remarks),
        }

    record("nic unused")
    for command in ("addr add 192.0.2.1/24 dev", "link set up dev"):
        subprocess.run(["busybox", "ip", *command.split(), name], check=True)
    carrier = folder / name / "carrier"

    def has_link() -> bool:
        with contextlib.suppress(OSError):  # EINVAL while it is down
            return carrier.read_text().strip() == "1"
        return False

    wait_until("the link is up", has_link)
    record("nic used")
    (BUS / "drivers/e1000e/unbind").write_text(folder.parent.name)
    record("nic given away")


def main() -> None:
    """Print the results."""
    drive = load_driver()
    subprocess.run(["modprobe", "vfio-pci"], check=True)
    change_layouts(drive)
    use_network_card()
    print("RESULT " + json.dumps(RESULTS))  # noqa: T201


main()
