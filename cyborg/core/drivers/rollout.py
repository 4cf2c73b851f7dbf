# SPDX-License-Identifier: Apache-2.0
"""Rollout of a driver change to many hosts: the order of its steps, and its result.

Each backend on each host is one step. An update runs one step at a time and stops at the first
failure: that host is rolled back, the remaining steps are skipped, and hosts whose agents are down
get back their previous desired state. The steps of an install or uninstall run in parallel, and a
failed step does not stop the other steps.

The step of an agent that is down ends as PENDING_AGENT, and the job does not wait for it. The
outcome that the agent reports after its return completes the step, also after the end of the job.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from cyborg.core.drivers.desired_state import BackendOutcome, DesiredBackend, DesiredStatus
from cyborg.core.text import DescribedEnum

# Steps of an install or uninstall that run at the same time.
MAX_CONCURRENT_STEPS = 16
# Steps that one plan reverts.
MAX_REVERTED_STEPS = 32


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
    SKIPPED = (
        "skipped",
        "Not applied: a step failed, the job was cancelled or replaced, or the agent was removed.",
    )


PENDING_STATES = frozenset({StepState.WAITING, StepState.DRAINING})
AWAITING_OUTCOME = frozenset({StepState.IN_PROGRESS, StepState.PENDING_AGENT})
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


class StepKey(NamedTuple):
    """Key of a step."""

    host: str
    backend: str


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

    @property
    def key(self) -> StepKey:
        """Return the key of the step."""
        return StepKey(self.host, self.backend)


@dataclass(frozen=True, slots=True)
class Plan:
    """Next changes of a rollout: steps to start, and steps that pass to another state.

    ``succeeded`` is None while the rollout runs, else whether all steps succeeded. ``revert`` are
    the steps whose hosts get back their previous desired state; they become SKIPPED.
    """

    start: Sequence[StepKey] = ()
    transitions: Mapping[StepKey, StepState] | None = None
    succeeded: bool | None = None
    revert: Sequence[StepKey] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Final state of a step, and the error if it failed."""

    state: StepState
    error: str | None = None


def plan(kind: Kind, steps: Sequence[Step]) -> Plan:
    """Return the next changes of a rollout; ``steps`` are in the order in which they run.

    At most MAX_CONCURRENT_STEPS start in one plan, and at most MAX_REVERTED_STEPS are reverted.
    """
    # The limits also bound the transaction that records the changes.
    states = [step.state for step in steps]
    failed = any(state in FAILED_STATES for state in states)
    transitions: dict[StepKey, StepState] = {}
    # An update that stops must not go on later: a host that is down would apply it at its return.
    stops = kind is Kind.UPDATE and failed
    to_revert = [s.key for s in steps if stops and s.state is StepState.PENDING_AGENT]
    revert = to_revert[:MAX_REVERTED_STEPS]
    ready: list[Step] = []
    for step in steps:
        if step.state not in PENDING_STATES:
            continue
        if stops:
            transitions[step.key] = StepState.SKIPPED
        elif kind is not Kind.UNINSTALL or not step.bound_handles or step.forced:
            ready.append(step)
        elif step.state is StepState.WAITING:
            transitions[step.key] = StepState.DRAINING
    running = sum(state is StepState.IN_PROGRESS for state in states)
    start = _select_starting(kind, ready, running)
    states_after = [transitions.get(step.key, step.state) for step in steps]
    has_more = start or len(to_revert) > len(revert)
    has_ended = not has_more and all(state in FINAL_STATES for state in states_after)
    succeeded = not failed if has_ended else None
    return Plan(start=start, transitions=transitions, succeeded=succeeded, revert=revert)


def _select_starting(kind: Kind, ready: Sequence[Step], running: int) -> list[StepKey]:
    """Return which of the steps that wait for nothing else start now, in their order.

    ``running`` is the number of steps in progress.
    """
    free_slots = (1 if kind is Kind.UPDATE else MAX_CONCURRENT_STEPS) - running
    start: list[StepKey] = []
    for step in ready:
        # The step of an agent that is down only records the desired state, so it takes no slot. In
        # an update it waits for its turn too: an update keeps the order of its steps.
        may_start = free_slots > 0 or (step.agent_down and kind is not Kind.UPDATE)
        if may_start and len(start) < MAX_CONCURRENT_STEPS:
            start.append(step.key)
            free_slots -= not step.agent_down
    return start


def judge_outcome(
    kind: Kind, state: StepState, generation: int, outcome: BackendOutcome
) -> StepResult | None:
    """Return the result of a step whose backend has this outcome, None if it has none yet.

    ``state`` is one of AWAITING_OUTCOME, ``generation`` that of the desired state that the step has
    written.
    """
    # The outcome of an earlier desired state: the agent has not applied the new one yet.
    if outcome.generation < generation:
        return None
    error = outcome.error
    # A later job has changed the backend.
    if outcome.generation > generation:
        if kind is Kind.UNINSTALL:
            # Another driver uses the name now: the backend to uninstall is gone anyway.
            return StepResult(StepState.DONE)
        if state is StepState.PENDING_AGENT:
            # The host was down until a later job changed the backend.
            return StepResult(StepState.SKIPPED)
        error = f"backend {outcome.backend} now has another driver"
    return StepResult(StepState.DONE) if error is None else failure(kind, error)


def failure(kind: Kind, error: str) -> StepResult:
    """Return the result of a failed step: the host keeps or gets back its previous backend."""
    return StepResult(StepState.FAILED if kind is Kind.INSTALL else StepState.ROLLED_BACK, error)


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
    # A backend that was uninstalled does not get its former options back.
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


def summarize(counts: Mapping[StepState, int]) -> str:
    """Return the number of steps in each state as text: ``2 done, 1 rolled_back``."""
    return ", ".join(f"{number} {state}" for state in StepState if (number := counts.get(state)))
