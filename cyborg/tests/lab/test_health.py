# SPDX-License-Identifier: Apache-2.0
"""The generic driver's measurements on a real kernel: devices that are well are found well."""

import json
import sys
import textwrap
from typing import Any

import pytest

from cyborg.fixtures import guest

pytestmark = pytest.mark.lab

IN_GUEST = textwrap.dedent(
    """
    import glob, json, os, subprocess
    from cyborg.drivers.generic import GenericDriver
    from cyborg.drivers.health import CHECKS

    options = {"devices": ["address=*,kernel_driver=nvme"], "health": [*CHECKS]}
    driver = GenericDriver("gen0", options)

    def measured():
        found = driver.measure(driver.discover())
        return {address: [str(m.health), m.reason] for address, m in found.items()}

    subprocess.run(["modprobe", "nvme"], check=True)
    drive = os.path.dirname(glob.glob("/sys/bus/pci/devices/*/sriov_totalvfs")[0])
    address = os.path.basename(drive)
    told = [measured()]
    with open("/dev/kmsg", "w") as log:
        log.write(f"<3>NVRM: Xid (PCI:{address[:-2]}): 79, GPU has fallen off the bus.")
    told.append(measured())
    with open(f"{drive}/driver/unbind", "w") as file:
        file.write(address)
    told.append(measured())
    print("RESULT " + json.dumps([address, told]))
    """
)


@pytest.fixture(scope="module")
def found() -> tuple[str, list[dict[str, Any]]]:
    """What the driver measured: at first, after a program wrote an Xid, without kernel driver."""
    outcome = guest.run(
        [sys.executable, "-c", IN_GUEST],
        [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME, *guest.EDU],
    )
    assert outcome.code == 0, outcome.output
    line = next(x for x in outcome.output.splitlines() if x.startswith("RESULT "))
    address, told = json.loads(line.removeprefix("RESULT "))
    return address, told


def test_a_drive_that_works_is_well(found: tuple[str, list[dict[str, Any]]]) -> None:
    address, (first, _, _) = found
    assert first[address][0] == "ok"


def test_integrated_functions_have_no_link_that_could_be_down(
    found: tuple[str, list[dict[str, Any]]],
) -> None:
    _, (first, _, _) = found
    reasons = {reason.partition(" has ")[2] for _, reason in first.values() if reason}
    assert reasons == {
        "no kernel driver, expected nvme",
        "the kernel driver virtio-pci, expected nvme",
    }


def test_a_program_that_writes_an_xid_is_not_believed(
    found: tuple[str, list[dict[str, Any]]],
) -> None:
    address, (_, second, _) = found
    assert second[address][0] == "ok"


def test_a_drive_that_lost_its_kernel_driver_is_sick(
    found: tuple[str, list[dict[str, Any]]],
) -> None:
    address, (_, _, third) = found
    assert third[address] == ["unhealthy", f"{address} has no kernel driver, expected nvme"]
