# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import Invalid
from cyborg.core.jobs.job import parse_program

IMAGE = "9a17439a-85d0-4c53-a3d3-0f68a2eac896"


def body(**changes: Any) -> list[dict[str, Any]]:
    operation = {"path": "/program", "op": "replace", "value": [{"image_uuid": IMAGE}]}
    return [operation | changes]


@pytest.mark.parametrize("image", [IMAGE, IMAGE.upper(), IMAGE.replace("-", "")])
def test_parse_program_returns_canonical_uuid(image: str) -> None:
    assert parse_program(body(value=[{"image_uuid": image}])) == IMAGE


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({}, "body"),
        ([], "body"),
        (body() * 2, "body"),
        (["/program"], "body"),
        (None, "body"),
        (body(path="/bitstream_id"), "path"),
        (body(path=None), "path"),
        (body(op="add"), "op"),
        (body(extra=1), "extra"),
        ([{"path": "/program", "op": "replace"}], "value"),
        ([{"op": "replace", "value": []}], "path"),
        (body(value={"image_uuid": IMAGE}), "value"),
        (body(value=[]), "value"),
        (body(value=[{"image_uuid": IMAGE}] * 2), "value"),
        (body(value=[{}]), "image_uuid"),
        (body(value=[{"image_uuid": "x"}]), "image_uuid"),
        (body(value=[{"image_uuid": 1}]), "image_uuid"),
        (body(value=[{"image_uuid": IMAGE, "other": 1}]), "other"),
    ],
)
def test_parse_program_malformed_body_names_field(wrong: Any, field: str) -> None:
    with pytest.raises(Invalid) as raised:
        parse_program(wrong)
    assert raised.value.details["field"] == field
    assert field in raised.value.message


_KEYS = st.sampled_from(["path", "op", "value", "image_uuid", "x"])
_JSON = st.recursive(
    st.none() | st.integers() | st.sampled_from(["/program", "replace", IMAGE, "\0"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_KEYS, inner, max_size=4),
)


@given(_JSON)
def test_parse_program_any_json_gives_uuid_or_invalid(value: Any) -> None:
    try:
        image = parse_program(value)
    except Invalid as exc:
        assert exc.details["field"]
    else:
        assert image == IMAGE
