# SPDX-License-Identifier: Apache-2.0
"""In which ways a device can be divided, and which of them is the present one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.device import (
    AttachHandle,
    Deployable,
    Device,
    DeviceType,
    HandleType,
    Layout,
    offers,
)
from cyborg.core.errors import Invalid

CLASSES = ("CUSTOM_MIG_1G", "CUSTOM_MIG_3G", "PGPU")


def card(*parts: tuple[str, int]) -> Device:
    """Return a card whose deployables are of these classes, with so many handles."""
    made = tuple(
        Deployable(
            f"part-{place}",
            resource_class,
            handles=tuple(AttachHandle(f"{place}-{n}", HandleType.MDEV) for n in range(count)),
        )
        for place, (resource_class, count) in enumerate(parts)
    )
    return Device("0000:01:00.0", DeviceType.GPU, "10de", "card", "b0", deployables=made)


@given(st.lists(st.tuples(st.sampled_from(CLASSES), st.integers(0, 4)), max_size=5))
def test_a_device_has_the_layout_that_offers_what_it_offers(parts: list[tuple[str, int]]) -> None:
    device = card(*parts)
    there = offers(device)
    assert sum(there.values()) == sum(count for _, count in parts)
    assert Layout("present", there).fits(device)
    assert Layout("with none of another", {**there, "FPGA": 0}).fits(device)
    assert not Layout("more", {**there, "PGPU": there.get("PGPU", 0) + 1}).fits(device)


def test_deployables_of_one_class_count_together() -> None:
    device = card(("PGPU", 1), ("CUSTOM_MIG_1G", 2), ("CUSTOM_MIG_1G", 3))
    assert offers(device) == {"PGPU": 1, "CUSTOM_MIG_1G": 5}


@pytest.mark.parametrize(
    ("name", "given_", "words"),
    [
        ("", {}, "layout '' is not usable"),
        ("a\nb", {}, "not usable"),
        ("halves", {"": 2}, "resource class '' is not usable"),
        ("halves", {"PGPU": -1}, "layout halves offers -1 of PGPU; expected a whole number"),
        ("halves", {"PGPU": True}, "offers True of PGPU"),
        ("halves", {"PGPU": 2.0}, "offers 2.0 of PGPU"),
    ],
)
def test_what_is_no_layout(name: str, given_: dict[str, int], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        Layout(name, given_)
