# SPDX-License-Identifier: Apache-2.0
"""Recorded uevents: what they change in the tree, and when."""

import posixpath
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from cyborg.core.capture.model import Uevent
from cyborg.drivers.fpga.driver import FpgaDriver
from cyborg.drivers.nic.driver import NicDriver
from cyborg.drivers.nvme.driver import NvmeDriver
from cyborg.drivers.replay.host import RecordedUevents, ReplayedHost
from cyborg.testing import captures

DRIVE, OTHER = "0000:5e:00.0", "0000:d9:00.0"
PATH = f"/devices/pci0000:5d/0000:5d:01.0/{DRIVE}"


class Replay:
    """A host with drives, or FPGA cards, that replays uevents by a clock of the test."""

    def __init__(self, name: str, events: Sequence[Uevent]) -> None:
        self.now = 100.0
        self.host = ReplayedHost(replace(captures.load(name), uevents=tuple(events)))
        self.uevents = RecordedUevents(self.host.capture, self.host.kernel, lambda: self.now)

    def drives(self) -> list[str]:
        driver = self.host.create_driver(NvmeDriver, "nvme", captures.DRIVERS["nvme"])
        return [device.address for device in driver.discover() if device.deliverable]


@pytest.fixture
def replay() -> Iterator[Replay]:
    """Yield a host whose drive is removed after 1 s and added after 2 s."""
    events = [
        Uevent(2.5, "add", "pci", PATH),
        Uevent(2.0, "add", "pci", f"{PATH}/unknown"),
        Uevent(1.0, "remove", "nvme", f"{PATH}/nvme/nvme0"),
        Uevent(1.5, "remove", "pci", PATH),
        Uevent(3.0, "change", "pci", PATH),
    ]
    found = Replay("nvme", events)
    yield found
    found.host.close()


def test_device_is_removed_and_added_at_its_times(replay: Replay) -> None:
    source = replay.uevents.open({"pci"})
    before = set(replay.host.sysfs_root.rglob("*"))
    assert source.read(0.0) == []
    assert replay.drives() == [DRIVE, OTHER]
    replay.now += 1.5
    assert source.read(None) == ["pci"]
    assert replay.drives() == [OTHER]
    replay.now += 1
    assert source.read(None) == ["pci", "pci"]
    assert replay.drives() == [DRIVE, OTHER]
    assert set(replay.host.sysfs_root.rglob("*")) == before
    replay.now += 1
    assert replay.uevents.open({"pci", "nvme"}).read(0.0) == ["pci"], "each is replayed once"
    assert replay.uevents.seconds_left() is None


def test_read_waits_for_the_next_uevent(replay: Replay) -> None:
    assert replay.uevents.seconds_left() == 1.0
    replay.now += 5
    assert replay.uevents.seconds_left() == 0.0


def test_wake_ends_a_read_without_uevents() -> None:
    replay = Replay("nvme", [])
    try:
        source = replay.uevents.open({"pci"})
        found: list[list[str]] = []
        thread = threading.Thread(target=lambda: found.append(source.read(None)))
        thread.start()
        source.wake()
        thread.join(120)
        assert found == [[]]
    finally:
        replay.host.close()


def test_fpga_card_is_added_with_its_regions() -> None:
    path = "/devices/pci0000:3c/0000:3c:01.0/0000:3d:00.0"
    events = [Uevent(0.0, "remove", "pci", path), Uevent(1.0, "add", "pci", path)]
    replay = Replay("pac-d5005", events)
    try:
        driver = replay.host.create_driver(FpgaDriver, "fpga", captures.DRIVERS["fpga"])
        before = driver.discover()
        source = replay.uevents.open({"pci"})
        source.read(0.0)
        assert [device.address for device in driver.discover()] == ["0000:b1:00.0"]
        replay.now += 1
        source.read(0.0)
        assert driver.discover() == before
    finally:
        replay.host.close()


@pytest.mark.parametrize("path", ["/../proc", "/devices/../../proc", "/devices", "/", ""])
@pytest.mark.parametrize("action", ["remove", "add"])
def test_path_outside_of_the_devices_changes_nothing(path: str, action: str) -> None:
    replay = Replay("nvme", [Uevent(0.0, action, "pci", path)])
    try:
        folder = replay.host.sysfs_root.parent
        before = set(folder.rglob("*"))
        replay.uevents.replay_due()
        assert set(folder.rglob("*")) == before
    finally:
        replay.host.close()


def test_removed_virtual_function_is_counted() -> None:
    """Otherwise the card is neither offered as a whole, nor can it get the functions again."""
    card = "0000:c1:00.0"
    capture = captures.load("connectx-6")
    (folder,) = (f for f in capture.folders if f.endswith(f"/{card}"))
    names = sorted(n for n in capture.folders[folder].links if n.startswith("virtfn"))
    paths = [f"/{folder}/{capture.folders[folder].links[n]}" for n in names]
    events = [
        Uevent(time, action, "pci", posixpath.normpath(path).removeprefix("/sys"))
        for time, action in ((1.0, "remove"), (2.0, "add"))
        for path in paths
    ]
    replay = Replay("connectx-6", events)
    try:
        driver = replay.host.create_driver(NicDriver, "nic", captures.DRIVERS["nic"])
        numvfs = f"bus/pci/devices/{card}/sriov_numvfs"
        sysfs = replay.host.kernel.sysfs

        def count_handles() -> int:
            (device,) = (found for found in driver.discover() if found.address == card)
            return sum(len(part.handles) for part in device.deployables)

        before = sysfs.read_int(numvfs), count_handles()
        assert before == (len(paths), len(paths))
        replay.now += 1
        assert len(replay.uevents.replay_due()) == len(paths)
        assert sysfs.read_int(numvfs) == 0
        assert count_handles() <= 1
        replay.now += 1
        assert len(replay.uevents.replay_due()) == len(paths)
        assert (sysfs.read_int(numvfs), count_handles()) == before
    finally:
        replay.host.close()
