# SPDX-License-Identifier: Apache-2.0
"""The grammar of device profile groups."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import profile
from cyborg.core.errors import Invalid
from cyborg.core.profile import MAX_GROUPS, MAX_KEYS, MAX_SLOTS, MAX_UNITS, Group
from cyborg.core.request import MAX_REQUESTS
from cyborg.fixtures import strategies


@given(strategies.groups())
def test_a_group_reads_what_it_writes(group: Group) -> None:
    assert profile.parse_group(group.to_dict(), "groups[0]") == group


@given(st.lists(strategies.groups(), min_size=1, max_size=4))
def test_one_slot_a_unit_in_group_order(groups: list[Group]) -> None:
    slots = profile.slots(groups)
    assert [s.group_id for s in slots] == sorted(s.group_id for s in slots)
    for number, group in enumerate(groups):
        mine = [s.resource_class for s in slots if s.group_id == number]
        assert {name: mine.count(name) for name in group.resources} == dict(group.resources)


def test_a_xilinx_fpga_is_two_slots() -> None:
    group = Group({"FPGA": 2}, frozenset({"CUSTOM_FPGA_XILINX"}))
    assert len(profile.slots([group])) == 4


@pytest.mark.parametrize(
    ("group", "field"),
    [
        ({"resources:FPGA": amount}, "groups[0]['resources:FPGA']")
        for amount in ("0", "-1", "1000000000", "x", "", "1.5", 0, -1, 10**9, True, None, 1.0, [])
    ]
    + [
        ({"resources:FPGA": "1", " resources:FPGA": "2"}, "groups[0][' resources:FPGA']"),
        ({"resources:FPGA": "1", "colour": "red"}, "groups[0]['colour']"),
        ({"resources:": "1"}, "groups[0]['resources:']"),
        ({"resources:fpga": "1"}, "groups[0]['resources:fpga']"),
        ({"resources:FPGA": "1", "trait:custom": "required"}, "groups[0]['trait:custom']"),
        ({"resources:FPGA": "1", "trait:CUSTOM_A": "maybe"}, "groups[0]['trait:CUSTOM_A']"),
        ({"resources:FPGA": "1", "trait:CUSTOM_A": []}, "groups[0]['trait:CUSTOM_A']"),
        ({"resources:FPGA": "1", "accel:": "x"}, "groups[0]['accel:']"),
        ({"resources:FPGA": "1", "accel:k": "x" * 256}, "groups[0]['accel:k']"),
        ({"resources:FPGA": "1", "accel:k": "a\nb"}, "groups[0]['accel:k']"),
        ({"resources:FPGA": "1", "accel:k": {}}, "groups[0]['accel:k']"),
        ({"trait:CUSTOM_A": "required"}, "groups[0]"),
        ({}, "groups[0]"),
        ([], "groups[0]"),
        ("resources:FPGA=1", "groups[0]"),
        ({f"accel:{i}": "x" for i in range(MAX_KEYS + 1)}, "groups[0]"),
    ],
)
def test_a_mistake_is_named(group: Any, field: str) -> None:
    with pytest.raises(Invalid) as bad:
        profile.parse_groups([group])
    assert bad.value.details["field"] == field
    assert field in bad.value.message


@pytest.mark.parametrize(
    "groups", [None, {}, "x", [], [{"resources:FPGA": "1"}] * (MAX_GROUPS + 1)]
)
def test_groups_are_a_list_of_some(groups: Any) -> None:
    with pytest.raises(Invalid) as bad:
        profile.parse_groups(groups)
    assert bad.value.details["field"] == "groups"


def test_a_profile_makes_no_more_requests_than_can_be_bound_at_once() -> None:
    whole = [{"resources:FPGA": str(MAX_UNITS)}] * (MAX_SLOTS // MAX_UNITS)
    assert len(profile.slots(profile.parse_groups(whole))) == MAX_SLOTS == MAX_REQUESTS
    for more in (
        [*whole, {"resources:FPGA": "1"}],
        [*whole[1:], {"resources:FPGA": "129", "trait:CUSTOM_FPGA_XILINX": "required"}],
    ):
        with pytest.raises(Invalid) as bad:
            profile.parse_groups(more)
        assert bad.value.details["field"] == "groups"


def test_the_largest_amount_is_allowed() -> None:
    (group,) = profile.parse_groups([{"resources:FPGA": str(MAX_UNITS)}])
    assert group.resources == {"FPGA": MAX_UNITS}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_no_input_is_a_surprise(value: Any) -> None:
    for body in (value, [value], [{"resources:FPGA": value}], [{str(value): "1"}]):
        try:
            profile.parse_groups(body)
        except Invalid as bad:
            assert bad.details["field"]


@pytest.mark.parametrize("name", ["", None, 7, "a" * 256, "a b", "a/b", "ä", "a\n"])
def test_what_is_no_name(name: Any) -> None:
    with pytest.raises(Invalid) as bad:
        profile.parse_name(name)
    assert bad.value.details["field"] == "name"


def test_what_is_a_name() -> None:
    assert profile.parse_name("a" * 255) == "a" * 255
    assert profile.parse_name("ctx-A_1") == "ctx-A_1"


def test_the_copies_of_groups_are_bounded() -> None:
    """Each request carries a copy: few units of a large group, or many of a small one."""
    large = {f"accel:{n:03}": "x" * 255 for n in range(60)}
    profile.parse_groups([{"resources:FPGA": "8", **large}])
    with pytest.raises(Invalid, match="too large") as bad:
        profile.parse_groups([{"resources:FPGA": "256", **large}])
    assert bad.value.details["field"] == "groups"
