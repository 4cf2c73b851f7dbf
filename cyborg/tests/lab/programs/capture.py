# SPDX-License-Identifier: Apache-2.0
"""Capture the guest with cyborg-capture; print the capture and the devices that drivers find."""

import json
import subprocess
from pathlib import Path

from cyborg.cmd.capture import main as capture
from cyborg.drivers.crypto.driver import CryptoDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.tests.lab.programs.drive import load_driver

FILE = Path("/tmp/guest.jsonl.gz")
DRIVERS = (CryptoDriver, GenericDriver, NvmeDriver)
OPTIONS = {"devices": ["address=*"]}


def main() -> None:
    """Print the capture as hexadecimal digits, and the devices by driver."""
    drive = load_driver()
    subprocess.run(["modprobe", "-a", "virtio_crypto", "vfio-pci"], check=True)
    (drive / "sriov_drivers_autoprobe").write_text("0")
    (drive / "sriov_numvfs").write_text("2")
    found = {
        driver.name: [device.to_dict() for device in driver(driver.name, OPTIONS).discover()]
        for driver in DRIVERS
    }
    code = capture([str(FILE), "--source", "The lab guest: QEMU with NVMe, virtio-crypto and edu"])
    print("RESULT " + json.dumps([code, FILE.read_bytes().hex(), found]))  # noqa: T201


main()
