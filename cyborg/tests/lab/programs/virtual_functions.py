# SPDX-License-Identifier: Apache-2.0
"""Print the devices that the generic driver finds before and after two VFs are created.

Then the devices before the driver vfio-pci is loaded, with the kernel's own names of the groups,
and the results of resets and of their check.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from cyborg.core.errors import DriverFailed
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers import privileged
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.privileged import files, pci
from cyborg.tests.lab.programs.drive import load_driver


def discover(driver: GenericDriver) -> list[dict[str, Any]]:
    """Return the devices as a report carries them."""
    return [device.to_dict() for device in driver.discover()]


def groups() -> dict[str, list[str]]:
    """Return the functions of each IOMMU group, as the kernel lists them."""
    return {
        group.name: sorted(function.name for function in (group / "devices").iterdir())
        for group in Path("/sys/kernel/iommu_groups").iterdir()
    }


def try_reset(address: str, policy: str = "required") -> str:
    """Reset a function as after its use; return the error, or an empty text."""
    driver = GenericDriver("gen0", {"reset": policy})
    try:
        driver.sanitise(WorkItem("gen0", address, address, address))
    except DriverFailed as exc:
        return exc.message
    return ""


def reset_functions(drive: Path) -> dict[str, str]:
    """Return the results of resets of a virtual function in several states, and of others."""
    folder = (drive / "virtfn0").resolve()
    address, bus = folder.name, Path("/sys/bus/pci")
    found = {"no kernel driver": try_reset(address)}
    (folder / "driver_override").write_text("vfio-pci")
    (bus / "drivers_probe").write_text(address)
    found["driver"] = (folder / "driver").resolve().name
    found["vfio-pci"] = try_reset(address)
    group = os.open(f"/dev/vfio/{(folder / 'iommu_group').resolve().name}", os.O_RDWR)
    found["in use"] = try_reset(address)
    os.close(group)
    found["free again"] = try_reset(address)
    found["with virtual functions"] = try_reset(drive.name)
    edu = next(path.name for path in (bus / "devices").iterdir() if not (path / "reset").exists())
    found["no method"] = try_reset(edu)
    found["no method, if possible"] = try_reset(edu, "if_possible")
    return found


def check_resets(drive: Path) -> dict[str, Any]:
    """Return what the privileged reset says of a function with MSI, and without, and its mark."""
    functions = {path.name: path for path in Path("/sys/bus/pci/devices").iterdir()}
    edu = next(
        path
        for path in functions.values()
        if (path / "device").read_text() == "0x11e8\n" and (path / "reset").exists()
    )
    mark = files.set_mark(edu / "config")
    assert mark is not None
    privileged.call_in_process_as_root()
    return {
        "marked": mark.is_left(),
        "with MSI": pci.reset(edu.name),
        "left": mark.is_left(),
        "without MSI": pci.reset((drive / "virtfn0").resolve().name),
    }


def main() -> None:
    """Print the lists and the groups."""
    driver = GenericDriver("gen0", {"devices": ["class=0108", "vendor=1234,product=11e8"]})
    drive = load_driver()
    unloaded = discover(driver)
    subprocess.run(["modprobe", "vfio-pci"], check=True)
    before = discover(driver)
    (drive / "sriov_drivers_autoprobe").write_text("0")
    (drive / "sriov_numvfs").write_text("2")
    after, members = discover(driver), groups()
    resets, checked = reset_functions(drive), check_resets(drive)
    print("RESULT " + json.dumps([before, after, unloaded, members, resets, checked]))  # noqa: T201


main()
