# SPDX-License-Identifier: Apache-2.0
"""Life cycles: tables of the states of an object and of the events that change them.

One table per kind of object says which change is allowed. ``cyborg.db.bulk`` makes it the
condition of an UPDATE, and the documentation draws it (``doc/source/_ext/life_cycles.py``), so that
neither can differ from it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Transition(Generic[S, E]):
    """An event, the states in which it is allowed, and the state to which it leads.

    ``guard`` are the conditions other than the state, and ``effects`` what changes with the state,
    in words for the documentation. ``event`` is None for the union of several transitions.
    """

    event: E | None
    sources: tuple[S, ...]
    target: S
    guard: str = ""
    effects: str = ""


@dataclass(frozen=True, slots=True)
class LifeCycle(Generic[S, E]):
    """The transitions of a kind of object; each event has one transition, with one target.

    ``final`` are the states that no event leaves, ``deletable`` those in which the object can be
    deleted. Raise ValueError if the table is inconsistent.
    """

    name: str
    initial: S
    transitions: tuple[Transition[S, E], ...]
    final: frozenset[S] = frozenset()
    deletable: frozenset[S] = frozenset()

    def __post_init__(self) -> None:
        """Check the table when its module is imported, instead of at the first wrong UPDATE."""
        states = set(self.states)
        events = [item.event for item in self.transitions if item.event is not None]
        targets = {transition.target for transition in self.transitions}
        sources = {state for transition in self.transitions for state in transition.sources}
        kinds = {type(event) for event in events}
        problems: Mapping[str, Collection[object]] = {
            "events with more than one transition": {e for e in events if events.count(e) > 1},
            "events without a transition": {e for kind in kinds for e in kind} - {*events},
            "states never reached": states - targets - {self.initial},
            "states without an end": states - sources - self.final - self.deletable,
            "final states with a transition": self.final & sources,
        }
        for problem, items in problems.items():
            if items:
                raise ValueError(f"life cycle of {self.name}: {problem}: {sorted(map(str, items))}")

    @property
    def states(self) -> tuple[S, ...]:
        """Return all states, in the order of their declaration."""
        return tuple(type(self.initial))

    def transition(self, event: E) -> Transition[S, E]:
        """Return the transition of an event."""
        # There is one: ``__post_init__`` refuses a table without it.
        return next(transition for transition in self.transitions if transition.event is event)

    def sources(self, event: E) -> tuple[S, ...]:
        """Return the states in which an event is allowed."""
        return self.transition(event).sources

    def to(self, target: S, among: Collection[S] | None = None) -> Transition[S, E]:
        """Return the union of the transitions to a state, for an object whose event is not known.

        With ``among``, its sources are those of these states only.
        """
        # Several events may lead from one state to the target: it is one condition of the UPDATE.
        sources = dict.fromkeys(
            state
            for transition in self.transitions
            if transition.target is target
            for state in transition.sources
            if among is None or state in among
        )
        return Transition(None, tuple(sources), target)
