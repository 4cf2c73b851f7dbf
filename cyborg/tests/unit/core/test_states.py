# SPDX-License-Identifier: Apache-2.0
"""The table of states."""

import itertools

import pytest

from cyborg.core import states
from cyborg.core.errors import WrongState
from cyborg.core.states import HOLDING, TRANSITIONS, RequestState, Step


@pytest.mark.parametrize(("state", "step"), list(itertools.product(RequestState, Step)))
def test_target_and_sources_tell_the_same(state: RequestState, step: Step) -> None:
    if state in states.sources(step):
        assert states.target(state, step) is TRANSITIONS[state, step]
    else:
        with pytest.raises(WrongState) as bad:
            states.target(state, step)
        assert str(state) in bad.value.message


def test_names_are_those_of_the_contract() -> None:
    assert {str(s) for s in RequestState} == {
        "Initial",
        "BindStarted",
        "Bound",
        "Unbound",
        "BindFailed",
        "UnbindFailed",
        "Deleting",
    }
    assert {str(s) for s in states.RESOLVED} == {"Bound", "BindFailed", "Deleting"}


def test_a_claim_is_made_once() -> None:
    """What holds a handle is not bound to another, and what holds none has none to give back."""
    assert not HOLDING & set(states.sources(Step.START))
    assert {TRANSITIONS[s, Step.START] for s in states.sources(Step.START)} <= HOLDING
    assert TRANSITIONS[RequestState.BIND_STARTED, Step.FAIL_BIND] not in HOLDING


def test_every_state_but_the_last_can_be_deleted() -> None:
    assert set(states.sources(Step.DELETE)) == set(RequestState) - {RequestState.DELETING}
