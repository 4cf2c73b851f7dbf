# SPDX-License-Identifier: Apache-2.0
"""Uses of a drive, a network card and a device by the host, on a real kernel.

Each is refused with its reason, and offered again when it ends.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from cyborg.tests.fixtures.hosts import disk_contents
from cyborg.tests.fixtures.machine import guest

pytestmark = [pytest.mark.lab, pytest.mark.matrix]

ERASE = "erase it, for example with wipefs, or adopt the device"
CARD = ("-netdev", "user,id=card0", "-device", "e1000e,netdev=card0,romfile=")
REASONS: Mapping[str, str | None] = {
    "nothing on the drive": None,
    **{kind: f"nvme0n1 holds {kind}; {ERASE}" for kind in disk_contents.CONTENTS},
    "a file system (ext4)": f"nvme0n1 holds a file system (ext4); {ERASE}",
    "data (swap)": f"nvme0n1 holds data (swap); {ERASE}",
    "active swap": "nvme0n1 holds swap",
    "a raw disk of another process": "the process python has /dev/nvme0n1 open",
    "up without address": None,
    "an address": "eth0 has an address of the host",
    "a default route": "eth0 has the default route",
    "a route of a policy table": "eth0 has the default route in table 100",
    "the second hop of a route": "eth0 has a route",
    "a VRF": "eth0 is an active port of upper0",
    "a bridge": "eth0 is an active port of upper0",
    "a macvlan with an address": "eth0 is below upper0, which has an address of the host",
    "another namespace": "it is bound to e1000e and has no network interface here: a container or "
    "a vDPA device may have it",
    "nothing has the device": None,
    "a VFIO group": "the process python has /dev/vfio/N open",
    "uio_pci_generic": "it is bound to uio_pci_generic, for a driver in user space",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str | None]]:
    """Return the reason during each use, and after it."""
    disk: Path = tmp_path_factory.mktemp("disk") / "disk.raw"
    with open(disk, "wb") as file:
        file.truncate(disk_contents.SIZE)
    devices = [*guest.IOMMU, *guest.ROOT_PORT, *guest.NVME, *guest.EDU, *CARD]
    devices += ["-drive", f"file={disk},format=raw,if=none,id=disk0"]
    devices += ["-device", "nvme-ns,drive=disk0,bus=nvme0"]
    found: Mapping[str, list[str | None]] = guest.run_program("uses", devices)
    return found


@pytest.mark.parametrize("use", REASONS)
def test_use_is_refused_until_it_ends(results: Mapping[str, list[str | None]], use: str) -> None:
    assert results[use] == [REASONS[use], None]


def test_each_use_is_tried(results: Mapping[str, list[str | None]]) -> None:
    assert set(results) == set(REASONS)
