# SPDX-License-Identifier: Apache-2.0
"""The fake driver: what existing clients and tests of the cloud expect to find."""

import pytest

from cyborg.core.device import DeviceType, HandleType
from cyborg.core.errors import DriverFailed, Misconfigured
from cyborg.drivers.base import Driver
from cyborg.drivers.fake import FakeDriver
from cyborg.drivers.generic import GenericDriver


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
    [("num_devices", -1), ("num_devices", 5000), ("num_handles", 257), ("address", "here")],
)
def test_what_cannot_be(option: str, value: object) -> None:
    with pytest.raises(Misconfigured, match=rf"^\[f1\] {option}: found .*; expected "):
        FakeDriver("f1", {option: value})


@pytest.mark.parametrize("driver", [FakeDriver, GenericDriver])
def test_what_every_driver_declares(driver: type[Driver]) -> None:
    assert driver.name
    assert driver.version
    assert all(option.help.endswith(".") for option in driver.OPTIONS)
    assert len({option.name for option in driver.OPTIONS}) == len(driver.OPTIONS)
