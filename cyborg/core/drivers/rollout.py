# SPDX-License-Identifier: Apache-2.0
"""Rollout of a driver change to many hosts: the order of its steps, and its result.

Each backend on each host is one step. An update runs one step at a time and stops at the first
failure: that host is rolled back and the remaining steps are skipped. The steps of an install or
uninstall run in parallel, and a failed step does not stop the other steps.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cyborg.core.described_enum import DescribedEnum
from cyborg.core.drivers.desired_state import DesiredBackend, DesiredStatus

MAX_CONCURRENT_STEPS = 16  # of an install or uninstall


class Kind(StrEnum):
    """Kinds of driver jobs."""

    INSTALL = "install"
    UPDATE = "update"
    UNINSTALL = "uninstall"


class StepState(DescribedEnum):
    """State of a step."""

    WAITING = "waiting", "Waiting for earlier steps."
    DRAINING = "draining", "Cordoned, waiting until its bound handles are released."
    IN_PROGRESS = "in_progress", "The agent was notified and has not reported the result yet."
    DONE = "done", "The desired state is applied."
    PENDING_AGENT = (
        "pending_agent",
        "The agent is down; it applies the desired state when it returns.",
    )
    FAILED = "failed", "The change failed; the host keeps the previous state."
    ROLLED_BACK = (
        "rolled_back",
        "The change failed; the host was rolled back to the previous state.",
    )
    SKIPPED = "skipped", "Not started: an earlier step failed or the job was cancelled."


PENDING_STATES = frozenset({StepState.WAITING, StepState.DRAINING})
FINAL_STATES = frozenset(
    {
        StepState.DONE,
        StepState.PENDING_AGENT,
        StepState.FAILED,
        StepState.ROLLED_BACK,
        StepState.SKIPPED,
    }
)
FAILED_STATES = frozenset({StepState.FAILED, StepState.ROLLED_BACK})


@dataclass(frozen=True, slots=True)
class Step:
    """One backend on one host.

    ``bound_handles`` counts its handles that have an owner or need cleaning. ``agent_down`` is set
    if the agent is marked down, ``forced`` if the step does not wait for bound handles.
    """

    host: str
    backend: str
    state: StepState
    bound_handles: int = 0
    agent_down: bool = False
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Next changes of a rollout: steps to start, and steps that pass to another state.

    Steps are identified by (host, backend). ``succeeded`` is None while the rollout runs, else
    whether all steps succeeded.
    """

    start: Sequence[tuple[str, str]] = ()
    transitions: Mapping[tuple[str, str], StepState] | None = None
    succeeded: bool | None = None


def plan(kind: Kind, steps: Sequence[Step]) -> Plan:
    """Return the next changes of a rollout; ``steps`` are in the order in which they run.

    At most MAX_CONCURRENT_STEPS start in one plan.
    """
    # The limit also bounds the transaction that records the started steps.
    states = [step.state for step in steps]
    failed = any(state in FAILED_STATES for state in states)
    transitions: dict[tuple[str, str], StepState] = {}
    start: list[tuple[str, str]] = []
    free_slots = 1 if kind is Kind.UPDATE else MAX_CONCURRENT_STEPS
    free_slots -= sum(state is StepState.IN_PROGRESS for state in states)
    for step in steps:
        key = (step.host, step.backend)
        if step.state not in PENDING_STATES:
            continue
        # The step of an agent that is down only records the desired state, so it takes no slot. In
        # an update it waits for its turn too: an update keeps the order of its steps.
        may_start = free_slots > 0 or (step.agent_down and kind is not Kind.UPDATE)
        if kind is Kind.UPDATE and failed:
            transitions[key] = StepState.SKIPPED
        elif kind is Kind.UNINSTALL and step.bound_handles and not step.forced:
            if step.state is StepState.WAITING:
                transitions[key] = StepState.DRAINING
        elif may_start and len(start) < MAX_CONCURRENT_STEPS:
            start.append(key)
            free_slots -= not step.agent_down
    states_after = [transitions.get((s.host, s.backend), s.state) for s in steps]
    if start or any(state not in FINAL_STATES for state in states_after):
        return Plan(start, transitions)
    return Plan(start, transitions, not failed)


def desired_backend(
    kind: Kind,
    driver: str,
    arguments: Mapping[str, Any],
    backend: str,
    previous: DesiredBackend | None,
    generation: int,
) -> DesiredBackend:
    """Return the desired state that a job gives to a backend.

    ``previous`` is the desired state before the job. ``arguments`` are the arguments of the job:
    the options to change (None returns an option to the configuration file), and the desired status
    (None leaves it unchanged).
    """
    status = DesiredStatus.ENABLED if previous is None else previous.status
    config: dict[str, Any] = {}
    if previous is not None and previous.status is not DesiredStatus.ABSENT:
        config |= previous.config
    if kind is Kind.INSTALL:
        status = DesiredStatus.ENABLED
    elif kind is Kind.UNINSTALL:
        status = DesiredStatus.ABSENT
    elif arguments.get("status") is not None:
        status = DesiredStatus(arguments["status"])
    config |= arguments.get("config") or {}
    config = {name: value for name, value in config.items() if value is not None}
    return DesiredBackend(backend, driver, status, generation, config)


def summarize(states: Sequence[StepState]) -> str:
    """Return the number of steps in each state as text: ``2 done, 1 rolled_back``."""
    counts = Counter(states)
    return ", ".join(f"{counts[state]} {state}" for state in StepState if counts[state])
