# SPDX-License-Identifier: Apache-2.0
"""Print the health of the drive: at first, after an Xid in the kernel log, without its driver."""

import json
from pathlib import Path

from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.pci.health import CHECKS
from cyborg.tests.lab.programs.drive import load_driver


def measure(driver: GenericDriver) -> dict[str, list[str | None]]:
    """Return the health of each device and its reason."""
    measurements = driver.measure(driver.discover())
    return {address: [str(m.health), m.reason] for address, m in measurements.items()}


def main() -> None:
    """Print the address of the drive and the three measurements."""
    options = {"devices": ["address=*,kernel_driver=nvme"], "health": [*CHECKS]}
    driver = GenericDriver("gen0", options)
    drive = load_driver()
    measurements = [measure(driver)]
    Path("/dev/kmsg").write_text(
        f"<3>NVRM: Xid (PCI:{drive.name[:-2]}): 79, GPU has fallen off the bus."
    )
    measurements.append(measure(driver))
    (drive / "driver" / "unbind").write_text(drive.name)
    measurements.append(measure(driver))
    print("RESULT " + json.dumps([drive.name, measurements]))  # noqa: T201


main()
