# SPDX-License-Identifier: Apache-2.0
"""What a driver may not report."""

import pytest

from cyborg.core.device import AttachHandle, Deployable, Device, DeviceType, HandleType
from cyborg.core.errors import Invalid
from cyborg.core.report import Report

HANDLE = AttachHandle("0", HandleType.TEST_PCI)


def card(*parts: Deployable, address: str = "a", vendor: str = "8086") -> Device:
    """Return a device of these parts."""
    return Device(address, DeviceType.GPU, vendor, "m", "gen0", deployables=parts)


def test_a_handle_stands_once() -> None:
    with pytest.raises(Invalid, match="handle address 0 twice"):
        Deployable("a", "PGPU", handles=(HANDLE, HANDLE))


def test_a_deployable_stands_once() -> None:
    with pytest.raises(Invalid, match="deployable address a twice"):
        card(Deployable("a", "PGPU"), Deployable("a", "VGPU"))


@pytest.mark.parametrize("parent", ["a", "elsewhere"])
def test_a_parent_is_another_part_of_the_device(parent: str) -> None:
    with pytest.raises(Invalid) as bad:
        card(Deployable("a", "PGPU", parent=parent))
    assert bad.value.details["field"] == "parent"


def test_parts_do_not_lie_in_each_other() -> None:
    ring = (Deployable("a", "PGPU", parent="b"), Deployable("b", "PGPU", parent="a"))
    with pytest.raises(Invalid, match="lies within itself") as bad:
        card(Deployable("c", "PGPU", parent="a"), *ring)
    assert bad.value.details["field"] == "parent"
    assert card(Deployable("c", "PGPU", parent="b"), Deployable("b", "PGPU")).deployables


@pytest.mark.parametrize("text", ["", "a\x00b", "x" * 256])
def test_text_is_bounded_and_printable(text: str) -> None:
    with pytest.raises(Invalid):
        card(vendor=text)
    with pytest.raises(Invalid):
        card(address=text)


def test_a_host_has_an_address_once() -> None:
    def report(*devices: Device) -> Report:
        return Report("h", "e", 1, "d", (), devices)

    with pytest.raises(Invalid, match="device a twice"):
        report(card(), card())
    with pytest.raises(Invalid, match="deployable p twice"):
        report(card(Deployable("p", "PGPU")), card(Deployable("p", "PGPU"), address="b"))
    assert report(card(Deployable("p", "PGPU"))).devices
