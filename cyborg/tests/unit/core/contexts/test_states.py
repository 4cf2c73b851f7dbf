# SPDX-License-Identifier: Apache-2.0
"""The states of device contexts: the transition table, and the state that ARQs imply."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.binding import states
from cyborg.core.binding.states import OWNING_STATES, ArqState
from cyborg.core.contexts import states as context_states
from cyborg.core.contexts.states import (
    CONTEXT_LIFE_CYCLE,
    ArqFacts,
    ContextState,
    ContextStep,
    derive_state,
)

FACTS = st.lists(st.builds(ArqFacts, st.sampled_from(list(ArqState)), st.booleans()), min_size=1)


def test_context_with_handles_of_a_server_cannot_be_bound() -> None:
    for step in (ContextStep.START_BIND, ContextStep.BIND):
        assert set(CONTEXT_LIFE_CYCLE.sources(step)) == context_states.USABLE
    for step in (ContextStep.START_CONSUME, ContextStep.CONSUME):
        assert set(CONTEXT_LIFE_CYCLE.sources(step)) <= context_states.LEASED
    assert set(CONTEXT_LIFE_CYCLE.to(ContextState.BINDING).sources) == {
        *context_states.USABLE,
        ContextState.RESERVING,
    }
    assert set(CONTEXT_LIFE_CYCLE.to(ContextState.BOUND).sources) == {
        *context_states.USABLE,
        ContextState.RESERVED,
        ContextState.BINDING,
    }


def test_lease_starts_only_without_handles() -> None:
    for step in (ContextStep.START_RESERVE, ContextStep.RESERVE):
        assert set(CONTEXT_LIFE_CYCLE.sources(step)) == context_states.USABLE
    sources = CONTEXT_LIFE_CYCLE.to(ContextState.RESERVED).sources
    assert set(sources) == {*context_states.USABLE, ContextState.RESERVING}


@pytest.mark.parametrize(
    ("arqs", "state"),
    [
        (["BindStarted", "BindStarted"], "reserving"),
        (["Bound", "BindStarted"], "reserving"),
        (["Bound", "Bound"], "reserved"),
        (["BindFailed", "BindFailed"], "error"),
        (["Unbound", "Unbound"], "unbound"),
    ],
)
def test_state_of_arqs_without_an_instance(arqs: list[str], state: str) -> None:
    assert derive_state(ArqFacts(arq, has_user=False) for arq in arqs) == state


@pytest.mark.parametrize(
    ("arqs", "state"),
    [
        (["Initial", "Initial"], "unbound"),
        (["Unbound", "Initial"], "unbound"),
        (["BindStarted", "BindStarted"], "binding"),
        (["Bound", "BindStarted"], "binding"),
        (["Bound", "Bound"], "bound"),
        (["Bound", "Unbound"], "unbinding"),
        (["BindFailed", "Unbound"], "error"),
        (["BindFailed", "Bound"], "error"),
        (["UnbindFailed", "Unbound"], "cleaning"),
    ],
)
def test_state_follows_arqs(arqs: list[str], state: str) -> None:
    assert derive_state(ArqFacts(arq) for arq in arqs) == state


def test_unbound_arq_that_waits_for_a_job_is_being_cleaned() -> None:
    facts = [ArqFacts("Unbound", waits_for_job=True), ArqFacts("Unbound")]
    assert derive_state(facts) is ContextState.CLEANING


@given(FACTS)
def test_context_without_handles_is_never_bound(facts: list[ArqFacts]) -> None:
    owning = [arq for arq in facts if arq.state in OWNING_STATES]
    state = derive_state(facts)
    if not owning:
        assert state in (ContextState.UNBOUND, ContextState.CLEANING, ContextState.ERROR)
    if state in context_states.DELETABLE and ArqState.BIND_FAILED not in {a.state for a in facts}:
        assert owning == []


CLAIMS = ("bind", "start", "reserve", "start_reserve")
ACTION_NAMES = (*CLAIMS, "renew", "assign", "release", "finish", "fail", "unbind", "clean", "late")
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(ACTION_NAMES),
        st.integers(0, 2),
        st.booleans(),
    )
)


@given(ACTIONS)
def test_each_change_of_the_arqs_has_a_transition(actions: list[tuple[str, int, bool]]) -> None:
    """Any history of a context with three ARQs, which a bind claims together."""
    facts = [ArqFacts(ArqState.INITIAL)] * 3
    state = ContextState.UNBOUND
    for action, number, is_dirty in actions:
        if action in (*CLAIMS, "renew") and state not in context_states.USABLE:
            continue
        is_leased = state in context_states.LEASED
        if (action in ("assign", "release") and not is_leased) or (
            action == "unbind" and is_leased
        ):
            continue  # the ARQs of a lease are unbound together
        if action in CLAIMS and ArqFacts(ArqState.UNBIND_FAILED, True) in facts:
            continue  # such an ARQ cannot be bound, it is replaced
        facts = apply_action(facts, action, number, is_dirty)
        derived = derive_state(facts)
        assert derived is state or state in CONTEXT_LIFE_CYCLE.to(derived).sources
        state = derived


def apply_action(facts: list[ArqFacts], action: str, number: int, is_dirty: bool) -> list[ArqFacts]:
    """Return the ARQs after an action of Nova, of a job or of a deadline."""
    started = {ArqState.BIND_STARTED: ArqState.BIND_FAILED}
    match action:
        case "bind":
            return [ArqFacts(ArqState.BOUND)] * len(facts)
        case "start":
            return [ArqFacts(ArqState.BIND_STARTED, waits_for_job=True)] * len(facts)
        case "reserve":
            return [ArqFacts(ArqState.BOUND, has_user=False)] * len(facts)
        case "start_reserve":
            started_fact = ArqFacts(ArqState.BIND_STARTED, True, has_user=False)
            return [started_fact] * len(facts)
        case "assign":
            return [ArqFacts(arq.state, arq.waits_for_job) for arq in facts]
        case "release":
            return [ArqFacts(ArqState.UNBOUND, waits_for_job=is_dirty)] * len(facts)
        case "renew":
            return [ArqFacts(ArqState.INITIAL)] * len(facts)
        case "finish":
            return _replace(facts, {ArqState.BIND_STARTED: ArqState.BOUND})
        case "fail":
            return _replace(facts, started)
        case "clean":
            clean = {ArqState.UNBIND_FAILED: ArqState.UNBOUND, ArqState.UNBOUND: ArqState.UNBOUND}
            return _replace(facts, clean)
        case "late":
            return [
                ArqFacts(ArqState.UNBIND_FAILED, waits_for_job=True)
                if arq == ArqFacts(ArqState.UNBOUND, waits_for_job=True)
                else arq
                for arq in facts
            ]
    if facts[number].state not in states.source_states(states.Step.UNBIND):
        return facts
    others = _replace(facts, started) if facts[number].state in started else facts
    released = ArqFacts(ArqState.UNBOUND, waits_for_job=is_dirty)
    return [*others[:number], released, *others[number + 1 :]]


def _replace(facts: list[ArqFacts], new_states: dict[ArqState, ArqState]) -> list[ArqFacts]:
    """Return the ARQs with new states; an ARQ that changes no longer waits for a job."""
    return [
        ArqFacts(new_states[ArqState(arq.state)], has_user=arq.has_user)
        if arq.state in new_states
        else arq
        for arq in facts
    ]
