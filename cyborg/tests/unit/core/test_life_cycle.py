# SPDX-License-Identifier: Apache-2.0
"""Tables of transitions, and the checks of a table."""

from enum import StrEnum
from typing import Any

import pytest

from cyborg.core.attachments.attachment import ATTACHMENT_LIFE_CYCLE
from cyborg.core.binding.states import ARQ_LIFE_CYCLE
from cyborg.core.contexts.states import CONTEXT_LIFE_CYCLE
from cyborg.core.jobs.job import JOB_LIFE_CYCLE
from cyborg.core.life_cycle import LifeCycle, Transition

LIFE_CYCLES = (ARQ_LIFE_CYCLE, CONTEXT_LIFE_CYCLE, ATTACHMENT_LIFE_CYCLE, JOB_LIFE_CYCLE)


class Door(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    LOCKED = "locked"


class Event(StrEnum):
    CLOSE = "close"
    LOCK = "lock"


CLOSE = Transition(Event.CLOSE, (Door.OPEN,), Door.CLOSED)
LOCK = Transition(Event.LOCK, (Door.OPEN, Door.CLOSED), Door.LOCKED)


def make(*transitions: Transition[Door, Event], **changes: Any) -> LifeCycle[Door, Event]:
    values = {"final": frozenset({Door.LOCKED})} | changes
    return LifeCycle("door", Door.OPEN, transitions, **values)


def test_event_leads_from_its_sources_to_its_target() -> None:
    door = make(CLOSE, LOCK)
    assert door.sources(Event.LOCK) == (Door.OPEN, Door.CLOSED)
    assert door.transition(Event.LOCK).target is Door.LOCKED


def test_union_of_transitions_has_the_sources_that_are_asked_for() -> None:
    door = make(CLOSE, LOCK)
    assert door.to(Door.LOCKED).sources == (Door.OPEN, Door.CLOSED)
    assert door.to(Door.LOCKED, among={Door.CLOSED}).sources == (Door.CLOSED,)
    assert door.to(Door.OPEN).sources == ()


@pytest.mark.parametrize(
    ("transitions", "changes", "problem"),
    [
        ((CLOSE, LOCK, LOCK), {}, "more than one transition: .*lock"),
        ((CLOSE,), {}, "events without a transition: .*lock"),
        ((CLOSE, Transition(Event.LOCK, (Door.OPEN,), Door.CLOSED)), {}, "never reached: .*locked"),
        ((CLOSE, LOCK), {"final": frozenset()}, "states without an end: .*locked"),
        ((CLOSE, LOCK), {"final": frozenset({*Door})}, "final states with a transition: .*closed"),
    ],
)
def test_inconsistent_table_is_refused(
    transitions: Any, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=f"life cycle of door: .*{problem}"):
        make(*transitions, **changes)


@pytest.mark.parametrize("life_cycle", LIFE_CYCLES, ids=lambda found: found.name)
def test_object_can_end_from_each_state(life_cycle: LifeCycle[Any, Any]) -> None:
    ends: set[Any] = {*life_cycle.final, *life_cycle.deletable}
    for _ in life_cycle.states:
        ends |= {
            state
            for transition in life_cycle.transitions
            if transition.target in ends
            for state in transition.sources
        }
    assert ends == set(life_cycle.states)
