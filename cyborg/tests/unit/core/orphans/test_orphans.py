# SPDX-License-Identifier: Apache-2.0
"""Classification of orphaned ARQs."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.explain.predicates import Predicate
from cyborg.core.hosts import Instance
from cyborg.core.orphans.orphans import (
    MIN_SAFETY_LIMIT,
    BoundArq,
    LockedArqRow,
    Presence,
    classify,
    classify_presence,
    group_by_owner,
    is_same_bind,
    is_unchanged,
    providers_to_check,
    within_safety_limit,
    without_allocation,
)
from cyborg.core.self_heal import CorrectiveAction

NOW = datetime(2026, 5, 1)
GRACE = timedelta(seconds=600)
BOUND = timedelta(seconds=30)
ages = st.integers(-100, 5000).map(lambda s: NOW - timedelta(seconds=s))
bound_arqs = st.builds(
    BoundArq,
    id=st.integers(1, 10**6),
    uuid=st.uuids().map(str),
    instance=st.sampled_from(["i1", "i2", "i3"]),
    provider=st.sampled_from(["p1", "p2", "p3"]),
    bound_at=ages,
    orphan_since=st.none() | ages,
    project=st.sampled_from([None, "a", "b"]),
    owner_verified=st.booleans(),
)
views = st.dictionaries(
    st.sampled_from(["p1", "p2", "p3"]),
    st.none() | st.frozensets(st.sampled_from(["i1", "i2", "i3"])),
)
OLD = BoundArq(1, "u", "i1", "p1", NOW - timedelta(days=1))
LOCKED: LockedArqRow = {
    "state": "Bound",
    "instance_uuid": "i1",
    "device_rp_uuid": "p1",
    "orphan_since": None,
    "created_at": NOW - timedelta(days=9),
    "updated_at": OLD.bound_at,
}


@given(st.lists(bound_arqs, unique_by=lambda h: h.uuid), views, st.none() | st.just(GRACE))
def test_classify_invariants(
    arqs: list[BoundArq], consumers: dict[str, Any], grace_period: timedelta | None
) -> None:
    result = classify(arqs, consumers, NOW, bound_before=NOW - BOUND, grace_period=grace_period)
    flagged = [*result.suspects, *result.recovered, *result.orphans]
    assert len({arq.uuid for arq in flagged}) == len(flagged)
    assert {arq.uuid for arq in (*flagged, *result.unowned)} <= {arq.uuid for arq in arqs}
    read = [arq for arq in arqs if consumers.get(arq.provider) is not None]
    assert result.checked == len(read)
    for arq in (*flagged, *result.unowned):
        assert arq in read
    for arq in (*result.suspects, *result.orphans):
        assert arq.instance not in consumers[arq.provider]
    for arq in (*result.recovered, *result.unowned):
        assert arq.instance in consumers[arq.provider]
    for arq in result.suspects:
        assert arq.orphan_since is None
        assert NOW - arq.bound_at >= BOUND
    for arq in result.orphans:
        assert grace_period is not None
        assert arq.orphan_since is not None
        assert NOW - arq.orphan_since >= GRACE
    # Whoever has an allocation is not under suspicion afterwards.
    left = {h.uuid for h in read if h.orphan_since and h.instance in consumers[h.provider]}
    assert left == {arq.uuid for arq in result.recovered}


@given(bound_arqs, st.integers(10, 2000), st.integers(0, 2000))
def test_classify_leak_is_orphan_after_grace_period(bound: BoundArq, step: int, first: int) -> None:
    """An ARQ that is checked each round from its bind on waits for one grace period."""
    arq = replace(bound, orphan_since=None, bound_at=NOW)
    now = NOW + timedelta(seconds=first % step)
    for _ in range(10_000):
        result = classify(
            [arq], {arq.provider: ["another"]}, now, bound_before=now, grace_period=GRACE
        )
        if result.orphans:
            break
        if result.suspects:
            arq = replace(arq, orphan_since=now)
        now += timedelta(seconds=step)
    assert result.orphans == (arq,)
    assert now - NOW >= GRACE
    assert now - NOW < GRACE + timedelta(seconds=2 * step)


def test_classify_unread_provider_is_skipped() -> None:
    orphan = replace(OLD, orphan_since=NOW - timedelta(days=1), owner_verified=False)
    for view in ({}, {"p1": None}, {"p2": ["i1"]}):
        assert classify([OLD, orphan], view, NOW, bound_before=NOW, grace_period=GRACE).checked == 0
    assert classify([orphan], {"p1": []}, NOW, bound_before=NOW, grace_period=GRACE).orphans == (
        orphan,
    )
    assert classify(
        [orphan], {"p1": ["i1"]}, NOW, bound_before=NOW, grace_period=GRACE
    ).recovered == (orphan,)


def test_group_by_owner_known_projects_only() -> None:
    unowned = [replace(OLD, id=n, instance=i) for n, i in enumerate(["i1", "i2", "i1", "i3"])]
    flagged = {"i1": "a", "i2": None}
    assert group_by_owner(unowned, flagged) == {("i1", "a"): (0, 2)}


@pytest.mark.parametrize(
    ("orphans", "of", "allowed"),
    [
        (0, 0, True),
        (MIN_SAFETY_LIMIT, MIN_SAFETY_LIMIT, True),
        (MIN_SAFETY_LIMIT + 1, MIN_SAFETY_LIMIT + 1, False),
        (50, 100, True),
        (51, 100, False),
    ],
)
def test_within_safety_limit(orphans: int, of: int, allowed: bool) -> None:
    assert within_safety_limit(orphans, of) is allowed


@pytest.mark.parametrize(
    "change",
    [
        {"state": "Unbound"},
        {"instance_uuid": "i2"},
        {"device_rp_uuid": "p2"},
        {"orphan_since": None},
        {"orphan_since": NOW + timedelta(microseconds=1)},
    ],
    ids=str,
)
def test_is_unchanged_modified_row_is_false(change: dict[str, Any]) -> None:
    classified = replace(OLD, orphan_since=NOW)
    assert is_unchanged({**LOCKED, "orphan_since": NOW}, classified)
    changed = cast(LockedArqRow, {**LOCKED, "orphan_since": NOW, **change})
    assert not is_unchanged(changed, classified)


@pytest.mark.parametrize(
    "change",
    [
        {"state": "BindStarted"},
        {"instance_uuid": "i2"},
        {"device_rp_uuid": "p2"},
        {"updated_at": NOW},
    ],
    ids=str,
)
def test_is_same_bind_modified_row_is_false(change: dict[str, Any]) -> None:
    assert is_same_bind(LOCKED, OLD)
    assert not is_same_bind(cast(LockedArqRow, {**LOCKED, **change}), OLD)


def test_without_allocation_order() -> None:
    arqs = [replace(OLD, id=n, instance=f"i{n}") for n in range(4)]
    arqs[1] = replace(arqs[1], orphan_since=NOW)
    result = without_allocation(arqs, {"i0"})
    assert [arq.id for arq in result] == [1, 3, 2]


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        (None, Presence.NOT_FOUND),
        (Instance("i", "DELETED"), Presence.NOT_FOUND),
        (Instance("i", "SOFT_DELETED"), Presence.ELSEWHERE),
        (Instance("i", "ACTIVE", "other"), Presence.ELSEWHERE),
        (Instance("i", "ERROR"), Presence.ELSEWHERE),
        (Instance("i", "SHELVED_OFFLOADED"), Presence.OFFLOADED),
        (Instance("i", "SHELVED_OFFLOADED", task="unshelving"), Presence.ELSEWHERE),
        (Instance("i", "SHELVED_OFFLOADED", "other"), Presence.ELSEWHERE),
        (Instance("i", "SHELVED_OFFLOADED", host_visible=False), Presence.ON_HOST),
        (Instance("i", "SHELVED", "host-1"), Presence.ON_HOST),
        (Instance("i", "ACTIVE", "h", "HOST-1"), Presence.ON_HOST),
        (Instance("i", "UNKNOWN", host_visible=False), Presence.ON_HOST),
    ],
    ids=str,
)
def test_classify_presence(instance: Instance | None, expected: Presence) -> None:
    assert classify_presence(instance, "host-1") is expected


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ({}, ()),
        ({"r": [{"provider": "p", "code": "taken", "handles": 2}]}, ("p",)),
        ({"r": [{"provider": "p", "code": "cleaning"}]}, ()),
        (
            {
                "r": [
                    {"provider": "p", "code": predicate}
                    for predicate in (Predicate.TAKEN, Predicate.CLEANING, Predicate.DRAINING)
                ],
                "q": [
                    {"provider": "o", "code": predicate}
                    for predicate in (Predicate.TAKEN_IN_CALL, Predicate.TAKEN)
                ],
            },
            ("o", "p"),
        ),
        (
            {
                "r": [{"provider": "p", "code": "taken"}],
                "q": [{"provider": "p", "code": "trait_missing"}],
            },
            (),
        ),
    ],
    ids=str,
)
def test_providers_to_check_only_temporary_reasons(
    reasons: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert providers_to_check(reasons) == expected


def test_every_corrective_action_has_description() -> None:
    assert all(action.description.endswith(".") for action in CorrectiveAction)
