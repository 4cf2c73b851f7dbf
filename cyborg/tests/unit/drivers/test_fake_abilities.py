# SPDX-License-Identifier: Apache-2.0
"""What else the fake driver can do if it is so configured: wipe handles, divide cards."""

import json
from pathlib import Path

import pytest

from cyborg.core.device import Ability, offers
from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.job import Item
from cyborg.drivers.base import Partitions, Sanitises
from cyborg.drivers.fake import FakeDriver

CARD, OTHER = "0000:0c:00.0", "0000:0d:00.0"
HANDLE = Item("fake", CARD, CARD, "0000:0c:00.3")


def whole(card: str) -> Item:
    return Item("fake", card, "")


def test_it_wipes_only_if_configured(tmp_path: Path) -> None:
    assert Ability.SANITISES not in FakeDriver("fake", {}).abilities
    journal = tmp_path / "journal"
    driver = FakeDriver("fake", {"sanitise": "ok", "journal": str(journal)})
    assert driver.abilities == {Ability.PROGRAMS, Ability.SANITISES}
    assert isinstance(driver, Sanitises)
    driver.sanitise(HANDLE)
    driver.sanitise(HANDLE)
    acts = [json.loads(line) for line in journal.read_text().splitlines()]
    assert acts == [{"act": "sanitise", "deployable": CARD, "handle": HANDLE.handle}] * 2


def test_wiping_that_is_told_to_fail() -> None:
    with pytest.raises(DriverFailed, match=f"told to fail: sanitise of {HANDLE.handle}"):
        FakeDriver("fake", {"sanitise": "fail"}).sanitise(HANDLE)
    with pytest.raises(Misconfigured, match="sanitise: found 'maybe'; expected one of none, ok"):
        FakeDriver("fake", {"sanitise": "maybe"})


def test_a_card_is_divided_and_stays_so(tmp_path: Path) -> None:
    told = {"num_devices": 2, "num_handles": 6, "divided": str(tmp_path / "divided")}
    driver = FakeDriver("fake", told)
    assert Ability.PARTITIONS in driver.abilities
    assert isinstance(driver, Partitions)
    card, other = driver.discover()
    assert [one.name for one in driver.layouts(card)] == ["1", "3", "6"]
    assert [one.name for one in driver.layouts(card) if one.fits(card)] == ["6"]
    driver.partition(whole(CARD), "3")
    driver.partition(whole(OTHER), "1")
    driver.partition(whole(CARD), "1")
    driver.partition(whole(CARD), "3")
    for again in (driver, FakeDriver("fake", told)):
        assert [offers(one)["FPGA"] for one in again.discover()] == [3, 1]
    driver.partition(whole(CARD), "6")
    driver.partition(whole(OTHER), "6")
    assert list(driver.discover()) == [card, other]


@pytest.mark.parametrize(
    ("card", "layout"), [(CARD, "2"), (CARD, "7"), (CARD, "half"), (OTHER, "1")]
)
def test_a_layout_that_there_is_not(tmp_path: Path, card: str, layout: str) -> None:
    driver = FakeDriver("fake", {"num_handles": 6, "divided": str(tmp_path / "divided")})
    before = driver.discover()
    with pytest.raises(DriverFailed, match=f"card {card} cannot be divided into {layout}"):
        driver.partition(whole(card), layout)
    assert driver.discover() == before


def test_without_a_file_nothing_is_divided() -> None:
    assert Ability.PARTITIONS not in FakeDriver("fake", {}).abilities
