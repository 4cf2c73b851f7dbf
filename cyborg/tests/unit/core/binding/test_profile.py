# SPDX-License-Identifier: Apache-2.0
"""Parsing of device profiles."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.binding import profile
from cyborg.core.binding.arqs import MAX_ARQS
from cyborg.core.binding.profile import MAX_GROUPS, MAX_KEYS, MAX_SLOTS, MAX_UNITS, Group
from cyborg.core.errors import Invalid
from cyborg.tests.fixtures.hosts import strategies


@given(strategies.groups())
def test_group_round_trip(group: Group) -> None:
    assert profile.parse_group(group.to_dict(), "groups[0]") == group


@given(st.lists(strategies.groups(), min_size=1, max_size=4))
def test_expand_slots_one_per_unit_in_group_order(groups: list[Group]) -> None:
    slots = profile.expand_slots(groups)
    assert [s.group_id for s in slots] == sorted(s.group_id for s in slots)
    for number, group in enumerate(groups):
        group_classes = [s.resource_class for s in slots if s.group_id == number]
        assert {name: group_classes.count(name) for name in group.resources} == dict(
            group.resources
        )


def test_expand_slots_xilinx_fpga_has_two() -> None:
    group = Group({"FPGA": 2}, frozenset({"CUSTOM_FPGA_XILINX"}))
    assert len(profile.expand_slots([group])) == 4


AMOUNTS: tuple[Any, ...] = (
    *("0", "-1", "1000000000", "x", "", "1.5", 0, -1, 10**9, True, None, 1.0, []),
)


@pytest.mark.parametrize(
    ("group", "field"),
    [({"resources:FPGA": amount}, "groups[0]['resources:FPGA']") for amount in AMOUNTS]
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
def test_parse_group_malformed_names_key(group: Any, field: str) -> None:
    with pytest.raises(Invalid) as exc:
        profile.parse_groups([group])
    assert exc.value.details["field"] == field
    assert field in exc.value.message


@pytest.mark.parametrize("form", [int, operator.neg, lambda n: [n], lambda n: (n,)])
def test_parse_group_of_a_huge_integer_is_rejected(form: Callable[[int], Any]) -> None:
    number = form(10**5000)
    for key in ("resources:FPGA", "trait:CUSTOM_A", "accel:k", "other"):
        with pytest.raises(Invalid) as exc:
            profile.parse_groups([{key: number}])
        assert exc.value.details["field"] == f"groups[0][{key!r}]"
    if not isinstance(number, list):
        with pytest.raises(Invalid, match="must start with"):
            profile.parse_groups([{number: "1"}])


@pytest.mark.parametrize(
    "groups", [None, {}, "x", [], [{"resources:FPGA": "1"}] * (MAX_GROUPS + 1)]
)
def test_parse_groups_malformed_list_is_rejected(groups: Any) -> None:
    with pytest.raises(Invalid) as exc:
        profile.parse_groups(groups)
    assert exc.value.details["field"] == "groups"


def test_parse_groups_too_many_slots_is_rejected() -> None:
    whole = [{"resources:FPGA": str(MAX_UNITS)}] * (MAX_SLOTS // MAX_UNITS)
    assert len(profile.expand_slots(profile.parse_groups(whole))) == MAX_SLOTS == MAX_ARQS
    for more in (
        [*whole, {"resources:FPGA": "1"}],
        [*whole[1:], {"resources:FPGA": "129", "trait:CUSTOM_FPGA_XILINX": "required"}],
    ):
        with pytest.raises(Invalid) as exc:
            profile.parse_groups(more)
        assert exc.value.details["field"] == "groups"


def test_parse_groups_max_units_is_accepted() -> None:
    (group,) = profile.parse_groups([{"resources:FPGA": str(MAX_UNITS)}])
    assert group.resources == {"FPGA": MAX_UNITS}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_parse_groups_any_json_gives_groups_or_invalid(value: Any) -> None:
    for body in (value, [value], [{"resources:FPGA": value}], [{str(value): "1"}]):
        try:
            profile.parse_groups(body)
        except Invalid as exc:
            assert exc.details["field"]


@pytest.mark.parametrize("name", ["", None, 7, "a" * 256, "a b", "a/b", "ä", "a\n"])
def test_parse_name_invalid_is_rejected(name: Any) -> None:
    with pytest.raises(Invalid) as exc:
        profile.parse_name(name)
    assert exc.value.details["field"] == "name"


def test_parse_name_valid() -> None:
    assert profile.parse_name("a" * 255) == "a" * 255
    assert profile.parse_name("ctx-A_1") == "ctx-A_1"


def test_parse_groups_too_large_copies_is_rejected() -> None:
    """Each ARQ stores a copy: few units of a large group, or many of a small one."""
    large = {f"accel:{n:03}": "x" * 255 for n in range(60)}
    profile.parse_groups([{"resources:FPGA": "8", **large}])
    with pytest.raises(Invalid, match="too large") as exc:
        profile.parse_groups([{"resources:FPGA": "256", **large}])
    assert exc.value.details["field"] == "groups"
