# SPDX-License-Identifier: Apache-2.0
"""Envelopes: size limit, plain values, and errors that keep their class."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import KINDS, CyborgError, Invalid, NoHandle, Unavailable
from cyborg.rpc import envelope

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),  # without lone surrogates
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_result_round_trip_keeps_the_value(value: object) -> None:
    decoded = json.loads(json.dumps(envelope.wrap_result(value)))
    assert envelope.unwrap(decoded, "it") == value


@given(st.sampled_from(sorted(KINDS)), st.text(), st.dictionaries(st.text(min_size=1), PLAIN))
def test_error_round_trip_keeps_its_class(code: str, message: str, details: dict[str, Any]) -> None:
    error = KINDS[code](message)
    error.details = details
    decoded = json.loads(json.dumps(envelope.wrap_error(error)))
    with pytest.raises(CyborgError) as raised:
        envelope.unwrap(decoded, "it")
    assert type(raised.value) is KINDS[code]
    assert (raised.value.message, raised.value.details) == (message, details)


def test_wrap_error_leaves_out_unserializable_details() -> None:
    body = envelope.wrap_error(NoHandle("none is free", reasons={object()}))
    assert body == {"error": {"code": "no_handle", "message": "none is free", "details": {}}}


@pytest.mark.parametrize(
    "value", [b"bytes", {"a": object()}, float("nan"), {1, 2}, "\ud800", {"a": ["b\udfff"]}]
)
def test_encoded_size_of_non_json_values_is_refused(value: object) -> None:
    with pytest.raises(Invalid, match="not plain JSON"):
        envelope.encoded_size(value, "it")


def test_encoded_size_accepts_surrogate_pairs() -> None:
    assert envelope.encoded_size("\U0001f600", "it") == 14


def test_encoded_size_of_a_cyclic_list_is_refused() -> None:
    cyclic: list[object] = []
    cyclic.append(cyclic)
    with pytest.raises(Invalid):
        envelope.encoded_size(cyclic, "it")


def test_check_size_limit_is_in_bytes_and_inclusive() -> None:
    envelope.check_size("x" * 98, 100, "it")
    with pytest.raises(Invalid, match="it: 101 bytes are more than the limit of 100") as raised:
        envelope.check_size("x" * 99, 100, "it")
    assert raised.value.details == {"field": "it"}


@pytest.mark.parametrize("body", [None, [], "ok", {}, {"error": "text"}])
def test_unwrap_of_an_invalid_envelope_raises_unavailable(body: object) -> None:
    with pytest.raises(Unavailable, match="invalid RPC response envelope"):
        envelope.unwrap(body, "it")
