# SPDX-License-Identifier: Apache-2.0
"""Parsing of the JSON patch that binds and unbinds ARQs."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.binding.arqs import (
    MAX_ARQS,
    BindRequest,
    UnbindRequest,
    check_requests,
    parse_patch,
)
from cyborg.core.errors import Invalid
from cyborg.core.validation import parse_uuid

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
    """Return the operations of a bind with one of them changed."""
    operations: list[dict[str, Any]] = copy.deepcopy(ADD)
    operations[number] |= fields
    return operations


def test_parse_patch_add_is_bind() -> None:
    assert parse_patch({ARQ.upper(): ADD}) == (BindRequest(ARQ, "compute-1", PROVIDER, INSTANCE),)


def test_parse_patch_with_project() -> None:
    operations = [*ADD, {"path": "/project_id", "op": "add", "value": "p"}]
    (request,) = parse_patch({ARQ: operations})
    assert isinstance(request, BindRequest)
    assert request.project_id == "p"


def test_parse_patch_remove_is_unbind() -> None:
    assert parse_patch({ARQ: REMOVE[::-1]}) == (UnbindRequest(ARQ),)


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
        ({ARQ: ADD, PROVIDER: changed(0, value="compute-2")}, "/hostname"),
        ({ARQ: ADD, ARQ.replace("-", ""): ADD}, "body"),
    ],
)
def test_parse_patch_malformed_names_field(body: Any, field: str) -> None:
    with pytest.raises(Invalid) as exc:
        parse_patch(body)
    assert exc.value.details["field"] == field


@pytest.mark.parametrize(
    "project",
    [{}, {"project_id": "p"}],
)
def test_bind_request_is_restored_from_its_plain_values(project: dict[str, str]) -> None:
    body = {
        "request": ARQ,
        "hostname": "compute-1",
        "device_rp_uuid": PROVIDER,
        "instance_uuid": INSTANCE,
        **project,
    }
    request = BindRequest.from_dict(body)
    assert request == BindRequest(ARQ, "compute-1", PROVIDER, INSTANCE, **project)
    assert request.to_dict() == body
    assert BindRequest.from_dict({"project_id": None, **body, "newer": 1}) == request


@pytest.mark.parametrize(
    ("number", "field"), [(0, "body"), (MAX_ARQS, None), (MAX_ARQS + 1, "body")]
)
def test_check_requests_limits_the_number(number: int, field: str | None) -> None:
    requests = [UnbindRequest(f"arq-{index}") for index in range(number)]
    if field is None:
        check_requests(requests)
        return
    with pytest.raises(Invalid) as exc:
        check_requests(requests)
    assert exc.value.details["field"] == field


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
def test_parse_uuid_invalid_is_rejected(text: Any) -> None:
    with pytest.raises(Invalid) as exc:
        parse_uuid(text, "uuid")
    assert exc.value.details["field"] == "uuid"


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(json)
def test_parse_patch_any_json_gives_requests_or_invalid(body: Any) -> None:
    for whole in (body, {ARQ: body}, {ARQ: [body]}, {ARQ: changed(0, value=body)}):
        try:
            assert parse_patch(whole)
        except Invalid as exc:
            assert exc.details["field"]
