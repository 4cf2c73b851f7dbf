# SPDX-License-Identifier: Apache-2.0
"""Print the devices that the generic driver finds before and after two VFs are created."""

import json
from typing import Any

from cyborg.drivers.generic import GenericDriver
from cyborg.tests.lab.programs.drive import load_driver


def discover(driver: GenericDriver) -> list[dict[str, Any]]:
    """Return the devices as a report carries them."""
    return [device.to_dict() for device in driver.discover()]


def main() -> None:
    """Print both lists."""
    driver = GenericDriver("gen0", {"devices": ["class=0108", "vendor=1234,product=11e8"]})
    drive = load_driver()
    before = discover(driver)
    (drive / "sriov_drivers_autoprobe").write_text("0")
    (drive / "sriov_numvfs").write_text("2")
    print("RESULT " + json.dumps([before, discover(driver)]))  # noqa: T201


main()
