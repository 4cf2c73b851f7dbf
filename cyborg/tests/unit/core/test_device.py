# SPDX-License-Identifier: Apache-2.0
"""What a driver may not report."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.device import AttachHandle, Deployable, Device, DeviceType, HandleType
from cyborg.core.errors import Invalid
from cyborg.core.report import Report
from cyborg.core.text import clean

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


@given(st.text(), st.integers(1, 50))
def test_clean_text_can_be_shown_and_stays_clean(text: str, longest: int) -> None:
    plain = clean(text, longest)
    assert len(plain) <= longest
    assert plain.replace("\n", "").isprintable()
    assert clean(plain, longest) == plain
    plain.encode()


def test_labels_are_cleaned_and_what_decides_is_refused() -> None:
    device = Device("a", DeviceType.GPU, "8086", "m", "gen0", {"n\t": "v\x00"}, serial="S\x001")
    assert (device.std_board_info, device.serial) == ({"n": "v"}, "S 1")
    with pytest.raises(Invalid, match="attach handle info"):
        AttachHandle("0", HandleType.PCI, {"bus": "0\n"})
    with pytest.raises(Invalid, match="trait"):
        Deployable("a", "PGPU", traits=frozenset({"CUSTOM_\ud800"}))
    with pytest.raises(Invalid, match="NUMA"):
        Device("a", DeviceType.GPU, "8086", "m", "gen0", numa_node=-1)
