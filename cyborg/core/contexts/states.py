# SPDX-License-Identifier: Apache-2.0
"""States of a device context, and its life cycle.

A context has the state that its ARQs imply: ``derive_state``. ARQs that own handles and have no
user, neither an instance nor a host, are under the lease of their context.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from cyborg.core.binding.states import OWNING_STATES, ArqState
from cyborg.core.life_cycle import LifeCycle, Transition
from cyborg.core.text import DescribedEnum


class ContextState(DescribedEnum):
    """States of a device context."""

    UNBOUND = "unbound", "Owns no handle; it can be bound, changed and deleted."
    RESERVING = "reserving", "Handles are claimed for a lease and the host prepares the devices."
    RESERVED = "reserved", "Owns handles under a lease; it can be bound before the lease ends."
    BINDING = "binding", "Handles are claimed for an instance or host, which prepares the devices."
    BOUND = "bound", "Each of its ARQs owns a handle that the instance, or the host, can use."
    UNBINDING = "unbinding", "Some of its ARQs are unbound, others still own a handle."
    CLEANING = "cleaning", "Owns no handle; the host still cleans the former handles."
    ERROR = "error", "A bind or reservation failed and was undone; ``error`` has the reason."


class ContextStep(StrEnum):
    """Events that change the state of a device context."""

    START_RESERVE = "start_reserve"
    RESERVE = "reserve"
    FINISH_RESERVE = "finish_reserve"
    START_BIND = "start_bind"
    BIND = "bind"
    START_CONSUME = "start_consume"
    CONSUME = "consume"
    FINISH_BIND = "finish_bind"
    FAIL = "fail"
    START_UNBIND = "start_unbind"
    CLEAN = "clean"
    RELEASE = "release"


_S, _E = ContextState, ContextStep
_FREE = (_S.UNBOUND, _S.CLEANING)
_OWNING = (_S.RESERVING, _S.RESERVED, _S.BINDING, _S.BOUND, _S.UNBINDING)
# Guards and effects that several events have.
_WORK = "a handle needs work of the host"
_NO_WORK = "no handle needs work of the host"
_DONE = "the job has succeeded"
_LEASE = "the epoch is that of the lease, which has not ended"
_CLAIMS = "claims the handles; the epoch rises"
_TAKES = "the instance gets the handles; the lease ends"
CONTEXT_LIFE_CYCLE = LifeCycle(
    "device context",
    _S.UNBOUND,
    (
        Transition(_E.START_RESERVE, _FREE, _S.RESERVING, _WORK, _CLAIMS),
        Transition(_E.RESERVE, _FREE, _S.RESERVED, _NO_WORK, _CLAIMS),
        Transition(_E.FINISH_RESERVE, (_S.RESERVING,), _S.RESERVED, _DONE),
        Transition(_E.START_BIND, _FREE, _S.BINDING, _WORK, _CLAIMS),
        Transition(_E.BIND, _FREE, _S.BOUND, _NO_WORK, _CLAIMS),
        Transition(_E.START_CONSUME, (_S.RESERVING,), _S.BINDING, _LEASE, _TAKES),
        Transition(_E.CONSUME, (_S.RESERVED,), _S.BOUND, _LEASE, _TAKES),
        Transition(_E.FINISH_BIND, (_S.BINDING,), _S.BOUND, _DONE),
        Transition(
            _E.FAIL, (_S.RESERVING, _S.BINDING, _S.UNBINDING), _S.ERROR, "the job has failed"
        ),
        Transition(_E.START_UNBIND, (_S.BINDING, _S.BOUND), _S.UNBINDING, "some ARQs are unbound"),
        Transition(
            _E.CLEAN,
            (*_OWNING, _S.ERROR),
            _S.CLEANING,
            "all ARQs are unbound, and a former handle is not clean",
        ),
        Transition(
            _E.RELEASE,
            (*_OWNING, _S.CLEANING, _S.ERROR),
            _S.UNBOUND,
            "all ARQs are unbound, and all former handles are clean",
        ),
    ),
    deletable=frozenset({_S.UNBOUND, _S.CLEANING, _S.ERROR}),
)

# States in which a context can be changed, and expires.
EDITABLE = frozenset({_S.UNBOUND})

# States in which a server can be built with a context: only former handles are being cleaned.
USABLE = frozenset(_FREE)

# States in which a context has a lease: its ARQs own handles and have no user.
LEASED = frozenset({_S.RESERVING, _S.RESERVED})

# States in which a context owns handles.
OWNING = frozenset(_OWNING)

# States in which a context can be deleted: its ARQs own no handle.
DELETABLE = CONTEXT_LIFE_CYCLE.deletable

# States in which an instance, or a host, has handles of a context, or is about to get them.
IN_USE = OWNING - LEASED


@dataclass(frozen=True, slots=True)
class ArqFacts:
    """Facts about an ARQ that decide the state of its context.

    ``waits_for_job`` is set if the ARQ refers to a job: in an unbound state, to the job that cleans
    its former handle. ``has_user`` is whether an instance, or a host, has the ARQ; it matters only
    for an ARQ that owns a handle.
    """

    state: str
    waits_for_job: bool = False
    has_user: bool = True

    @property
    def is_leased(self) -> bool:
        """Return whether the ARQ owns a handle under the lease of its context."""
        return self.state in OWNING_STATES and not self.has_user


def derive_state(arqs: Iterable[ArqFacts]) -> ContextState:
    """Return the state of a context that has these ARQs.

    The ARQs of a context are claimed together, and get their user together. So either all ARQs that
    own handles have a user, or none of them.
    """
    facts = tuple(arqs)
    states = {arq.state for arq in facts}
    if ArqState.BIND_FAILED in states:
        return _S.ERROR
    if owning := states & OWNING_STATES:
        if states - OWNING_STATES:
            return _S.UNBINDING
        if any(arq.is_leased for arq in facts):
            return _S.RESERVING if ArqState.BIND_STARTED in owning else _S.RESERVED
        return _S.BINDING if ArqState.BIND_STARTED in owning else _S.BOUND
    if any(arq.waits_for_job or arq.state == ArqState.UNBIND_FAILED for arq in facts):
        return _S.CLEANING
    return _S.UNBOUND
