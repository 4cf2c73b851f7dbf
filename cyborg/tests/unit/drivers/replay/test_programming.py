# SPDX-License-Identifier: Apache-2.0
"""Programming of the FPGA cards of a replayed host, with and without faults."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cyborg.core.capture.model import parse_fault
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import Deployable, Health
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.fpga.driver import FpgaDriver
from cyborg.drivers.replay.host import ReplayedHost
from cyborg.drivers.replay.kernel import SimulatedControl
from cyborg.testing import captures
from cyborg.tests.fixtures.hosts.directory_images import DirectoryImages
from cyborg.tests.fixtures.hosts.gbs import make_gbs

CARD, OTHER = "0000:3d:00.0", "0000:b1:00.0"  # the other one has a virtual function
INTERFACE, FACTORY = "9346116da52d5ca8b06aa9a389ef7c8d", "f7df405cbd7acf7222f144b0b93acd18"
FIRST, SECOND = "d8424dc4a4a3c413f89e433683f9040b", "331db30c988541ea9081f88b8f655caa"


class Replay:
    """A replayed host with FPGA cards, its driver and two images."""

    def __init__(self, folder: Path) -> None:
        self.host = ReplayedHost(captures.load("pac-d5005"))
        self.images = DirectoryImages(folder / "images")
        self.driver = self.make_driver()
        self.first, self.second = (self.add_image(function) for function in (FIRST, SECOND))

    def make_driver(self, **options: object) -> FpgaDriver:
        made = self.host.create_driver(FpgaDriver, "fpga", {**captures.DRIVERS["fpga"], **options})
        assert isinstance(made, FpgaDriver)
        made.images = self.images
        return made

    def add_image(self, function: str) -> str:
        content = make_gbs(INTERFACE, function)
        return self.images.add(
            str(uuid.uuid4()), content, region_id=INTERFACE, function_id=function
        )

    def part(self, card: str) -> Deployable:
        (found,) = [d for d in self.driver.discover() if d.address == card]
        return found.deployables[0]

    def prepare(self, card: str, image: str) -> None:
        handle = self.part(card).handles[0].address
        item = WorkItem("fpga", card, card, handle)
        self.driver.prepare(replace(item, accel={"bitstream_id": image}), "server")

    def shown(self, card: str) -> tuple[str | None, str | None]:
        part = self.part(card)
        return part.attributes.get("function_id"), part.bitstream_id


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[Replay]:
    found = Replay(tmp_path)
    yield found
    found.host.close()


@pytest.mark.parametrize("card", [CARD, OTHER])
def test_image_changes_the_function_of_its_card_alone(replay: Replay, card: str) -> None:
    assert replay.shown(card) == (FACTORY, None)
    replay.prepare(card, replay.first)
    replay.prepare(card, replay.second)
    assert replay.shown(card) == (SECOND, replay.second)
    assert replay.shown(OTHER if card == CARD else CARD) == (FACTORY, None)
    assert replay.images.opened == [replay.first, replay.second]


def test_card_in_use_keeps_its_function(replay: Replay) -> None:
    replay.prepare(CARD, replay.first)
    replay.host.kernel.add_fault(parse_fault(f"{CARD}:ebusy=1@program"))
    with pytest.raises(DriverFailed, match="busy; the region is unchanged"):
        replay.prepare(CARD, replay.second)
    assert replay.shown(CARD) == (FIRST, replay.first)
    replay.prepare(CARD, replay.second)
    assert replay.shown(CARD) == (SECOND, replay.second)


@pytest.mark.parametrize(
    ("fault", "message"), [("eio", "Input/output error"), ("stuck_reset", "Connection timed out")]
)
def test_port_stays_in_reset_after_a_failure(replay: Replay, fault: str, message: str) -> None:
    replay.prepare(OTHER, replay.first)
    replay.host.kernel.add_fault(parse_fault(f"{OTHER}:{fault}=1@program"))
    with pytest.raises(DriverFailed, match=f"{message}.*could not be restored: port 0 of"):
        replay.prepare(OTHER, replay.second)
    assert replay.shown(OTHER) == (None, None)
    with pytest.raises(DriverFailed, match="is in reset, as after a failed reconfiguration"):
        replay.prepare(OTHER, replay.second)
    measured = replay.driver.measure(replay.driver.discover())
    assert measured[OTHER].health is Health.UNHEALTHY
    assert measured[CARD].health is Health.OK
    replay.prepare(CARD, replay.first)
    assert replay.shown(CARD) == (FIRST, replay.first)


def test_restoration_fails_with_its_reason(replay: Replay) -> None:
    replay.prepare(OTHER, replay.first)
    replay.host.kernel.add_fault(parse_fault(f"{OTHER}:eio"))
    with pytest.raises(DriverFailed, match=r"could not be restored: port 0 of .* Input/output"):
        replay.prepare(OTHER, replay.second)
    assert replay.images.opened == [replay.first, replay.second, replay.first]


@pytest.mark.parametrize("card", [CARD, OTHER])
def test_card_that_disappears_leaves_nothing(replay: Replay, card: str) -> None:
    replay.host.kernel.add_fault(parse_fault(f"{card}:disappears@program"))
    with pytest.raises(DriverFailed, match="No such device"):
        replay.prepare(card, replay.first)
    (left,) = [device.address for device in replay.driver.discover()]
    assert left == (OTHER if card == CARD else CARD)
    for place in ("class/fpga_region", "class/fpga_manager", "bus/platform/devices"):
        assert all(path.exists() for path in (replay.host.sysfs_root / place).iterdir())
    replay.prepare(left, replay.first)


@pytest.mark.parametrize("programmer", ["firmware", "fpgasupdate"])
def test_other_ways_to_program_are_refused(replay: Replay, programmer: str) -> None:
    replay.driver = replay.make_driver(programmer=programmer)
    with pytest.raises(DriverFailed, match=r"no attribute firmware|only DFL cards are simulated"):
        replay.prepare(CARD, replay.first)
    assert replay.shown(CARD) == (FACTORY, None)


def test_reconfiguration_needs_a_port_and_a_function(replay: Replay, tmp_path: Path) -> None:
    control = SimulatedControl(replay.host.kernel)
    file = tmp_path / "image"
    file.write_bytes(make_gbs(INTERFACE, "no id"))
    with pytest.raises(DriverFailed, match=r"there is no port 1 of dfl-fme\.0"):
        control.reconfigure("dfl-fme.0", 1, str(file), 1, 0)
    with pytest.raises(DriverFailed, match="does not state the function"):
        control.reconfigure("dfl-fme.0", 0, str(file), 1, 0)
