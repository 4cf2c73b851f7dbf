# SPDX-License-Identifier: Apache-2.0
"""The generic driver on a real kernel's PCI bus: an NVMe drive whose VFs are made by the kernel."""

import json
import sys
import textwrap

import pytest

from cyborg.fixtures import guest

pytestmark = pytest.mark.lab

IN_GUEST = textwrap.dedent(
    """
    import glob, json, os, subprocess, time
    from cyborg.core import wire
    from cyborg.drivers.generic import GenericDriver

    driver = GenericDriver("gen0", {"devices": ["class=0108", "vendor=1234,product=11e8"]})

    def seen():
        return [wire.dump_device(d) for d in driver.discover()]

    subprocess.run(["modprobe", "nvme"], check=True)
    before = seen()
    drive = os.path.dirname(glob.glob("/sys/bus/pci/devices/*/sriov_totalvfs")[0])
    with open(drive + "/sriov_drivers_autoprobe", "w") as file:
        file.write("0")
    with open(drive + "/sriov_numvfs", "w") as file:
        file.write("2")
    print("RESULT " + json.dumps([before, seen()]))
    """
)


@pytest.fixture(scope="module")
def found() -> list:
    """What the driver saw in the guest before and after two VFs were made."""
    outcome = guest.run(
        [sys.executable, "-c", IN_GUEST],
        [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME, *guest.EDU],
    )
    assert outcome.code == 0, outcome.output
    line = next(x for x in outcome.output.splitlines() if x.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def test_a_plain_drive_is_one_handle(found: list) -> None:
    before = {d["address"]: d for d in found[0]}
    drives = [d for d in before.values() if d["type"] == "SSD"]
    assert len(drives) == 1
    (part,) = drives[0]["deployables"]
    assert [h["address"] for h in part["handles"]] == [drives[0]["address"]]
    assert any(d["vendor"] == "1234" for d in before.values())


def test_its_vfs_become_the_handles_of_one_provider(found: list) -> None:
    drives = [d for d in found[1] if d["type"] == "SSD"]
    assert len(drives) == 1, "the VFs are handles of their drive, not devices"
    (part,) = drives[0]["deployables"]
    addresses = [h["address"] for h in part["handles"]]
    assert len(addresses) == 2
    assert drives[0]["address"] not in addresses
    assert all(h["type"] == "PCI" for h in part["handles"])
