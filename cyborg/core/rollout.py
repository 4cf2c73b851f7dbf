# SPDX-License-Identifier: Apache-2.0
"""A change of a driver on many hosts: which backend's turn it is, and how the whole ends.

Each backend on each host is one step. What an update does is rolled, one step at a time, and the
first that fails stops it: that host goes back to what it had, the later ones are left as they are.
Installing and uninstalling do not wait for each other, and one host's failure stops no other.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cyborg.core.wanted import Wanted, Wish

AT_ONCE = 16  # steps of an installation, or of an uninstallation, that are under way


class Kind(StrEnum):
    """What is done: the kinds of jobs that are about a driver."""

    INSTALL = "install"
    UPDATE = "update"
    UNINSTALL = "uninstall"


class StepState(StrEnum):
    """How far one backend on one host is."""

    WAITING = "waiting"
    DRAINING = "draining"
    ROLLING = "rolling"
    DONE = "done"
    AWAY = "away"
    FAILED = "failed"
    ROLLED_BACK = "rolled_back"
    UNTOUCHED = "untouched"


SENTENCES: Mapping[StepState, str] = {
    StepState.WAITING: "Its turn has not come.",
    StepState.DRAINING: "It is closed, and waits for what is bound to be released.",
    StepState.ROLLING: "Its agent has been asked, and has not answered yet.",
    StepState.DONE: "It is as it is wanted.",
    StepState.AWAY: "Its agent is away; it comes to the same when it returns.",
    StepState.FAILED: "It could not be done; the host has what it had.",
    StepState.ROLLED_BACK: "It could not be done; the host was brought back to what it had.",
    StepState.UNTOUCHED: "An earlier host failed, or the job was cancelled: its turn never came.",
}

if missing := set(StepState) - set(SENTENCES):
    raise AssertionError(f"states without a sentence: {sorted(missing)}")

PENDING = frozenset({StepState.WAITING, StepState.DRAINING})
ENDED = frozenset(
    {
        StepState.DONE,
        StepState.AWAY,
        StepState.FAILED,
        StepState.ROLLED_BACK,
        StepState.UNTOUCHED,
    }
)
BROKEN = frozenset({StepState.FAILED, StepState.ROLLED_BACK})


@dataclass(frozen=True, slots=True)
class Step:
    """One backend on one host. ``bound`` is how many of its handles requests hold or hosts clean.

    ``down`` tells that its agent is held for down, ``forced`` that it is given up although
    something is bound.
    """

    host: str
    backend: str
    state: StepState
    bound: int = 0
    down: bool = False
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done now: which steps begin, which pass to another state, whether all is over.

    ``begin`` and ``become`` name steps by (host, backend). ``over`` is None while it goes on, else
    whether all went well.
    """

    begin: Sequence[tuple[str, str]] = ()
    become: Mapping[tuple[str, str], StepState] | None = None
    over: bool | None = None


def plan(kind: Kind, steps: Sequence[Step]) -> Plan:
    """Return what follows from how far the steps are; ``steps`` are in the order of their turns.

    No more than AT_ONCE begin together, so that nobody waits long for what is written of them.
    """
    states = [step.state for step in steps]
    broken = any(state in BROKEN for state in states)
    become: dict[tuple[str, str], StepState] = {}
    begin: list[tuple[str, str]] = []
    room = 1 if kind is Kind.UPDATE else AT_ONCE
    room -= sum(state is StepState.ROLLING for state in states)
    for step in steps:
        key = (step.host, step.backend)
        if step.state not in PENDING:
            continue
        # Who is away is written down for, and holds nobody up; but no update overtakes another.
        ahead = room > 0 or (step.down and kind is not Kind.UPDATE)
        if kind is Kind.UPDATE and broken:
            become[key] = StepState.UNTOUCHED
        elif kind is Kind.UNINSTALL and step.bound and not step.forced:
            if step.state is StepState.WAITING:
                become[key] = StepState.DRAINING
        elif ahead and len(begin) < AT_ONCE:
            begin.append(key)
            room -= not step.down
    after = [become.get((s.host, s.backend), s.state) for s in steps]
    if begin or any(state not in ENDED for state in after):
        return Plan(begin, become)
    return Plan(begin, become, not broken)


def wish(
    kind: Kind,
    driver: str,
    arguments: Mapping[str, Any],
    backend: str,
    before: Wanted | None,
    revision: int,
) -> Wanted:
    """Return what a job wants of a backend, given what was wanted of it before.

    ``arguments`` are the job's: ``config`` has the options that change, None for one that is the
    host's configuration file's to say again; ``wish`` is what is wanted of the backends, None if
    that stays.
    """
    asked = Wish.ENABLED if before is None else before.wish
    config = {} if before is None or before.wish is Wish.ABSENT else dict(before.config)
    if kind is Kind.INSTALL:
        asked = Wish.ENABLED
    elif kind is Kind.UNINSTALL:
        asked = Wish.ABSENT
    elif arguments.get("wish") is not None:
        asked = Wish(arguments["wish"])
    config |= arguments.get("config") or {}
    kept = {name: value for name, value in config.items() if value is not None}
    return Wanted(backend, driver, asked, revision, kept)


def summary(states: Sequence[StepState]) -> str:
    """Return how many steps are in which state, in words: ``2 done, 1 rolled_back``."""
    counts = Counter(states)
    return ", ".join(f"{counts[state]} {state}" for state in StepState if counts[state])
