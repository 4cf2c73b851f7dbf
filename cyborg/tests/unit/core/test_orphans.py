# SPDX-License-Identifier: Apache-2.0
"""Which bound requests are orphans."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.deed import SENTENCES, Deed
from cyborg.core.orphans import FEW, Held, believable, judge, owners, unchanged

NOW = datetime(2026, 5, 1)
GRACE = timedelta(seconds=600)
ages = st.integers(-100, 5000).map(lambda s: NOW - timedelta(seconds=s))
helds = st.builds(
    Held,
    id=st.integers(1, 10**6),
    uuid=st.uuids().map(str),
    instance=st.sampled_from(["i1", "i2", "i3"]),
    provider=st.sampled_from(["p1", "p2", "p3"]),
    bound_at=ages,
    orphan_since=st.none() | ages,
    project=st.sampled_from([None, "a", "b"]),
    owner_known=st.booleans(),
)
views = st.dictionaries(
    st.sampled_from(["p1", "p2", "p3"]),
    st.none() | st.frozensets(st.sampled_from(["i1", "i2", "i3"])),
)
OLD = Held(1, "u", "i1", "p1", NOW - timedelta(days=1))


@given(st.lists(helds, unique_by=lambda h: h.uuid), views, st.none() | st.just(GRACE))
def test_what_a_look_may_say(
    held: list[Held], consumers: dict[str, Any], grace: timedelta | None
) -> None:
    found = judge(held, consumers, NOW, settle=GRACE, grace=grace)
    told = [*found.suspects, *found.recovered, *found.orphans]
    assert len({one.uuid for one in told}) == len(told)
    assert {one.uuid for one in (*told, *found.unowned)} <= {one.uuid for one in held}
    read = [one for one in held if consumers.get(one.provider) is not None]
    assert found.judged == len(read)
    for one in (*told, *found.unowned):
        assert one in read
    for one in (*found.suspects, *found.orphans):
        assert one.instance not in consumers[one.provider]
    for one in (*found.recovered, *found.unowned):
        assert one.instance in consumers[one.provider]
    for one in found.suspects:
        assert one.orphan_since is None
        assert NOW - one.bound_at >= GRACE
    for one in found.orphans:
        assert grace is not None
        assert one.orphan_since is not None
        assert NOW - one.orphan_since >= GRACE
    # Whoever has an allocation is not under suspicion afterwards.
    left = {h.uuid for h in read if h.orphan_since and h.instance in consumers[h.provider]}
    assert left == {one.uuid for one in found.recovered}


@given(helds, st.integers(10, 2000))
def test_nobody_is_an_orphan_before_a_second_look(held: Held, step: int) -> None:
    """From its bind on, looked at again and again: two times of grace pass before the end."""
    one = replace(held, orphan_since=None, bound_at=NOW)
    now = NOW
    for _ in range(10_000):
        found = judge([one], {one.provider: ["another"]}, now, settle=GRACE, grace=GRACE)
        if found.orphans:
            break
        if found.suspects:
            one = replace(one, orphan_since=now)
        now += timedelta(seconds=step)
    assert found.orphans == (one,)
    assert now - NOW >= 2 * GRACE
    assert now - NOW < 2 * GRACE + timedelta(seconds=2 * step)


def test_a_provider_that_was_not_read_decides_nothing() -> None:
    lost = replace(OLD, orphan_since=NOW - timedelta(days=1), owner_known=False)
    for view in ({}, {"p1": None}, {"p2": ["i1"]}):
        assert judge([OLD, lost], view, NOW, settle=GRACE, grace=GRACE).judged == 0
    assert judge([lost], {"p1": []}, NOW, settle=GRACE, grace=GRACE).orphans == (lost,)
    assert judge([lost], {"p1": ["i1"]}, NOW, settle=GRACE, grace=GRACE).recovered == (lost,)


def test_owners_are_known_or_not() -> None:
    unowned = [replace(OLD, id=n, instance=i) for n, i in enumerate(["i1", "i2", "i1", "i3"])]
    told = {"i1": "a", "i2": None}
    assert owners(unowned, told) == {("i1", "a"): (0, 2)}


@pytest.mark.parametrize(
    ("lost", "of", "believed"),
    [(0, 0, True), (FEW, FEW, True), (FEW + 1, FEW + 1, False), (50, 100, True), (51, 100, False)],
)
def test_too_many_orphans_are_not_believed(lost: int, of: int, believed: bool) -> None:
    assert believable(lost, of) is believed


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
def test_what_changed_meanwhile_is_left_alone(change: dict[str, Any]) -> None:
    row = {"state": "Bound", "instance_uuid": "i1", "device_rp_uuid": "p1", "orphan_since": NOW}
    seen = replace(OLD, orphan_since=NOW)
    assert unchanged(row, seen)
    assert not unchanged(row | change, seen)


def test_every_deed_has_a_sentence() -> None:
    assert set(SENTENCES) == set(Deed)
    assert all(sentence.endswith(".") for sentence in SENTENCES.values())
