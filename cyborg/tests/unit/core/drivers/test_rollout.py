# SPDX-License-Identifier: Apache-2.0
"""Plan of a rollout: invariants for any job and any result of its steps."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.drivers import rollout
from cyborg.core.drivers.desired_state import BackendOutcome, DesiredBackend, DesiredStatus
from cyborg.core.drivers.rollout import (
    FAILED_STATES,
    FINAL_STATES,
    MAX_CONCURRENT_STEPS,
    MAX_REVERTED_STEPS,
    Kind,
    Step,
    StepResult,
    StepState,
)

STEPS = st.lists(
    st.builds(
        Step,
        host=st.just("c"),
        backend=st.uuids().map(str),
        state=st.sampled_from(StepState),
        bound_handles=st.integers(0, 2),
        agent_down=st.booleans(),
        forced=st.booleans(),
    ),
    max_size=40,
)


def apply_plan(kind: Kind, steps: list[Step]) -> tuple[rollout.Plan, list[str]]:
    """Return the plan, and the states after its transitions."""
    plan = rollout.plan(kind, steps)
    transitions = plan.transitions or {}
    return plan, [transitions.get(s.key, s.state) for s in steps]


@given(st.sampled_from(Kind), STEPS)
def test_plan_starts_pending_steps_within_limit(kind: Kind, steps: list[Step]) -> None:
    plan, states = apply_plan(kind, steps)
    by_key = {(s.host, s.backend): s for s in steps}
    for key in plan.start:
        assert by_key[key].state in (StepState.WAITING, StepState.DRAINING)
        assert key not in (plan.transitions or {})
    in_progress = sum(s.state is StepState.IN_PROGRESS for s in steps)
    new = [key for key in plan.start if not by_key[key].agent_down]
    limit = 1 if kind is Kind.UPDATE else MAX_CONCURRENT_STEPS
    assert len(new) <= max(0, limit - in_progress)
    assert len(plan.start) <= MAX_CONCURRENT_STEPS
    if plan.succeeded is not None:
        assert not plan.start
        assert all(state in FINAL_STATES for state in states)
        assert plan.succeeded == (not any(s.state in FAILED_STATES for s in steps))


@given(STEPS)
def test_plan_failed_update_starts_nothing(steps: list[Step]) -> None:
    if any(s.state in FAILED_STATES for s in steps):
        plan, states = apply_plan(Kind.UPDATE, steps)
        assert not plan.start
        assert StepState.WAITING not in states


@given(STEPS)
def test_plan_uninstall_waits_for_bound_handles(steps: list[Step]) -> None:
    plan, _ = apply_plan(Kind.UNINSTALL, steps)
    bound = {(s.host, s.backend) for s in steps if s.bound_handles and not s.forced}
    assert not bound & set(plan.start)
    assert set(plan.transitions or {}) <= bound


@given(STEPS)
def test_plan_update_keeps_step_order(steps: list[Step]) -> None:
    plan, _ = apply_plan(Kind.UPDATE, steps)
    by_key = {(s.host, s.backend): s for s in steps}
    up = [n for n, key in enumerate(plan.start) if not by_key[key].agent_down]
    assert up in ([], [len(plan.start) - 1]), (
        "steps of agents that are down precede the running one"
    )
    if any(s.state is StepState.IN_PROGRESS for s in steps):
        assert not plan.start


@given(st.sampled_from(Kind), st.lists(st.booleans(), min_size=1, max_size=40))
def test_plan_terminates_with_result(kind: Kind, outcomes: list[bool]) -> None:
    steps = [Step("c", str(n), StepState.WAITING) for n in range(len(outcomes))]
    for _ in range(2 * len(outcomes) + 2):
        plan = rollout.plan(kind, steps)
        if plan.succeeded is not None:
            break
        outcome = {
            ("c", str(n)): StepState.DONE if ok else StepState.FAILED
            for n, ok in enumerate(outcomes)
        }
        transitions = dict(plan.transitions or {}) | {key: outcome[key] for key in plan.start}
        steps = [Step(s.host, s.backend, transitions.get(s.key, s.state)) for s in steps]
    assert plan.succeeded == all(outcomes)


def test_plan_failed_update_skips_later_steps() -> None:
    states = [StepState.DONE, StepState.ROLLED_BACK, StepState.WAITING]
    steps = [Step(f"c{n}", "fake", state) for n, state in enumerate(states)]
    plan = rollout.plan(Kind.UPDATE, steps)
    assert (plan.transitions, plan.succeeded) == ({("c2", "fake"): StepState.SKIPPED}, False)


@given(st.sampled_from(Kind), STEPS)
def test_plan_reverts_pending_agents_of_failed_updates_only(kind: Kind, steps: list[Step]) -> None:
    plan = rollout.plan(kind, steps)
    failed = kind is Kind.UPDATE and any(s.state in FAILED_STATES for s in steps)
    pending = [(s.host, s.backend) for s in steps if s.state is StepState.PENDING_AGENT]
    assert list(plan.revert) == (pending[:MAX_REVERTED_STEPS] if failed else [])


def test_plan_failed_update_ends_after_the_last_revert() -> None:
    states = [StepState.PENDING_AGENT] * (MAX_REVERTED_STEPS + 1) + [StepState.ROLLED_BACK]
    steps = [Step(f"c{n}", "fake", state) for n, state in enumerate(states)]
    plan = rollout.plan(Kind.UPDATE, steps)
    assert (len(plan.revert), plan.succeeded) == (MAX_REVERTED_STEPS, None)
    plan = rollout.plan(Kind.UPDATE, steps[MAX_REVERTED_STEPS:])
    assert (len(plan.revert), plan.succeeded) == (1, False)


@pytest.mark.parametrize(
    ("kind", "state", "generation", "error", "result"),
    [
        (Kind.UPDATE, StepState.IN_PROGRESS, 6, None, None),
        (Kind.UPDATE, StepState.PENDING_AGENT, 6, "no card", None),
        (Kind.UPDATE, StepState.IN_PROGRESS, 7, None, StepResult(StepState.DONE)),
        (Kind.UPDATE, StepState.PENDING_AGENT, 7, None, StepResult(StepState.DONE)),
        (
            Kind.UPDATE,
            StepState.PENDING_AGENT,
            7,
            "no card",
            StepResult(StepState.ROLLED_BACK, "no card"),
        ),
        (
            Kind.INSTALL,
            StepState.PENDING_AGENT,
            7,
            "no card",
            StepResult(StepState.FAILED, "no card"),
        ),
        (Kind.UPDATE, StepState.PENDING_AGENT, 8, "no card", StepResult(StepState.SKIPPED)),
        (
            Kind.UPDATE,
            StepState.IN_PROGRESS,
            8,
            None,
            StepResult(StepState.ROLLED_BACK, "backend fake now has another driver"),
        ),
        (Kind.UNINSTALL, StepState.IN_PROGRESS, 8, "no card", StepResult(StepState.DONE)),
        (Kind.UNINSTALL, StepState.PENDING_AGENT, 8, None, StepResult(StepState.DONE)),
    ],
)
def test_outcome_of_a_generation_decides_the_step(
    kind: Kind, state: StepState, generation: int, error: str | None, result: StepResult | None
) -> None:
    outcome = BackendOutcome("fake", generation, error)
    assert rollout.judge_outcome(kind, state, 7, outcome) == result


PREVIOUS = DesiredBackend("gen0", "generic", DesiredStatus.DISABLED, 3, {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("kind", "arguments", "previous", "status", "config"),
    [
        (Kind.INSTALL, {"config": {"a": 7}}, None, DesiredStatus.ENABLED, {"a": 7}),
        (Kind.INSTALL, {}, PREVIOUS, DesiredStatus.ENABLED, {"a": 1, "b": 2}),
        (
            Kind.UPDATE,
            {"config": {"a": 7}, "status": None},
            PREVIOUS,
            DesiredStatus.DISABLED,
            {"a": 7, "b": 2},
        ),
        (Kind.UPDATE, {"status": "enabled"}, PREVIOUS, DesiredStatus.ENABLED, {"a": 1, "b": 2}),
        (Kind.UNINSTALL, {}, PREVIOUS, DesiredStatus.ABSENT, {"a": 1, "b": 2}),
        (
            Kind.UPDATE,
            {"config": {"a": None, "c": None}},
            PREVIOUS,
            DesiredStatus.DISABLED,
            {"b": 2},
        ),
        (
            Kind.INSTALL,
            {"config": {"c": 1}},
            DesiredBackend("gen0", "generic", DesiredStatus.ABSENT, 3, {"a": 1}),
            DesiredStatus.ENABLED,
            {"c": 1},
        ),
    ],
)
def test_desired_backend_of_job(
    kind: Kind,
    arguments: dict[str, object],
    previous: DesiredBackend | None,
    status: DesiredStatus,
    config: object,
) -> None:
    desired = rollout.desired_backend(kind, "generic", arguments, "gen0", previous, 9)
    assert (desired.status, desired.config, desired.generation) == (status, config, 9)


def test_summarize() -> None:
    states = [StepState.ROLLED_BACK, StepState.DONE, StepState.DONE]
    assert rollout.summarize(Counter(states)) == "2 done, 1 rolled_back"
