# SPDX-License-Identifier: Apache-2.0
"""Messages: bounded, plain, and errors that keep their kind."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.errors import KINDS, CyborgError, Invalid, NoHandle, Unavailable
from cyborg.rpc import envelope

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),  # of no lone surrogates
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_an_answer_comes_out_as_it_went_in(value: object) -> None:
    travelled = json.loads(json.dumps(envelope.answer(value)))
    assert envelope.opened(travelled, "it") == value


@given(st.sampled_from(sorted(KINDS)), st.text(), st.dictionaries(st.text(min_size=1), PLAIN))
def test_an_error_keeps_its_kind(code: str, message: str, details: dict) -> None:
    error = KINDS[code](message)
    error.details = details
    travelled = json.loads(json.dumps(envelope.failure(error)))
    with pytest.raises(CyborgError) as raised:
        envelope.opened(travelled, "it")
    assert type(raised.value) is KINDS[code]
    assert (raised.value.message, raised.value.details) == (message, details)


def test_details_that_cannot_travel_are_left_out() -> None:
    body = envelope.failure(NoHandle("none is free", reasons={object()}))
    assert body == {"error": {"code": "no_handle", "message": "none is free", "details": {}}}


@pytest.mark.parametrize(
    "value", [b"bytes", {"a": object()}, float("nan"), {1, 2}, "\ud800", {"a": ["b\udfff"]}]
)
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(Invalid, match="not plain JSON"):
        envelope.size(value, "it")


def test_characters_beyond_the_first_plane_are_text() -> None:
    assert envelope.size("\U0001f600", "it") == 14


def test_a_ring_is_refused() -> None:
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(Invalid):
        envelope.size(ring, "it")


def test_the_limit_is_in_bytes_and_inclusive() -> None:
    envelope.bounded("x" * 98, 100, "it")
    with pytest.raises(Invalid, match="it: 101 bytes are more than the limit of 100") as raised:
        envelope.bounded("x" * 99, 100, "it")
    assert raised.value.details == {"field": "it"}


@pytest.mark.parametrize("body", [None, [], "ok", {}, {"error": "text"}])
def test_an_answer_of_another_form_is_a_neighbour_that_is_away(body: object) -> None:
    with pytest.raises(Unavailable, match="none of ours"):
        envelope.opened(body, "it")
