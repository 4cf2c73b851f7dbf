# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is: laws that hold for any job, however its steps end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import rollout
from cyborg.core.rollout import AT_ONCE, BROKEN, ENDED, Kind, Step, StepState
from cyborg.core.wanted import Wanted, Wish

STEPS = st.lists(
    st.builds(
        Step,
        host=st.just("c"),
        backend=st.uuids().map(str),
        state=st.sampled_from(StepState),
        bound=st.integers(0, 2),
        down=st.booleans(),
        forced=st.booleans(),
    ),
    max_size=40,
)


def after(kind: Kind, steps: list[Step]) -> tuple[rollout.Plan, list[str]]:
    """Return the plan, and the states that its own changes lead to."""
    plan = rollout.plan(kind, steps)
    become = plan.become or {}
    return plan, [become.get((s.host, s.backend), s.state) for s in steps]


@given(st.sampled_from(Kind), STEPS)
def test_what_begins_has_waited(kind: Kind, steps: list[Step]) -> None:
    plan, states = after(kind, steps)
    by_key = {(s.host, s.backend): s for s in steps}
    for key in plan.begin:
        assert by_key[key].state in (StepState.WAITING, StepState.DRAINING)
        assert key not in (plan.become or {})
    rolling = sum(s.state is StepState.ROLLING for s in steps)
    new = [key for key in plan.begin if not by_key[key].down]
    limit = 1 if kind is Kind.UPDATE else AT_ONCE
    assert len(new) <= max(0, limit - rolling)
    assert len(plan.begin) <= AT_ONCE
    if plan.over is not None:
        assert not plan.begin
        assert all(state in ENDED for state in states)
        assert plan.over == (not any(s.state in BROKEN for s in steps))


@given(STEPS)
def test_a_failure_stops_an_update(steps: list[Step]) -> None:
    if any(s.state in BROKEN for s in steps):
        plan, states = after(Kind.UPDATE, steps)
        assert not plan.begin
        assert StepState.WAITING not in states


@given(STEPS)
def test_nothing_is_given_up_that_is_bound(steps: list[Step]) -> None:
    plan, _ = after(Kind.UNINSTALL, steps)
    bound = {(s.host, s.backend) for s in steps if s.bound and not s.forced}
    assert not bound & set(plan.begin)
    assert set(plan.become or {}) <= bound


@given(STEPS)
def test_no_update_overtakes_another(steps: list[Step]) -> None:
    plan, _ = after(Kind.UPDATE, steps)
    by_key = {(s.host, s.backend): s for s in steps}
    up = [n for n, key in enumerate(plan.begin) if not by_key[key].down]
    assert up in ([], [len(plan.begin) - 1]), "who is away has its turn before, not behind"
    if any(s.state is StepState.ROLLING for s in steps):
        assert not plan.begin


@given(st.sampled_from(Kind), st.lists(st.booleans(), min_size=1, max_size=40))
def test_it_comes_to_an_end(kind: Kind, good: list[bool]) -> None:
    steps = [Step("c", str(n), StepState.WAITING) for n in range(len(good))]
    for _ in range(2 * len(good) + 2):
        plan = rollout.plan(kind, steps)
        if plan.over is not None:
            break
        outcome = {
            ("c", str(n)): StepState.DONE if ok else StepState.FAILED for n, ok in enumerate(good)
        }
        become = dict(plan.become or {}) | {key: outcome[key] for key in plan.begin}
        steps = [Step(s.host, s.backend, become.get((s.host, s.backend), s.state)) for s in steps]
    assert plan.over == all(good)


def test_the_first_that_fails_leaves_the_later_ones() -> None:
    states = [StepState.DONE, StepState.ROLLED_BACK, StepState.WAITING]
    steps = [Step(f"c{n}", "fake", state) for n, state in enumerate(states)]
    plan = rollout.plan(Kind.UPDATE, steps)
    assert (plan.become, plan.over) == ({("c2", "fake"): StepState.UNTOUCHED}, False)


BEFORE = Wanted("gen0", "generic", Wish.DISABLED, 3, {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("kind", "arguments", "before", "wish", "config"),
    [
        (Kind.INSTALL, {"config": {"a": 7}}, None, Wish.ENABLED, {"a": 7}),
        (Kind.INSTALL, {}, BEFORE, Wish.ENABLED, {"a": 1, "b": 2}),
        (Kind.UPDATE, {"config": {"a": 7}, "wish": None}, BEFORE, Wish.DISABLED, {"a": 7, "b": 2}),
        (Kind.UPDATE, {"wish": "enabled"}, BEFORE, Wish.ENABLED, {"a": 1, "b": 2}),
        (Kind.UNINSTALL, {}, BEFORE, Wish.ABSENT, {"a": 1, "b": 2}),
        (Kind.UPDATE, {"config": {"a": None, "c": None}}, BEFORE, Wish.DISABLED, {"b": 2}),
        (
            Kind.INSTALL,
            {"config": {"c": 1}},
            Wanted("gen0", "generic", Wish.ABSENT, 3, {"a": 1}),
            Wish.ENABLED,
            {"c": 1},
        ),
    ],
)
def test_what_a_job_wants(
    kind: Kind, arguments: dict[str, object], before: Wanted | None, wish: Wish, config: object
) -> None:
    wanted = rollout.wish(kind, "generic", arguments, "gen0", before, 9)
    assert (wanted.wish, wanted.config, wanted.revision) == (wish, config, 9)


def test_the_summary() -> None:
    states = [StepState.ROLLED_BACK, StepState.DONE, StepState.DONE]
    assert rollout.summary(states) == "2 done, 1 rolled_back"
