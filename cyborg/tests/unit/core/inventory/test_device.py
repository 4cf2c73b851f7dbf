# SPDX-License-Identifier: Apache-2.0
"""Validation of reported devices."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import (
    MAX_TEXT,
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
)
from cyborg.core.inventory.report import Report
from cyborg.core.text import sanitize

HANDLE = AttachHandle("0", HandleType.TEST_PCI)


def card(*deployables: Deployable, address: str = "a", vendor: str = "8086") -> Device:
    """Return a device with these deployables."""
    return Device(address, DeviceType.GPU, vendor, "m", "gen0", deployables=deployables)


def test_handle_of_type_vfio_says_that_the_agent_delivers_it() -> None:
    info = {"domain": "0000", "bus": "3d"}
    handle = AttachHandle("0", HandleType.VFIO, info)
    assert handle.info == {**info, "delivery": "agent"}
    assert AttachHandle.from_dict(handle.to_dict()) == handle
    assert AttachHandle("0", HandleType.PCI, info).info == info


def test_deployable_duplicate_handle_is_rejected() -> None:
    with pytest.raises(Invalid, match="duplicate handle address 0"):
        Deployable("a", "PGPU", handles=(HANDLE, HANDLE))


def test_device_duplicate_deployable_is_rejected() -> None:
    with pytest.raises(Invalid, match="duplicate deployable address a"):
        card(Deployable("a", "PGPU"), Deployable("a", "VGPU"))


@pytest.mark.parametrize("parent", ["a", "elsewhere"])
def test_device_invalid_parent_is_rejected(parent: str) -> None:
    with pytest.raises(Invalid) as exc:
        card(Deployable("a", "PGPU", parent=parent))
    assert exc.value.details["field"] == "parent"


def test_device_parent_cycle_is_rejected() -> None:
    ring = (Deployable("a", "PGPU", parent="b"), Deployable("b", "PGPU", parent="a"))
    with pytest.raises(Invalid, match="is its own ancestor") as exc:
        card(Deployable("c", "PGPU", parent="a"), *ring)
    assert exc.value.details["field"] == "parent"
    assert card(Deployable("c", "PGPU", parent="b"), Deployable("b", "PGPU")).deployables


@pytest.mark.parametrize("text", ["", "a\x00b", "x" * 256])
def test_device_invalid_text_is_rejected(text: str) -> None:
    with pytest.raises(Invalid):
        card(vendor=text)
    with pytest.raises(Invalid):
        card(address=text)


def test_report_duplicate_address_is_rejected() -> None:
    def report(*devices: Device) -> Report:
        return Report("h", "e", 1, "d", (), devices)

    with pytest.raises(Invalid, match="duplicate device a"):
        report(card(), card())
    with pytest.raises(Invalid, match="duplicate deployable p"):
        report(card(Deployable("p", "PGPU")), card(Deployable("p", "PGPU"), address="b"))
    assert report(card(Deployable("p", "PGPU"))).devices


@given(st.text(), st.integers(1, 50))
def test_sanitize_is_printable_and_idempotent(text: str, max_length: int) -> None:
    plain = sanitize(text, max_length)
    assert len(plain) <= max_length
    assert plain.replace("\n", "").isprintable()
    assert sanitize(plain, max_length) == plain
    plain.encode()


def test_device_sanitises_labels_and_rejects_identifiers() -> None:
    device = Device("a", DeviceType.GPU, "8086", "m", "gen0", {"n\t": "v\x00"}, serial="S\x001")
    assert (device.std_board_info, device.serial) == ({"n": "v"}, "S 1")
    with pytest.raises(Invalid, match="attach handle info"):
        AttachHandle("0", HandleType.PCI, {"bus": "0\n"})
    with pytest.raises(Invalid, match="trait"):
        Deployable("a", "PGPU", traits=frozenset({"CUSTOM_\ud800"}))
    with pytest.raises(Invalid, match="numa_node"):
        Device("a", DeviceType.GPU, "8086", "m", "gen0", numa_node=-1)


def test_device_undeliverable_has_a_printable_reason() -> None:
    def reason(deliverable: bool, text: str | None) -> str | None:
        device = replace(card(), deliverable=deliverable, undeliverable_reason=text)
        return device.undeliverable_reason

    assert reason(True, "no IOMMU") is None
    assert reason(False, "no\x00IOMMU\n") == "no IOMMU"
    assert reason(False, None) == reason(False, "\x00") == "its driver gives no reason"
    assert len(reason(False, "x" * 400) or "") <= MAX_TEXT


def test_device_topology_is_limited_and_sanitised() -> None:
    assert replace(card(), topology={"a\x00": "b\x00"}).topology == {"a": "b"}
    with pytest.raises(Invalid, match="topology has 257 entries"):
        replace(card(), topology={str(number): "" for number in range(257)})


def test_device_new_fields_are_sent_only_if_set() -> None:
    """The digest of a sender without these fields stays the same."""
    fields = {"deliverable", "undeliverable_reason", "topology"}
    assert fields.isdisjoint(card().to_dict())
    device = replace(card(), deliverable=False, undeliverable_reason="r", topology={"a": "b"})
    assert fields <= device.to_dict().keys()
    assert Device.from_dict(device.to_dict()) == device
