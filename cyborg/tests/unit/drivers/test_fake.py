# SPDX-License-Identifier: Apache-2.0
"""The fake driver: its devices, options and simulated work."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.core.inventory.device import Ability, DeviceType, HandleType, Health
from cyborg.core.inventory.device_state import HEALTHY, Measurement
from cyborg.core.jobs.job import WorkItem
from cyborg.drivers.base import Driver, PrepareInterface, ProgramInterface
from cyborg.drivers.fake import FakeDriver
from cyborg.drivers.generic import GenericDriver
from cyborg.tests.fixtures.hosts.scripted_driver import LONG


def test_discover_defaults_return_one_card_with_sixteen_handles() -> None:
    (device,) = FakeDriver("fake", {}).discover()
    (deployable,) = device.deployables
    assert (device.address, device.vendor, device.model) == (
        "0000:0c:00.0",
        "0xABCD",
        "miss model info",
    )
    assert (device.type, device.backend) == (DeviceType.FPGA, "fake")
    assert (deployable.resource_class, deployable.traits) == (
        "FPGA",
        frozenset({"CUSTOM_FAKE_DEVICE"}),
    )
    assert len(deployable.handles) == 16
    assert {h.type for h in deployable.handles} == {HandleType.TEST_PCI}
    assert deployable.handles[9].info == {
        "domain": "0000",
        "bus": "0c",
        "device": "01",
        "function": "1",
    }


@pytest.mark.slow
def test_discover_many_cards_have_unique_addresses() -> None:
    for cards, handles, last in ((600, 9, "0002:63:00.0"), (20, 256, "0000:1f:00.0")):
        devices = FakeDriver("fake", {"num_devices": cards, "num_handles": handles}).discover()
        assert len({d.address for d in devices}) == cards
        found = {h.address for d in devices for p in d.deployables for h in p.handles}
        assert len(found) == cards * handles
        assert devices[-1].address == last


def test_discover_repeated_returns_equal_cards() -> None:
    driver = FakeDriver("fake", {"num_devices": 2})
    assert driver.discover() == driver.discover()


def test_discover_configured_to_fail_raises() -> None:
    with pytest.raises(DriverFailed, match="out of smoke"):
        FakeDriver("fake", {"fail": "out of smoke"}).discover()


def test_discover_configured_delay_is_applied() -> None:
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
def test_invalid_options_are_rejected(option: str, value: object) -> None:
    with pytest.raises(Misconfigured, match=rf"^\[f1\] {option}: found .*; expected "):
        FakeDriver("f1", {option: value})


CARD, HANDLE = "0000:0c:00.0", "0000:0c:00.3"
ITEM = WorkItem("fake", CARD, CARD, HANDLE)
WORK: dict[str, Callable[[FakeDriver], None]] = {
    "prepare": lambda driver: driver.prepare(ITEM, "i1"),
    "release": lambda driver: driver.release(ITEM),
    "program": lambda driver: driver.program(ITEM, "image-1"),
}
OPTION_NAMES = {"release": "releasing"}


def test_abilities_prepares_only_if_configured() -> None:
    assert FakeDriver("fake", {}).abilities == {Ability.PROGRAMS}
    for mode in ("ok", "fail", "hang"):
        driver = FakeDriver("fake", {"prepare": mode})
        assert driver.abilities == {Ability.PREPARES, Ability.PROGRAMS}
    assert isinstance(driver, PrepareInterface)
    assert isinstance(driver, ProgramInterface)


def test_journal_records_all_work(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    driver = FakeDriver("fake", {"prepare": "ok", "journal": str(journal)})
    for act in WORK.values():
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


@pytest.mark.parametrize("act", sorted(WORK))
def test_work_configured_to_fail_raises(act: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    driver = FakeDriver("fake", {OPTION_NAMES.get(act, act): "fail", "journal": str(journal)})
    with pytest.raises(DriverFailed, match=f"configured to fail: {act} of {HANDLE}"):
        WORK[act](driver)
    assert json.loads(journal.read_text())["act"] == act


@pytest.mark.parametrize("act", sorted(WORK))
def test_work_that_hangs_ends_when_gate_exists(act: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    driver = FakeDriver("fake", {OPTION_NAMES.get(act, act): "hang", "gate": str(gate)})
    thread = threading.Thread(target=WORK[act], args=(driver,), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    gate.touch()
    thread.join(LONG)
    assert not thread.is_alive()


def test_prepare_configured_delay_is_applied() -> None:
    driver = FakeDriver("fake", {"prepare": "ok", "prepare_seconds": 0.1})
    started_at = time.monotonic()
    driver.prepare(ITEM, None)
    assert time.monotonic() - started_at >= 0.1


def test_program_sets_image_of_one_card() -> None:
    driver = FakeDriver("fake", {"num_devices": 2})
    driver.program(ITEM, "image-1")
    first, second = driver.discover()
    assert first.deployables[0].bitstream_id == "image-1"
    assert second.deployables[0].bitstream_id is None


def test_work_on_missing_handle_only_release_succeeds() -> None:
    driver = FakeDriver("fake", {"prepare": "ok"})
    driver.release(replace(ITEM, deployable="0000:ff:00.0"))
    driver.release(replace(ITEM, handle="0000:ff:00.0"))
    with pytest.raises(DriverFailed, match=r"no handle 0000:ff:00\.0"):
        driver.prepare(replace(ITEM, handle="0000:ff:00.0"), None)
    acts: tuple[Callable[[WorkItem], Any], ...] = (
        lambda item: driver.prepare(item, None),
        lambda item: driver.program(item, "i"),
    )
    for act in acts:
        with pytest.raises(DriverFailed, match=r"no card 0000:ff:00\.0"):
            act(replace(ITEM, deployable="0000:ff:00.0"))


@pytest.mark.parametrize("driver", [FakeDriver, GenericDriver])
def test_fake_driver_metadata(driver: type[Driver]) -> None:
    assert driver.name
    assert driver.version
    assert all(option.help.endswith(".") for option in driver.OPTIONS)
    assert len({option.name for option in driver.OPTIONS}) == len(driver.OPTIONS)


def test_measure_returns_health_from_file(tmp_path: Path) -> None:
    assert Ability.MEASURES not in FakeDriver("fake", {}).abilities
    file = tmp_path / "sick"
    driver = FakeDriver("fake", {"num_devices": 2, "sick": str(file)})
    assert driver.abilities == {Ability.PROGRAMS, Ability.MEASURES}
    devices = driver.discover()
    first, second = (device.address for device in devices)
    assert driver.measure(devices) == {first: HEALTHY, second: HEALTHY}
    file.write_text(f"{second} it smokes\n\n0000:ff:00.0\n")
    smokes = Measurement(Health.UNHEALTHY, "it smokes")
    assert driver.measure(devices) == {first: HEALTHY, second: smokes}
    file.write_text(f"*\n{second} it smokes\n")
    assert driver.measure(devices) == {first: Measurement(Health.UNHEALTHY), second: smokes}


def test_discover_omits_absent_cards(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    driver = FakeDriver("fake", {"num_devices": 2, "absent": str(absent)})
    addresses = [device.address for device in driver.discover()]
    assert addresses == ["0000:0c:00.0", "0000:0d:00.0"]
    absent.write_text("0000:0c:00.0\n")
    assert [device.address for device in driver.discover()] == ["0000:0d:00.0"]
    absent.unlink()
    assert [device.address for device in driver.discover()] == addresses


def test_adopted_cards_appear_and_released_cards_disappear() -> None:
    options = {"num_devices": 2, "adopt": ["20:00.0", "0000:0c:00.0"], "release": ["0000:0D:00.0"]}
    driver = FakeDriver("fake", options)
    assert [card.address for card in driver.discover()] == ["0000:0c:00.0", "0000:20:00.0"]
    with pytest.raises(Misconfigured, match=r"release: found '0000:20:00\.0'; expected no"):
        FakeDriver("fake", {"adopt": ["20:00.0"], "release": ["0000:20:00.0"]})


def test_setup_result_follows_option(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    FakeDriver("fake", {"journal": str(journal)}).setup()
    assert not journal.exists()
    FakeDriver("fake", {"setup": "ok", "journal": str(journal)}).setup()
    assert json.loads(journal.read_text()) == {"act": "setup"}
    with pytest.raises(DriverFailed, match="configured to fail: setup of the host"):
        FakeDriver("fake", {"setup": "fail"}).setup()
