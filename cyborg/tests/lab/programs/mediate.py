# SPDX-License-Identifier: Apache-2.0
"""Create and remove mediated devices of the kernel's sample driver mtty, and print what exists.

The argument is the path of the module. The module is removed and inserted again as a boot would do.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cyborg.core.errors import DriverFailed
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.lab.programs import MTTY_FOREIGN

DEVICES = Path("/sys/bus/mdev/devices")
TYPES = Path("/sys/class/mdev_bus/mtty/mdev_supported_types")


def make_driver() -> GpuDriver:
    """Return a driver as after a start of the agent."""
    driver = GpuDriver("gpu0", {"mdev_types": ["parent=mtty,type=mtty-2"]})
    driver.host = "labguest"
    return driver


def item(slot: str) -> WorkItem:
    """Return the work item of a slot."""
    return WorkItem("gpu0", "mtty", "mtty", f"mtty/{slot}")


def state(driver: GpuDriver) -> dict[str, Any]:
    """Return the existing devices with their types, and the numbers of the offered slots."""
    handles = [h.address for d in driver.discover() for p in d.deployables for h in p.handles]
    return {
        "devices": {
            path.name: (path / "mdev_type").resolve().name for path in sorted(DEVICES.iterdir())
        },
        "available": {
            path.name: int((path / "available_instances").read_text())
            for path in sorted(TYPES.iterdir())
        }
        if TYPES.exists()
        else {},
        "slots": [int(handle.rpartition("/")[2]) for handle in handles],
        "remarks": list(driver.remarks),
    }


def error_of(act: Callable[[], None]) -> str:
    """Return the error of a call, empty if it succeeds."""
    try:
        act()
    except DriverFailed as exc:
        return exc.message
    return ""


@contextlib.contextmanager
def used(device: str) -> Iterator[None]:
    """Use a device as a hypervisor does: by its VFIO group."""
    group = (DEVICES / device / "iommu_group").resolve().name
    wait_until("the group has a node", Path("/dev/vfio", group).exists)
    with open(os.open(f"/dev/vfio/{group}", os.O_RDWR), "rb", buffering=0):
        yield


def main() -> None:
    """Print the results."""
    subprocess.run(["modprobe", "-a", "mdev", "vfio"], check=True)
    subprocess.run(["insmod", sys.argv[1]], check=True)
    driver, results = make_driver(), dict[str, Any]()
    results["report"] = [device.to_dict() for device in driver.discover()]
    results["empty"] = state(driver)
    for _ in range(2):
        driver.prepare(item("mtty-2/3"), "instance")
        results["prepared"] = state(driver)
    (TYPES / "mtty-1/create").write_text(MTTY_FOREIGN)
    results["foreign"] = state(driver)
    (device,) = set(results["prepared"]["devices"])
    with used(device):
        results["used"] = error_of(lambda: driver.release(item("mtty-2/3")))
    results["missing type"] = error_of(lambda: driver.prepare(item("mtty-9/0"), None))
    for number in range(13):
        results["exhausted"] = error_of(partial(driver.prepare, item(f"mtty-2/{number}"), None))
    results["full"] = state(driver)
    subprocess.run(["rmmod", "mtty"], check=True)
    driver.release(item("mtty-2/5"))
    results["unloaded"] = state(driver)
    subprocess.run(["insmod", sys.argv[1]], check=True)
    driver = make_driver()
    results["booted"] = state(driver)
    driver.prepare(item("mtty-2/3"), "instance")
    results["restored"] = state(driver)
    for _ in range(2):
        driver.release(item("mtty-2/3"))
    results["released"] = state(driver)
    print("RESULT " + json.dumps(results))  # noqa: T201


main()
