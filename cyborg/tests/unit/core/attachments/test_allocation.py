# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from urllib.parse import parse_qs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.attachments import allocation
from cyborg.core.attachments.allocation import Intent
from cyborg.core.binding.profile import Group

NAMES = st.sampled_from(["a", "b", "c"])
AMOUNTS = st.dictionaries(
    NAMES, st.dictionaries(NAMES, st.integers(1, 5), min_size=1, max_size=3), max_size=3
)
ADDED = AMOUNTS.filter(bool)


def intent_of(
    allocated: dict[str, dict[str, int]], added: dict[str, dict[str, int]], *, shrinks: bool = False
) -> Intent:
    base = allocation.select_amounts(allocated, added)
    return Intent(sorted(added), added, base, shrinks)


@given(AMOUNTS, ADDED)
def test_shrink_reverts_extend(
    allocated: dict[str, dict[str, int]], added: dict[str, dict[str, int]]
) -> None:
    extended = allocation.extend(allocated, added)
    assert extended != allocated
    assert allocation.shrink(extended, added, {}) == allocated


@given(AMOUNTS, ADDED)
def test_recorded_amounts_show_whether_a_request_took_effect(
    allocated: dict[str, dict[str, int]], added: dict[str, dict[str, int]]
) -> None:
    intent = intent_of(allocated, added)
    extended = allocation.extend(allocated, added)
    assert not allocation.is_extended(allocated, intent)
    assert allocation.is_extended(extended, intent)
    assert not allocation.is_extended(extended, replace(intent, base={}))
    shrinking = intent_of(extended, added, shrinks=True)
    assert not allocation.is_shrunk(extended, shrinking, {})
    assert allocation.is_shrunk(allocated, shrinking, {})
    assert not allocation.is_shrunk(allocated, intent, {})


@given(AMOUNTS, ADDED)
def test_intent_survives_the_database(
    allocated: dict[str, dict[str, int]], added: dict[str, dict[str, int]]
) -> None:
    intent = intent_of(allocated, added, shrinks=True)
    assert Intent.from_dict(intent.to_dict()).to_dict() == intent.to_dict()


def test_amounts_that_others_have_removed_stay_removed() -> None:
    assert allocation.shrink({"a": {"FPGA": 1}}, {"a": {"FPGA": 2}, "b": {"FPGA": 1}}, {}) == {}


def test_shrink_keeps_the_amounts_of_others() -> None:
    added, floor = {"a": {"FPGA": 2}}, {"a": {"FPGA": 3}}
    assert allocation.shrink({"a": {"FPGA": 4}}, added, floor) == {"a": {"FPGA": 3}}
    assert allocation.shrink({"a": {"FPGA": 1}}, added, floor) == {"a": {"FPGA": 1}}
    shrinking = Intent(["a"], added, {"a": {"FPGA": 4}}, True)
    assert allocation.is_shrunk({"a": {"FPGA": 3}}, shrinking, floor)
    assert not allocation.is_shrunk({"a": {"FPGA": 4}}, shrinking, floor)


@pytest.mark.parametrize(
    ("least", "present", "expected"),
    [(None, 1, False), (2, 2, False), (2, 3, False), (2, 1, True), (2, None, True)],
)
def test_lower_generation_is_another_consumer(
    least: int | None, present: int | None, expected: bool
) -> None:
    intent = Intent(["a"], {"a": {"FPGA": 1}}, generation=least)
    assert allocation.is_recreated(present, intent) is expected


def test_groups_on_one_provider_are_added_up() -> None:
    groups = [Group({"FPGA": 1}), Group({"FPGA": 2, "PGPU": 1}), Group({"FPGA": 4})]
    assert allocation.required_amounts(groups, ["a", "a", "b"]) == {
        "a": {"FPGA": 3, "PGPU": 1},
        "b": {"FPGA": 4},
    }


def test_query_has_one_granular_group_for_each_group_of_the_profile() -> None:
    groups = [
        Group({"FPGA": 2}, frozenset({"CUSTOM_A"}), frozenset({"CUSTOM_B"})),
        Group({"PGPU": 1}),
    ]
    assert parse_qs(allocation.candidate_query(groups, "root")) == {
        "limit": ["20"],
        "group_policy": ["none"],
        "resources1": ["FPGA:2"],
        "required1": ["CUSTOM_A,OWNER_CYBORG,!CUSTOM_B"],
        "in_tree1": ["root"],
        "resources2": ["PGPU:1"],
        "required2": ["OWNER_CYBORG"],
        "in_tree2": ["root"],
    }
