# SPDX-License-Identifier: Apache-2.0
"""Optional abilities of the fake driver: wiping handles and partitioning cards."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.inventory.device import Ability, count_handles
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import CheckProperties, Image, PartitionInterface, SanitiseInterface
from cyborg.drivers.fake import FakeDriver

CARD, SECOND_CARD = "0000:0c:00.0", "0000:0d:00.0"
HANDLE = WorkItem("fake", CARD, CARD, "0000:0c:00.3")


def device_item(card: str) -> WorkItem:
    return WorkItem("fake", card, "")


def test_abilities_sanitises_only_if_configured(tmp_path: Path) -> None:
    assert Ability.SANITISES not in FakeDriver("fake", {}).abilities
    journal = tmp_path / "journal"
    driver = FakeDriver("fake", {"sanitise": "ok", "journal": str(journal)})
    assert driver.abilities == {Ability.PROGRAMS, Ability.SANITISES}
    assert isinstance(driver, SanitiseInterface)
    driver.sanitise(HANDLE)
    driver.sanitise(HANDLE)
    acts = [json.loads(line) for line in journal.read_text().splitlines()]
    assert acts == [{"act": "sanitise", "deployable": CARD, "handle": HANDLE.handle}] * 2


def test_sanitise_configured_to_fail_raises() -> None:
    with pytest.raises(DriverFailed, match=f"configured to fail: sanitise of {HANDLE.handle}"):
        FakeDriver("fake", {"sanitise": "fail"}).sanitise(HANDLE)
    with pytest.raises(Misconfigured, match="sanitise: found 'maybe'; expected one of none, ok"):
        FakeDriver("fake", {"sanitise": "maybe"})


def test_partition_layout_is_discovered_and_persistent(tmp_path: Path) -> None:
    options = {"num_devices": 2, "num_handles": 6, "divided": str(tmp_path / "divided")}
    driver = FakeDriver("fake", options)
    assert Ability.PARTITIONS in driver.abilities
    assert isinstance(driver, PartitionInterface)
    card, second = driver.discover()
    assert [layout.name for layout in driver.layouts(card)] == ["1", "3", "6"]
    assert [layout.name for layout in driver.layouts(card) if layout.matches(card)] == ["6"]
    driver.partition(device_item(CARD), "3")
    driver.partition(device_item(SECOND_CARD), "1")
    driver.partition(device_item(CARD), "1")
    driver.partition(device_item(CARD), "3")
    for observer in (driver, FakeDriver("fake", options)):
        assert [count_handles(device)["FPGA"] for device in observer.discover()] == [3, 1]
    driver.partition(device_item(CARD), "6")
    driver.partition(device_item(SECOND_CARD), "6")
    assert list(driver.discover()) == [card, second]


@pytest.mark.parametrize(
    ("card", "layout"), [(CARD, "2"), (CARD, "7"), (CARD, "half"), (SECOND_CARD, "1")]
)
def test_partition_unknown_layout_raises(tmp_path: Path, card: str, layout: str) -> None:
    driver = FakeDriver("fake", {"num_handles": 6, "divided": str(tmp_path / "divided")})
    devices = driver.discover()
    with pytest.raises(DriverFailed, match=f"card {card} cannot be divided into {layout}"):
        driver.partition(device_item(card), layout)
    assert driver.discover() == devices


def test_abilities_partitions_only_if_configured() -> None:
    assert Ability.PARTITIONS not in FakeDriver("fake", {}).abilities


class Images:
    """Store with one image."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "image"
        self.path.write_bytes(b"data")
        self.searches: list[Mapping[str, str]] = []

    @contextmanager
    def open(self, uuid: str, check: CheckProperties = lambda properties: None) -> Iterator[Image]:
        check({})
        yield Image(uuid, self.path, 4, {})

    def find(self, properties: Mapping[str, str]) -> str:
        self.searches.append(properties)
        return "found"


def test_images_are_fetched_if_configured(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    options = {"prepare": "ok", "fetch_images": True, "journal": str(journal)}
    driver = FakeDriver("fake", options)
    images = driver.images = Images(tmp_path)
    driver.program(replace(HANDLE, handle=""), "image-1")
    driver.prepare(HANDLE, None)
    driver.prepare(replace(HANDLE, accel={"bitstream_id": "image-2", "function_id": "F"}), None)
    driver.prepare(replace(HANDLE, accel={"function_id": "F"}), None)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    fetched = [line for line in lines if line["act"] == "fetch"]
    assert [line["image"] for line in fetched] == ["image-1", "image-2", "found"]
    assert {line["sha256"] for line in fetched} == {hashlib.sha256(b"data").hexdigest()}
    assert images.searches == [{"accel:function_id": "F"}]
    (card,) = driver.discover()
    assert card.deployables[0].bitstream_id == "image-1"


def test_images_without_image_service_are_refused() -> None:
    driver = FakeDriver("fake", {"prepare": "ok", "fetch_images": True})
    with pytest.raises(DriverFailed, match=r"image-1 cannot be fetched: .*\[glance\]"):
        driver.program(replace(HANDLE, handle=""), "image-1")
    (card,) = driver.discover()
    assert card.deployables[0].bitstream_id is None


def test_images_are_not_fetched_by_default(tmp_path: Path) -> None:
    driver = FakeDriver("fake", {"prepare": "ok"})
    driver.program(replace(HANDLE, handle=""), "image-1")
    driver.prepare(replace(HANDLE, accel={"bitstream_id": "image-2"}), None)
    (card,) = driver.discover()
    assert card.deployables[0].bitstream_id == "image-1"
