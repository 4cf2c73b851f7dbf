# SPDX-License-Identifier: Apache-2.0
"""States of an ARQ, and its life cycle."""

from enum import StrEnum

from cyborg.core.life_cycle import LifeCycle, Transition
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
    """Events that change the state of an ARQ."""

    START = "start"
    BIND = "bind"
    FINISH_BIND = "finish_bind"
    FAIL_BIND = "fail_bind"
    UNBIND = "unbind"
    FAIL_UNBIND = "fail_unbind"
    FINISH_UNBIND = "finish_unbind"
    DELETE = "delete"


_S, _E = ArqState, Step
_UNCLAIMED = (_S.INITIAL, _S.UNBOUND)
ARQ_LIFE_CYCLE = LifeCycle(
    "ARQ",
    _S.INITIAL,
    (
        Transition(
            _E.START, _UNCLAIMED, _S.BIND_STARTED, "a handle is free, and needs work of the host"
        ),
        Transition(_E.BIND, _UNCLAIMED, _S.BOUND, "a handle is free, and needs no work"),
        Transition(_E.FINISH_BIND, (_S.BIND_STARTED,), _S.BOUND, "the job has succeeded"),
        Transition(
            _E.FAIL_BIND,
            (_S.BIND_STARTED,),
            _S.BIND_FAILED,
            "the job has failed, or its deadline has passed",
            "releases the handle; a job cleans it",
        ),
        Transition(
            _E.UNBIND,
            (_S.BIND_STARTED, _S.BOUND, _S.BIND_FAILED),
            _S.UNBOUND,
            effects="releases the handle; if the host has prepared it, a job cleans it",
        ),
        Transition(
            _E.FAIL_UNBIND,
            (_S.UNBOUND,),
            _S.UNBIND_FAILED,
            "the cleaning takes too long",
        ),
        Transition(
            _E.FINISH_UNBIND, (_S.UNBIND_FAILED,), _S.UNBOUND, "the handle is clean at last"
        ),
        Transition(
            _E.DELETE,
            tuple(state for state in _S if state is not _S.DELETING),
            _S.DELETING,
            effects="releases the handle as unbind does, and deletes the ARQ",
        ),
    ),
    final=frozenset({_S.DELETING}),
)

source_states = ARQ_LIFE_CYCLE.sources

# States in which Nova stops waiting for the bind.
RESOLVED = frozenset({_S.BOUND, _S.BIND_FAILED, _S.DELETING})

# States in which an ARQ owns an attach handle.
OWNING_STATES = frozenset({_S.BIND_STARTED, _S.BOUND})

# States of an ARQ that was unbound: its former handle may wait for its cleaning.
#
# The handle has no owner as soon as the ARQ is unbound, since no caller may wait for the host. If
# its cleaning is not done by the deadline, the ARQ becomes UnbindFailed, so that its user learns of
# it.
UNBOUND_STATES = frozenset({_S.UNBOUND, _S.UNBIND_FAILED})
