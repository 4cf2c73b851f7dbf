# SPDX-License-Identifier: Apache-2.0
"""Layouts of a device."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import Invalid
from cyborg.core.inventory.device import (
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
    Layout,
    count_handles,
)

CLASSES = ("CUSTOM_MIG_1G", "CUSTOM_MIG_3G", "PGPU")


def card(*counts_by_class: tuple[str, int]) -> Device:
    """Return a card of deployables given as (resource class, number of handles)."""
    deployables = tuple(
        Deployable(
            f"part-{place}",
            resource_class,
            handles=tuple(AttachHandle(f"{place}-{n}", HandleType.MDEV) for n in range(count)),
        )
        for place, (resource_class, count) in enumerate(counts_by_class)
    )
    return Device("0000:01:00.0", DeviceType.GPU, "10de", "card", "b0", deployables=deployables)


@given(st.lists(st.tuples(st.sampled_from(CLASSES), st.integers(0, 4)), max_size=5))
def test_layout_matches_device_with_equal_handle_counts(
    counts_by_class: list[tuple[str, int]],
) -> None:
    device = card(*counts_by_class)
    counts = count_handles(device)
    assert sum(counts.values()) == sum(count for _, count in counts_by_class)
    assert Layout("present", counts).matches(device)
    assert Layout("with none of another", {**counts, "FPGA": 0}).matches(device)
    assert not Layout("more", {**counts, "PGPU": counts.get("PGPU", 0) + 1}).matches(device)


def test_count_handles_adds_deployables_of_one_class() -> None:
    device = card(("PGPU", 1), ("CUSTOM_MIG_1G", 2), ("CUSTOM_MIG_1G", 3))
    assert count_handles(device) == {"PGPU": 1, "CUSTOM_MIG_1G": 5}


@pytest.mark.parametrize(
    ("name", "offered", "message"),
    [
        ("", {}, "layout: invalid value ''"),
        ("a\nb", {}, "layout: invalid value"),
        ("halves", {"": 2}, "resource class: invalid value ''"),
        ("halves", {"PGPU": -1}, "layout halves, handles of PGPU: invalid value '-1'"),
        ("halves", {"PGPU": True}, "handles of PGPU: invalid value 'True'"),
        ("halves", {"PGPU": 2.0}, "handles of PGPU: invalid value '2.0'"),
    ],
)
def test_layout_malformed_is_rejected(name: str, offered: dict[str, int], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Layout(name, offered)


def test_layout_with_traits_matches_device_with_these_traits() -> None:
    device = card(("PGPU", 1))
    (deployable,) = device.deployables
    other = replace(device, deployables=(replace(deployable, traits=frozenset({"CUSTOM_A"})),))
    layout = Layout("a", {"PGPU": 1}, frozenset({"CUSTOM_A"}))
    assert layout.matches(other)
    assert not layout.matches(device)
    assert Layout("any", {"PGPU": 1}).matches(other)
    with pytest.raises(Invalid):
        Layout("b", {}, frozenset({""}))
