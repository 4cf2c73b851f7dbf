# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.binding.accelerator import (
    MAX_TAGS,
    AcceleratorFacts,
    AcceleratorState,
    evaluate,
    parse_label,
)
from cyborg.core.binding.states import ArqState
from cyborg.core.errors import Invalid

FACTS = st.builds(
    AcceleratorFacts,
    st.none() | st.sampled_from([*ArqState, "FromANewerRelease"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (AcceleratorFacts(), "free"),
        (AcceleratorFacts(schedulable=False), "cordoned"),
        (AcceleratorFacts(needs_cleaning=True, schedulable=False), "dirty"),
        (AcceleratorFacts(needs_cleaning=True, cleaning_failed=True), "error"),
        (AcceleratorFacts(owner_state="BindStarted", needs_cleaning=True), "preparing"),
        (AcceleratorFacts(owner_state="Bound", needs_cleaning=True, schedulable=False), "bound"),
        (AcceleratorFacts(owner_state="UnbindFailed"), "bound"),
        (AcceleratorFacts(owner_state="Bound", draining=True), "draining"),
        (AcceleratorFacts(draining=True), "draining"),
    ],
)
def test_evaluate_state(facts: AcceleratorFacts, state: str) -> None:
    assert evaluate(facts) == state


@given(FACTS)
def test_evaluate_owned_handle_is_never_free(facts: AcceleratorFacts) -> None:
    state = evaluate(facts)
    free = (
        facts.owner_state is None
        and not facts.needs_cleaning
        and not facts.draining
        and facts.schedulable
    )
    assert (state is AcceleratorState.FREE) == free
    if state in (AcceleratorState.BOUND, AcceleratorState.PREPARING):
        assert facts.owner_state is not None
    if state in (AcceleratorState.ERROR, AcceleratorState.DIRTY, AcceleratorState.CORDONED):
        assert facts.owner_state is None


def test_parse_label_returns_changes() -> None:
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
def test_parse_label_malformed_is_rejected(body: Any, field: str) -> None:
    with pytest.raises(Invalid) as raised:
        parse_label(body)
    assert raised.value.details["field"] == field


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["name", "description", "tags"]), JSON))
def test_parse_label_is_idempotent(body: dict[str, Any]) -> None:
    try:
        label = parse_label(body)
    except Invalid:
        return
    assert parse_label(label) == label
    assert set(label) == set(body)
