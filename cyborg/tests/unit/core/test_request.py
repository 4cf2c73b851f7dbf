# SPDX-License-Identifier: Apache-2.0
"""The JSON patch that binds and unbinds."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import Invalid
from cyborg.core.request import Bind, Unbind, parse_patch, parse_uuid

ARQ = "11111111-1111-4111-8111-111111111111"
PROVIDER = "22222222-2222-4222-8222-222222222222"
INSTANCE = "33333333-3333-4333-8333-333333333333"
ADD = [
    {"path": "/hostname", "op": "add", "value": "compute-1"},
    {"path": "/device_rp_uuid", "op": "add", "value": PROVIDER},
    {"path": "/instance_uuid", "op": "add", "value": INSTANCE},
]
REMOVE = [{"path": o["path"], "op": "remove"} for o in ADD]


def changed(number: int, **fields: Any) -> list[dict[str, Any]]:
    """Return the operations of a bind with one of them altered."""
    operations: list[dict[str, Any]] = copy.deepcopy(ADD)
    operations[number] |= fields
    return operations


def test_add_is_a_bind() -> None:
    assert parse_patch({ARQ.upper(): ADD}) == (Bind(ARQ, "compute-1", PROVIDER, INSTANCE),)


def test_a_project_may_be_named() -> None:
    operations = [*ADD, {"path": "/project_id", "op": "add", "value": "p"}]
    (wish,) = parse_patch({ARQ: operations})
    assert isinstance(wish, Bind)
    assert wish.project_id == "p"


def test_remove_is_an_unbind_whatever_the_order() -> None:
    assert parse_patch({ARQ: REMOVE[::-1]}) == (Unbind(ARQ),)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (None, "body"),
        ([], "body"),
        ({}, "body"),
        ({"x": ADD}, "arq uuid"),
        ({ARQ: {}}, ARQ),
        ({ARQ: "x"}, ARQ),
        ({ARQ: [1]}, ARQ),
        ({ARQ: []}, "op"),
        ({ARQ: ADD[1:]}, "/hostname"),
        ({ARQ: REMOVE[:2]}, "/instance_uuid"),
        ({ARQ: [*ADD, ADD[0]]}, "/hostname"),
        ({ARQ: [ADD[0], *REMOVE[1:]]}, "op"),
        ({ARQ: changed(0, op="replace")}, "op"),
        ({ARQ: changed(0, op=None)}, "op"),
        ({ARQ: changed(0, path="/state")}, "/state"),
        ({ARQ: changed(0, path=7)}, "7"),
        ({ARQ: changed(0, value="")}, "/hostname"),
        ({ARQ: changed(0, value="x" * 256)}, "/hostname"),
        ({ARQ: changed(0, value=["x"])}, "/hostname"),
        ({ARQ: changed(1, value="none")}, "/device_rp_uuid"),
        ({ARQ: changed(2, value=None)}, "/instance_uuid"),
        ({ARQ: ADD, PROVIDER: REMOVE}, "op"),
        ({ARQ: ADD, PROVIDER: changed(2, value=ARQ)}, "/instance_uuid"),
        ({ARQ: ADD, ARQ.replace("-", ""): ADD}, "body"),
    ],
)
def test_a_mistake_is_named(body: Any, field: str) -> None:
    with pytest.raises(Invalid) as bad:
        parse_patch(body)
    assert bad.value.details["field"] == field


@pytest.mark.parametrize(
    "text",
    [
        f"{{{ARQ}}}",
        f"urn:uuid:{ARQ}",
        ARQ.replace("4", "+"),
        "1_1" + "1" * 29,
        ARQ + "\n",
        ARQ[:-1] + "\u0661",
        "",
        None,
        7,
    ],
)
def test_what_is_no_uuid(text: Any) -> None:
    with pytest.raises(Invalid) as bad:
        parse_uuid(text, "uuid")
    assert bad.value.details["field"] == "uuid"


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(json)
def test_no_body_is_a_surprise(body: Any) -> None:
    for whole in (body, {ARQ: body}, {ARQ: [body]}, {ARQ: changed(0, value=body)}):
        try:
            assert parse_patch(whole)
        except Invalid as bad:
            assert bad.details["field"]
