# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.accelerator import MAX_TAGS, Facts, State, decide, parse_label
from cyborg.core.errors import Invalid
from cyborg.core.states import RequestState

FACTS = st.builds(
    Facts,
    st.none() | st.sampled_from([*RequestState, "FromANewerRelease"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (Facts(), "free"),
        (Facts(is_open=False), "closed"),
        (Facts(prepared=True, is_open=False), "dirty"),
        (Facts(holder="BindStarted", prepared=True), "preparing"),
        (Facts(holder="Bound", prepared=True, is_open=False), "bound"),
        (Facts(holder="UnbindFailed"), "bound"),
        (Facts(holder="Bound", draining=True), "draining"),
        (Facts(draining=True), "draining"),
    ],
)
def test_the_state(facts: Facts, state: str) -> None:
    assert decide(facts) == state


@given(FACTS)
def test_what_is_held_is_never_offered(facts: Facts) -> None:
    state = decide(facts)
    free = facts.holder is None and not facts.prepared and not facts.draining and facts.is_open
    assert (state is State.FREE) == free
    if state in (State.BOUND, State.PREPARING):
        assert facts.holder is not None
    if state in (State.DIRTY, State.CLOSED):
        assert facts.holder is None


def test_a_label_has_what_changes() -> None:
    assert parse_label({"name": "é 7"}) == {"name": "é 7"}
    whole = {"name": None, "description": "two\n\tlines", "tags": ["b", "a", "b"]}
    assert parse_label(whole) == {**whole, "tags": ["b", "a"]}
    assert parse_label({"description": None, "tags": []}) == {"description": None, "tags": []}
    assert parse_label({"description": ""}) == {"description": None}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (None, "body"),
        ([], "body"),
        ({}, "body"),
        ({"owner": "me"}, "owner"),
        ({"name": ""}, "name"),
        ({"name": 7}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "n" * 256}, "name"),
        ({"description": "d" * 1025}, "description"),
        ({"description": "a\0b"}, "description"),
        ({"tags": None}, "tags"),
        ({"tags": "tag"}, "tags"),
        ({"tags": [""]}, "tags"),
        ({"tags": [["x"]]}, "tags"),
        ({"tags": ["t" * 61]}, "tags"),
        ({"tags": [f"t{n}" for n in range(MAX_TAGS + 1)]}, "tags"),
    ],
)
def test_what_is_no_label(body: Any, field: str) -> None:
    with pytest.raises(Invalid) as raised:
        parse_label(body)
    assert raised.value.details["field"] == field


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["name", "description", "tags"]), JSON))
def test_a_label_is_read_or_refused_and_once_read_stays(body: dict[str, Any]) -> None:
    try:
        label = parse_label(body)
    except Invalid:
        return
    assert parse_label(label) == label
    assert set(label) == set(body)
