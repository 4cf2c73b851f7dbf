# SPDX-License-Identifier: Apache-2.0
"""Every state of an accelerator request, and the one table of the steps between them."""

from collections.abc import Mapping
from enum import StrEnum

from cyborg.core.errors import WrongState


class RequestState(StrEnum):
    """The states of an accelerator request (ARQ), as the v2 API spells them."""

    INITIAL = "Initial"
    BIND_STARTED = "BindStarted"
    BOUND = "Bound"
    UNBOUND = "Unbound"
    BIND_FAILED = "BindFailed"
    UNBIND_FAILED = "UnbindFailed"
    DELETING = "Deleting"


SENTENCES: Mapping[RequestState, str] = {
    RequestState.INITIAL: "It was asked for and belongs to no host yet.",
    RequestState.BIND_STARTED: "A handle is claimed for it and the host prepares the device.",
    RequestState.BOUND: "It owns an attach handle that Nova can give to the instance.",
    RequestState.UNBOUND: "It gave its handle back and may be bound again or deleted.",
    RequestState.BIND_FAILED: "The host could not prepare the device; no handle is held.",
    RequestState.UNBIND_FAILED: "Known for the sake of other releases: here it is never entered.",
    RequestState.DELETING: "It is on its way out and takes no further orders.",
}


class Step(StrEnum):
    """What may happen to a request."""

    START = "start"  # claim a handle, host work follows
    BIND = "bind"  # claim a handle, or finish the host work: ready for Nova
    FAIL_BIND = "fail_bind"
    UNBIND = "unbind"
    DELETE = "delete"


_S = RequestState
TRANSITIONS: Mapping[tuple[RequestState, Step], RequestState] = {
    (_S.INITIAL, Step.START): _S.BIND_STARTED,
    (_S.INITIAL, Step.BIND): _S.BOUND,
    (_S.INITIAL, Step.DELETE): _S.DELETING,
    (_S.BIND_STARTED, Step.BIND): _S.BOUND,
    (_S.BIND_STARTED, Step.FAIL_BIND): _S.BIND_FAILED,
    (_S.BIND_STARTED, Step.UNBIND): _S.UNBOUND,
    (_S.BIND_STARTED, Step.DELETE): _S.DELETING,
    (_S.BOUND, Step.UNBIND): _S.UNBOUND,
    (_S.BOUND, Step.DELETE): _S.DELETING,
    (_S.UNBOUND, Step.START): _S.BIND_STARTED,
    (_S.UNBOUND, Step.BIND): _S.BOUND,
    (_S.UNBOUND, Step.DELETE): _S.DELETING,
    (_S.BIND_FAILED, Step.UNBIND): _S.UNBOUND,
    (_S.BIND_FAILED, Step.DELETE): _S.DELETING,
    (_S.UNBIND_FAILED, Step.UNBIND): _S.UNBOUND,
    (_S.UNBIND_FAILED, Step.DELETE): _S.DELETING,
}

RESOLVED = frozenset({_S.BOUND, _S.BIND_FAILED, _S.DELETING})
"""The states in which Nova need not wait any longer."""

HOLDING = frozenset({_S.BIND_STARTED, _S.BOUND, _S.UNBIND_FAILED})
"""The states in which a request owns an attach handle."""

FOREIGN = frozenset({_S.UNBIND_FAILED})
"""The states of the v2 API that no step leads to, only away from.

A request is unbound at once. What the host then fails to clean is a handle, which stays dirty and
is tried again: no caller waits for it, and no request is kept for its sake.
"""


def sources(step: Step) -> tuple[RequestState, ...]:
    """Return the states from which a step is allowed: the guard of its UPDATE."""
    return tuple(state for state, way in TRANSITIONS if way is step)


def target(state: RequestState, step: Step) -> RequestState:
    """Return where a step leads. Raises WrongState if the table has no such step."""
    try:
        return TRANSITIONS[state, step]
    except KeyError:
        allowed = ", ".join(sources(step))
        raise WrongState(
            f"cannot {step} a request that is {state}: it must be one of {allowed}",
            state=str(state),
            step=str(step),
        ) from None


def _check() -> None:
    """Refuse to import a table that contradicts itself."""
    if missing := set(RequestState) - set(SENTENCES):
        raise AssertionError(f"states without a sentence: {sorted(missing)}")
    if idle := set(Step) - {step for _, step in TRANSITIONS}:
        raise AssertionError(f"steps that lead nowhere: {sorted(idle)}")
    for step in Step:
        if len({TRANSITIONS[s, step] for s in sources(step)}) != 1:
            raise AssertionError(f"step {step} leads to more than one state")
    reached = {_S.INITIAL} | set(TRANSITIONS.values())
    if missing := set(RequestState) - reached - FOREIGN:
        raise AssertionError(f"states never reached: {sorted(missing)}")
    if stuck := {s for s in RequestState if s is not _S.DELETING} - {s for s, _ in TRANSITIONS}:
        raise AssertionError(f"states without a way out: {sorted(stuck)}")


_check()
