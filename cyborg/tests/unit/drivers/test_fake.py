# SPDX-License-Identifier: Apache-2.0
"""The fake driver: what existing clients and tests of the cloud expect to find."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cyborg.core.device import Ability, DeviceType, HandleType, Health
from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.health import WELL, Measurement
from cyborg.core.job import Item
from cyborg.drivers.base import Driver, Prepares, Programs
from cyborg.drivers.fake import FakeDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.fixtures.drivers import LONG


def test_one_card_of_sixteen_handles() -> None:
    (device,) = FakeDriver("fake", {}).discover()
    (part,) = device.deployables
    assert (device.address, device.vendor, device.model) == (
        "0000:0c:00.0",
        "0xABCD",
        "miss model info",
    )
    assert (device.type, device.backend) == (DeviceType.FPGA, "fake")
    assert (part.resource_class, part.traits) == ("FPGA", {"CUSTOM_FAKE_DEVICE"})
    assert len(part.handles) == 16
    assert {h.type for h in part.handles} == {HandleType.TEST_PCI}
    assert part.handles[9].info == {
        "domain": "0000",
        "bus": "0c",
        "device": "01",
        "function": "1",
    }


def test_many_cards_share_no_address() -> None:
    devices = FakeDriver("fake", {"num_devices": 600, "num_handles": 256}).discover()
    assert len({d.address for d in devices}) == 600
    assert len({h.address for d in devices for p in d.deployables for h in p.handles}) == 600 * 256
    assert devices[-1].address == "0002:63:00.0"


def test_the_same_again() -> None:
    driver = FakeDriver("fake", {"num_devices": 2})
    assert driver.discover() == driver.discover()


def test_told_to_fail() -> None:
    with pytest.raises(DriverFailed, match="out of smoke"):
        FakeDriver("fake", {"fail": "out of smoke"}).discover()


def test_told_to_take_its_time() -> None:
    assert len(FakeDriver("fake", {"hang": 0.001}).discover()) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_devices", -1),
        ("num_devices", 5000),
        ("num_handles", 257),
        ("address", "here"),
        ("prepare", "slow"),
        ("prepare_seconds", -0.5),
        ("releasing", "none"),
        ("program", ""),
        ("setup", "slow"),
        ("adopt", ["here"]),
        ("release", ["0000:0c:00"]),
    ],
)
def test_what_cannot_be(option: str, value: object) -> None:
    with pytest.raises(Misconfigured, match=rf"^\[f1\] {option}: found .*; expected "):
        FakeDriver("f1", {option: value})


CARD, HANDLE = "0000:0c:00.0", "0000:0c:00.3"
ITEM = Item("fake", CARD, CARD, HANDLE)
ACTS: dict[str, Callable[[FakeDriver], None]] = {
    "prepare": lambda driver: driver.prepare(ITEM, "i1"),
    "release": lambda driver: driver.release(ITEM),
    "program": lambda driver: driver.program(ITEM, "image-1"),
}
OPTION = {"release": "releasing"}


def test_it_prepares_only_if_configured() -> None:
    assert FakeDriver("fake", {}).abilities == {Ability.PROGRAMS}
    for mode in ("ok", "fail", "hang"):
        driver = FakeDriver("fake", {"prepare": mode})
        assert driver.abilities == {Ability.PREPARES, Ability.PROGRAMS}
    assert isinstance(driver, Prepares)
    assert isinstance(driver, Programs)


def test_what_it_did_is_in_its_journal(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    driver = FakeDriver("fake", {"prepare": "ok", "journal": str(journal)})
    for act in ACTS.values():
        act(driver)
        act(driver)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    of = {"deployable": CARD, "handle": HANDLE}
    assert lines[::2] == lines[1::2]
    assert lines[::2] == [
        {"act": "prepare", **of, "instance": "i1"},
        {"act": "release", **of},
        {"act": "program", **of, "image": "image-1"},
    ]


@pytest.mark.parametrize("act", sorted(ACTS))
def test_an_act_that_is_told_to_fail(act: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    driver = FakeDriver("fake", {OPTION.get(act, act): "fail", "journal": str(journal)})
    with pytest.raises(DriverFailed, match=f"told to fail: {act} of {HANDLE}"):
        ACTS[act](driver)
    assert json.loads(journal.read_text())["act"] == act


@pytest.mark.parametrize("act", sorted(ACTS))
def test_an_act_that_hangs_until_the_gate_is_there(act: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    driver = FakeDriver("fake", {OPTION.get(act, act): "hang", "gate": str(gate)})
    thread = threading.Thread(target=ACTS[act], args=(driver,), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    gate.touch()
    thread.join(LONG)
    assert not thread.is_alive()


def test_preparing_takes_its_time() -> None:
    driver = FakeDriver("fake", {"prepare": "ok", "prepare_seconds": 0.1})
    began = time.monotonic()
    driver.prepare(ITEM, None)
    assert time.monotonic() - began >= 0.1


def test_an_image_is_seen_on_its_card_alone() -> None:
    driver = FakeDriver("fake", {"num_devices": 2})
    driver.program(ITEM, "image-1")
    first, second = driver.discover()
    assert first.deployables[0].bitstream_id == "image-1"
    assert second.deployables[0].bitstream_id is None


def test_what_is_not_there_is_only_released() -> None:
    driver = FakeDriver("fake", {"prepare": "ok"})
    driver.release(replace(ITEM, deployable="0000:ff:00.0"))
    driver.release(replace(ITEM, handle="0000:ff:00.0"))
    with pytest.raises(DriverFailed, match=r"no handle 0000:ff:00\.0"):
        driver.prepare(replace(ITEM, handle="0000:ff:00.0"), None)
    for act in (lambda item: driver.prepare(item, None), lambda item: driver.program(item, "i")):
        with pytest.raises(DriverFailed, match=r"no card 0000:ff:00\.0"):
            act(replace(ITEM, deployable="0000:ff:00.0"))


@pytest.mark.parametrize("driver", [FakeDriver, GenericDriver])
def test_what_every_driver_declares(driver: type[Driver]) -> None:
    assert driver.name
    assert driver.version
    assert all(option.help.endswith(".") for option in driver.OPTIONS)
    assert len({option.name for option in driver.OPTIONS}) == len(driver.OPTIONS)


def test_cards_are_sick_and_well_as_a_file_says(tmp_path: Path) -> None:
    assert Ability.MEASURES not in FakeDriver("fake", {}).abilities
    file = tmp_path / "sick"
    driver = FakeDriver("fake", {"num_devices": 2, "sick": str(file)})
    assert driver.abilities == {Ability.PROGRAMS, Ability.MEASURES}
    devices = driver.discover()
    first, second = (device.address for device in devices)
    assert driver.measure(devices) == {first: WELL, second: WELL}
    file.write_text(f"{second} it smokes\n\n0000:ff:00.0\n")
    smokes = Measurement(Health.UNHEALTHY, "it smokes")
    assert driver.measure(devices) == {first: WELL, second: smokes}
    file.write_text(f"*\n{second} it smokes\n")
    assert driver.measure(devices) == {first: Measurement(Health.UNHEALTHY), second: smokes}


def test_cards_come_and_go(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    driver = FakeDriver("fake", {"num_devices": 2, "absent": str(absent)})
    here = [device.address for device in driver.discover()]
    assert here == ["0000:0c:00.0", "0000:0d:00.0"]
    absent.write_text("0000:0c:00.0\n")
    assert [device.address for device in driver.discover()] == ["0000:0d:00.0"]
    absent.unlink()
    assert [device.address for device in driver.discover()] == here


def test_cards_that_an_operator_adopts_and_releases() -> None:
    options = {"num_devices": 2, "adopt": ["20:00.0", "0000:0c:00.0"], "release": ["0000:0D:00.0"]}
    driver = FakeDriver("fake", options)
    assert [card.address for card in driver.discover()] == ["0000:0c:00.0", "0000:20:00.0"]
    with pytest.raises(Misconfigured, match=r"release: found '0000:20:00\.0'; expected no"):
        FakeDriver("fake", {"adopt": ["20:00.0"], "release": ["0000:20:00.0"]})


def test_a_setup(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    FakeDriver("fake", {"journal": str(journal)}).setup()
    assert not journal.exists()
    FakeDriver("fake", {"setup": "ok", "journal": str(journal)}).setup()
    assert json.loads(journal.read_text()) == {"act": "setup"}
    with pytest.raises(DriverFailed, match="told to fail: setup of the host"):
        FakeDriver("fake", {"setup": "fail"}).setup()
