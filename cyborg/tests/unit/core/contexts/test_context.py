# SPDX-License-Identifier: Apache-2.0
"""The bodies of device contexts, and the queries for Placement."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.binding.profile import is_hidden_profile_name, parse_groups
from cyborg.core.contexts import context as device_contexts
from cyborg.core.contexts.context import (
    MAX_LIST,
    build_query,
    build_request_groups,
    merge_config,
    parse_candidates,
    parse_changes,
    parse_request,
)
from cyborg.core.errors import CyborgError, Invalid, Unavailable

NOW = datetime(2026, 1, 1)
OWNER = "trait:OWNER_CYBORG"
CONTEXT = "5f0d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e"


def groups_of(body: Mapping[str, Any]) -> list[dict[str, str]]:
    return [group.to_dict() for group in parse_request(body).groups or ()]


@pytest.mark.parametrize("resources", [{"FPGA_GZIP": 1}, {"FPGA_GZIP": "1"}, "FPGA_GZIP:1"])
def test_names_get_the_custom_prefix_and_the_owner_is_required(resources: Any) -> None:
    body = {"resources": resources, "requires": ["SOME_FOO_CAPABILITY"], "forbids": "CUSTOM_OLD"}
    assert groups_of(body) == [
        {
            "resources:CUSTOM_FPGA_GZIP": "1",
            OWNER: "required",
            "trait:CUSTOM_SOME_FOO_CAPABILITY": "required",
            "trait:CUSTOM_OLD": "forbidden",
        }
    ]


def test_standard_names_keep_their_form() -> None:
    body = {"resources": "FPGA:2, PGPU:1", "requires": "HW_GPU_API_VULKAN"}
    assert groups_of(body) == [
        {
            "resources:FPGA": "2",
            "resources:PGPU": "1",
            "trait:HW_GPU_API_VULKAN": "required",
            OWNER: "required",
        }
    ]


def test_groups_are_completed_too() -> None:
    body = {"groups": [{"resources:GZIP": "1"}, {"resources:FPGA": "1", "trait:X": "forbidden"}]}
    assert groups_of(body) == [
        {"resources:CUSTOM_GZIP": "1", OWNER: "required"},
        {"resources:FPGA": "1", OWNER: "required", "trait:CUSTOM_X": "forbidden"},
    ]


FPGA = {"resources": "FPGA:1"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "resources"),
    ({**FPGA, "device_profile": "p"}, "device_profile"),
    ({**FPGA, "groups": [{"resources:FPGA": "1"}]}, "groups"),
    ({"device_profile": "p", "requires": ["X"]}, "requires"),
    ({"resources": {"FPGA": 0}}, "resources"),
    ({"resources": {"FPGA": -1}}, "resources"),
    ({"resources": {"FPGA": 10**9}}, "resources"),
    ({"resources": {"FPGA": True}}, "resources"),
    ({"resources": {"FPGA": 1.5}}, "resources"),
    ({"resources": "FPGA"}, "resources"),
    ({"resources": ""}, "resources"),
    ({"resources": {}}, "resources"),
    ({"resources": ["FPGA"]}, "resources"),
    ({"resources": {"VCPU": 1}}, "resources"),
    ({"resources": {"fpga gzip": 1}}, "resources"),
    ({"resources": {"GZIP": 1, "CUSTOM_GZIP": 1}}, "resources"),
    ({**FPGA, "requires": ["bad trait"]}, "requires"),
    ({**FPGA, "requires": [7]}, "requires"),
    ({**FPGA, "requires": {"A": 1}}, "requires"),
    ({**FPGA, "requires": ["A"], "forbids": ["CUSTOM_A"]}, "forbids"),
    ({**FPGA, "forbids": ["OWNER_CYBORG"]}, "forbids"),
    ({"groups": [{"resources:FPGA": "1", OWNER: "forbidden"}]}, "groups"),
    ({"groups": [{"resources:GZIP": "1", "resources:CUSTOM_GZIP": "1"}]}, "groups[0]"),
    ({"groups": []}, "groups"),
    ({"groups": "FPGA"}, "groups"),
    ({"device_profile": "no such name!"}, "device_profile"),
    ({"device_profile": f"ctx-{CONTEXT}"}, "device_profile"),
    ({**FPGA, "config_data": "k:v"}, "config_data"),
    ({**FPGA, "config_data": {"k": "a\nb"}}, "config_data"),
    ({**FPGA, "config_data": {"k": "\x00"}}, "config_data"),
    ({**FPGA, "config_data": {"k": ""}}, "config_data"),
    ({**FPGA, "config_data": {"k": 1}}, "config_data"),
    ({**FPGA, "config_data": {"k k": "v"}}, "config_data"),
    ({**FPGA, "config_data": {"k": "v" * 2**15}}, "config_data"),
    ({**FPGA, "config_data": {f"k{n}": "v" for n in range(65)}}, "config_data"),
    ({**FPGA, "config_data": {f"k{n}": "v" * 255 for n in range(64)}}, "config_data"),
    ({**FPGA, "config_data": {"attach_target": "moon"}}, "config_data"),
    (
        {"groups": [{"resources:FPGA": "1", "accel:k": "1"}], "config_data": {"k": "2"}},
        "config_data",
    ),
    ({"resources": {"FPGA": 256}, "config_data": {"k": "v" * 255, "l": "v" * 9000}}, "config_data"),
    ({**FPGA, "name": "a\x07"}, "name"),
    ({**FPGA, "name": 7}, "name"),
    ({**FPGA, "description": "x" * 5000}, "description"),
    ({**FPGA, "colour": "red"}, "colour"),
    ({**FPGA, "x" * 70: "red"}, "x" * 60),
]
# Python refuses to convert such an integer to text, and so to send it as JSON.
HUGE: list[tuple[dict[Any, Any], str]] = [
    ({"resources": {"FPGA": 10**5000}}, "resources"),
    ({"resources": {10**5000: 1}}, "resources"),
    ({**FPGA, "requires": [10**5000]}, "requires"),
    ({"groups": [{10**5000: "1"}]}, "groups[0]"),
    ({**FPGA, "config_data": {"k": 10**5000}}, "config_data"),
    ({**FPGA, "config_data": {10**5000: "v"}}, "config_data"),
    ({**FPGA, 10**5000: 1}, "int"),
]


@pytest.mark.parametrize(("body", "field"), [*BAD, *HUGE])
def test_bad_request_names_the_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as raised:
        parse_request(body)
    assert raised.value.details["field"] == field
    assert field in raised.value.message or field == "body"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_any_value_of_any_field_is_accepted_or_refused(value: Any) -> None:
    for name in device_contexts.REQUEST_FIELDS:
        for body in ({**FPGA, name: value}, {name: value}):
            try:
                parse_request(body)
            except Invalid as exc:
                assert exc.details["field"]


@pytest.mark.parametrize("field", ["resources", "requires", "forbids"])
def test_long_list_is_refused_and_not_cut(field: str) -> None:
    name = "FPGA:1" if field == "resources" else "CUSTOM_A"
    body = {"resources": "FPGA:1", field: f"{name},{' ' * MAX_LIST},{name}"}
    with pytest.raises(Invalid, match=f"{field} has .* characters") as raised:
        parse_request(body)
    assert raised.value.details["field"] == field
    parse_request({**body, field: f"{name},{' ' * (MAX_LIST - len(name) - 1)}"})


def test_config_data_becomes_accel_keys_of_each_group() -> None:
    groups = parse_groups([{"resources:FPGA": "1"}, {"resources:PGPU": "1", "accel:a": "1"}])
    merged = merge_config(groups, {"key1": "val1"})
    assert [group.accel for group in merged] == [{"key1": "val1"}, {"a": "1", "key1": "val1"}]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "body"),
        ({"expires_at": "2025-12-31T23:59:59+00:00"}, "expires_at"),
        ({"expires_at": "2026-01-01T00:59:00+01:00"}, "expires_at"),
        ({"expires_at": "tomorrow"}, "expires_at"),
        ({"expires_at": 7}, "expires_at"),
        ({"expires_at": "9999-12-31T23:59:59-12:00"}, "expires_at"),
        ({"groups": []}, "groups"),
        ({"config_data": {"k": "\x1b"}}, "config_data"),
        ({"name": ""}, "name"),
    ],
)
def test_bad_change_names_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as raised:
        parse_changes(changes, NOW)
    assert raised.value.details["field"] == field


def test_changes_are_parsed() -> None:
    body = {"name": None, "config_data": None, "expires_at": "2026-02-01T01:00:00+01:00"}
    assert parse_changes(body, NOW) == {
        "name": None,
        "config_data": {},
        "expires_at": datetime(2026, 2, 1),
    }
    assert parse_changes({"expires_at": None}, NOW) == {"expires_at": None}


def test_query_is_that_of_placement() -> None:
    groups = parse_groups([{"resources:FPGA": "2", "trait:CUSTOM_X": "forbidden"}])
    assert build_request_groups(groups) == [
        {
            "suffix": "device_profile_0",
            "resources": "FPGA:2",
            "required": "OWNER_CYBORG,!CUSTOM_X",
        }
    ]
    assert build_query(groups) == (
        "resourcesdevice_profile_0=FPGA:2&requireddevice_profile_0=OWNER_CYBORG,!CUSTOM_X"
    )
    assert build_query([*groups, *groups]).endswith("&group_policy=none")


def test_query_of_a_group_without_traits_requires_the_owner() -> None:
    assert build_query(parse_groups([{"resources:FPGA": "1"}])) == (
        "resourcesdevice_profile_0=FPGA:1&requireddevice_profile_0=OWNER_CYBORG"
    )


def test_candidates_are_numbered_by_group() -> None:
    provider = str(uuid4())
    answer = {"allocation_requests": [{"mappings": {"device_profile_0": [provider]}}]}
    assert parse_candidates(answer, 1) == [{"0": [provider]}]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"allocation_requests": [{}]},
        {"allocation_requests": 7},
        {"allocation_requests": [{"mappings": {"device_profile_1": []}}]},
        {"allocation_requests": [{"mappings": {"device_profile_0": ["x"]}}]},
        [],
    ],
)
def test_malformed_answer_of_placement_is_unavailable(answer: Any) -> None:
    with pytest.raises(Unavailable):
        parse_candidates(answer, 1)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        (f"ctx-{CONTEXT}", True),
        (f"CTX-{CONTEXT.upper()}", True),
        (f"ctx-{CONTEXT.replace('-', '')}", True),
        ("ctx-gzip", False),
        (CONTEXT, False),
        (f"ctx-{CONTEXT}-2", False),
    ],
)
def test_hidden_profile_names(name: str, hidden: bool) -> None:
    assert is_hidden_profile_name(name) is hidden
    if hidden:
        with pytest.raises(CyborgError):
            parse_request({"device_profile": name})
