# SPDX-License-Identifier: Apache-2.0
"""The transition table of ARQs."""

from cyborg.core.binding import states
from cyborg.core.binding.states import ARQ_LIFE_CYCLE, OWNING_STATES, ArqState, Step


def test_arq_states_match_contract() -> None:
    assert {str(s) for s in ArqState} == {
        "Initial",
        "BindStarted",
        "Bound",
        "Unbound",
        "BindFailed",
        "UnbindFailed",
        "Deleting",
    }
    assert {str(s) for s in states.RESOLVED} == {"Bound", "BindFailed", "Deleting"}


def test_start_from_states_without_handle_only() -> None:
    """An ARQ with a handle claims no other one, and a failed bind leaves none."""
    assert not OWNING_STATES & set(states.source_states(Step.START))
    assert states.source_states(Step.BIND) == states.source_states(Step.START)
    for step in (Step.START, Step.BIND, Step.FINISH_BIND):
        assert ARQ_LIFE_CYCLE.transition(step).target in OWNING_STATES
    failed = ARQ_LIFE_CYCLE.transition(Step.FAIL_BIND)
    assert ArqState.BIND_STARTED in failed.sources
    assert failed.target not in OWNING_STATES


def test_failed_unbind_is_left_only_by_itself_or_by_a_deletion() -> None:
    assert ArqState.UNBIND_FAILED not in OWNING_STATES, "the handle has no owner"
    steps = {step for step in Step if ArqState.UNBIND_FAILED in states.source_states(step)}
    assert steps == {Step.FINISH_UNBIND, Step.DELETE}
    assert ARQ_LIFE_CYCLE.transition(Step.FINISH_UNBIND).target is ArqState.UNBOUND


def test_delete_is_allowed_from_every_other_state() -> None:
    assert set(states.source_states(Step.DELETE)) == set(ArqState) - {ArqState.DELETING}
