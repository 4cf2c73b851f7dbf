# SPDX-License-Identifier: Apache-2.0
"""States of a device context, and the table of the steps between them.

A context has the state that its ARQs imply: ``derive_state``. ARQs that own handles and have no
user, neither an instance nor a host, are under the lease of their context.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cyborg.core.binding.states import OWNING_STATES, ArqState
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
    """Steps from one state of a device context to another."""

    RESERVE = "reserve"  # claim handles under a lease; a job prepares them
    FINISH_RESERVE = "finish_reserve"  # claim handles that need no job, or complete the job
    START_BIND = "start_bind"  # claim handles for an instance or a host; a job prepares them
    BIND = "bind"  # claim handles that need no job, or complete the job
    FAIL = "fail"  # a bind or a reservation was undone
    START_UNBIND = "start_unbind"  # some ARQs were unbound
    CLEAN = "clean"  # all ARQs are unbound, a former handle is not clean
    RELEASE = "release"  # all ARQs are unbound, all former handles are clean


_S = ContextState
TRANSITIONS: Mapping[tuple[ContextState, ContextStep], ContextState] = {
    (_S.UNBOUND, ContextStep.RESERVE): _S.RESERVING,
    (_S.UNBOUND, ContextStep.FINISH_RESERVE): _S.RESERVED,
    (_S.UNBOUND, ContextStep.START_BIND): _S.BINDING,
    (_S.UNBOUND, ContextStep.BIND): _S.BOUND,
    (_S.RESERVING, ContextStep.FINISH_RESERVE): _S.RESERVED,
    (_S.RESERVING, ContextStep.START_BIND): _S.BINDING,
    (_S.RESERVING, ContextStep.FAIL): _S.ERROR,
    (_S.RESERVING, ContextStep.CLEAN): _S.CLEANING,
    (_S.RESERVING, ContextStep.RELEASE): _S.UNBOUND,
    (_S.RESERVED, ContextStep.BIND): _S.BOUND,
    (_S.RESERVED, ContextStep.CLEAN): _S.CLEANING,
    (_S.RESERVED, ContextStep.RELEASE): _S.UNBOUND,
    (_S.BINDING, ContextStep.BIND): _S.BOUND,
    (_S.BINDING, ContextStep.FAIL): _S.ERROR,
    (_S.BINDING, ContextStep.START_UNBIND): _S.UNBINDING,
    (_S.BINDING, ContextStep.CLEAN): _S.CLEANING,
    (_S.BINDING, ContextStep.RELEASE): _S.UNBOUND,
    (_S.BOUND, ContextStep.START_UNBIND): _S.UNBINDING,
    (_S.BOUND, ContextStep.CLEAN): _S.CLEANING,
    (_S.BOUND, ContextStep.RELEASE): _S.UNBOUND,
    (_S.UNBINDING, ContextStep.FAIL): _S.ERROR,
    (_S.UNBINDING, ContextStep.CLEAN): _S.CLEANING,
    (_S.UNBINDING, ContextStep.RELEASE): _S.UNBOUND,
    (_S.CLEANING, ContextStep.RESERVE): _S.RESERVING,
    (_S.CLEANING, ContextStep.FINISH_RESERVE): _S.RESERVED,
    (_S.CLEANING, ContextStep.START_BIND): _S.BINDING,
    (_S.CLEANING, ContextStep.BIND): _S.BOUND,
    (_S.CLEANING, ContextStep.RELEASE): _S.UNBOUND,
    (_S.ERROR, ContextStep.CLEAN): _S.CLEANING,
    (_S.ERROR, ContextStep.RELEASE): _S.UNBOUND,
}

EDITABLE = frozenset({_S.UNBOUND})
"""States in which a context can be changed, and expires."""

USABLE = frozenset({_S.UNBOUND, _S.CLEANING})
"""States in which a server can be built with a context: only former handles are being cleaned."""

LEASED = frozenset({_S.RESERVING, _S.RESERVED})
"""States in which a context has a lease: its ARQs own handles and have no user."""

OWNING = LEASED | {_S.BINDING, _S.BOUND, _S.UNBINDING}
"""States in which a context owns handles."""

DELETABLE = frozenset({_S.UNBOUND, _S.CLEANING, _S.ERROR})
"""States in which a context can be deleted: its ARQs own no handle."""

IN_USE = OWNING - LEASED
"""States in which an instance, or a host, has handles of a context, or is about to get them."""


def source_states(step: ContextStep) -> tuple[ContextState, ...]:
    """Return the states from which a step is allowed: the condition of its UPDATE."""
    return tuple(state for state, allowed in TRANSITIONS if allowed is step)


def states_before(target: ContextState) -> tuple[ContextState, ...]:
    """Return the states from which any step leads to ``target``."""
    return tuple(dict.fromkeys(s for (s, _), reached in TRANSITIONS.items() if reached is target))


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


def _check() -> None:
    """Raise AssertionError at import if the table is inconsistent."""
    for step in ContextStep:
        if len({TRANSITIONS[state, step] for state in source_states(step)}) != 1:
            raise AssertionError(f"step {step} leads to no state or to more than one")
    if missing := set(ContextState) - {_S.UNBOUND} - set(TRANSITIONS.values()):
        raise AssertionError(f"states never reached: {sorted(missing)}")
    if final := set(ContextState) - {state for state, _ in TRANSITIONS}:
        raise AssertionError(f"states without a transition: {sorted(final)}")


_check()
