# SPDX-License-Identifier: Apache-2.0
"""States of an ARQ, and the table of the steps between them."""

from collections.abc import Mapping
from enum import StrEnum

from cyborg.core.text import DescribedEnum


class ArqState(DescribedEnum):
    """States of an ARQ, as the v2 API spells them."""

    INITIAL = "Initial", "Created, not bound to a host yet."
    BIND_STARTED = "BindStarted", "A handle is claimed and the host prepares the device."
    BOUND = "Bound", "Owns an attach handle that Nova can attach to the instance."
    UNBOUND = "Unbound", "The handle was released; the ARQ can be bound again or deleted."
    BIND_FAILED = "BindFailed", "The host could not prepare the device; the ARQ owns no handle."
    UNBIND_FAILED = (
        "UnbindFailed",
        "Unbound, but the host could not clean the handle in time; this is retried.",
    )
    DELETING = "Deleting", "Being deleted; no further change is possible."


class Step(StrEnum):
    """Steps from one state of an ARQ to another."""

    START = "start"  # claim a handle; a job prepares it
    BIND = "bind"  # claim a handle that needs no job, or complete the job: ready for Nova
    FAIL_BIND = "fail_bind"
    UNBIND = "unbind"
    FAIL_UNBIND = "fail_unbind"  # the deadline of the release job has passed
    FINISH_UNBIND = "finish_unbind"  # the release job succeeded after its deadline
    DELETE = "delete"


_S = ArqState
TRANSITIONS: Mapping[tuple[ArqState, Step], ArqState] = {
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
    (_S.UNBOUND, Step.FAIL_UNBIND): _S.UNBIND_FAILED,
    (_S.UNBOUND, Step.DELETE): _S.DELETING,
    (_S.BIND_FAILED, Step.UNBIND): _S.UNBOUND,
    (_S.BIND_FAILED, Step.DELETE): _S.DELETING,
    (_S.UNBIND_FAILED, Step.FINISH_UNBIND): _S.UNBOUND,
    (_S.UNBIND_FAILED, Step.DELETE): _S.DELETING,
}

RESOLVED = frozenset({_S.BOUND, _S.BIND_FAILED, _S.DELETING})
"""States in which Nova stops waiting for the bind."""

OWNING_STATES = frozenset({_S.BIND_STARTED, _S.BOUND})
"""States in which an ARQ owns an attach handle."""

UNBOUND_STATES = frozenset({_S.UNBOUND, _S.UNBIND_FAILED})
"""States of an ARQ that was unbound: its former handle may wait for its cleaning.

The handle has no owner as soon as the ARQ is unbound, since no caller may wait for the host. If its
cleaning is not done by the deadline, the ARQ becomes UnbindFailed, so that its user learns of it.
"""


def source_states(step: Step) -> tuple[ArqState, ...]:
    """Return the states from which a step is allowed: the condition of its UPDATE."""
    return tuple(state for state, allowed in TRANSITIONS if allowed is step)


def _check() -> None:
    """Raise AssertionError at import if the table is inconsistent."""
    if unused := set(Step) - {step for _, step in TRANSITIONS}:
        raise AssertionError(f"steps without a transition: {sorted(unused)}")
    for step in Step:
        if len({TRANSITIONS[s, step] for s in source_states(step)}) != 1:
            raise AssertionError(f"step {step} leads to more than one state")
    reached = {_S.INITIAL} | set(TRANSITIONS.values())
    if missing := set(ArqState) - reached:
        raise AssertionError(f"states never reached: {sorted(missing)}")
    if final := {s for s in ArqState if s is not _S.DELETING} - {s for s, _ in TRANSITIONS}:
        raise AssertionError(f"states without a transition: {sorted(final)}")


# At import, and not in a test: the guards of the UPDATE statements are made from this table.
_check()
