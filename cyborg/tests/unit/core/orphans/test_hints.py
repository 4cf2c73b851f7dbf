# SPDX-License-Identifier: Apache-2.0
"""What Nova's notifications mean: parsing, the time of a check, and the decision."""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cyborg
from cyborg.core.errors import Invalid
from cyborg.core.orphans.hints import (
    CHECKS,
    MAX_AGE,
    MIN_BIND_AGE,
    Decision,
    Hint,
    decide,
    next_check,
    parse_notification,
    postpone,
)
from cyborg.core.orphans.orphans import Presence
from cyborg.tests.fixtures.bus.nova_notifications import make_payload

INSTANCE = "178b0921-8f85-4257-88b6-2e743b5a975c"
HINT = Hint(INSTANCE, due=1.0, received=0.0, checks=3)

json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values),
    max_leaves=10,
)
events = st.sampled_from(sorted(CHECKS)) | st.text(max_size=30) | json_values


def parse(event: Any, payload: Any, now: float = 100.0) -> Hint | None:
    return parse_notification({"event_type": event, "payload": payload}, now)


@pytest.mark.parametrize("event", sorted(CHECKS))
def test_parse_event_that_releases_returns_hint(event: str) -> None:
    hint = parse(event, make_payload(INSTANCE.upper()))
    plan = CHECKS[event]
    assert hint == Hint(INSTANCE, 100.0 + plan.delay, 100.0, plan.checks)


def test_parse_deletion_is_checked_within_seconds() -> None:
    assert CHECKS["instance.delete.end"].delay <= 2
    assert CHECKS["instance.shelve_offload.end"].delay <= 2
    # Nova deletes the allocation between both.
    assert CHECKS["instance.delete.start"].delay > CHECKS["instance.delete.end"].delay


@pytest.mark.parametrize(
    "event",
    [
        "instance.soft_delete.end",
        "instance.restore.end",
        "instance.shelve.end",
        "instance.unshelve.end",
        "instance.create.end",
        "instance.update",
        "instance.resize.end",
        "instance.live_migration_pre.end",
        "compute.instance.delete.end",
        "INSTANCE.DELETE.END",
        "instance.delete.end ",
    ],
)
def test_parse_other_event_returns_none_without_reading_its_payload(event: str) -> None:
    assert parse(event, None) is None


@pytest.mark.parametrize(
    ("event", "payload", "field"),
    [
        (None, make_payload(INSTANCE), "event_type"),
        (["instance.delete.end"], make_payload(INSTANCE), "event_type"),
        ("x" * 256, make_payload(INSTANCE), "event_type"),
        ("instance.delete.end", None, "payload"),
        ("instance.delete.end", "{}", "payload"),
        ("instance.delete.end", {}, "nova_object.namespace"),
        (
            "instance.delete.end",
            make_payload(INSTANCE, **{"nova_object.namespace": ["nova"]}),
            "nova_object.namespace",
        ),
        (
            "instance.delete.end",
            make_payload(INSTANCE, **{"nova_object.version": 1.8}),
            "nova_object.version",
        ),
        (
            "instance.delete.end",
            make_payload(INSTANCE, **{"nova_object.version": "2.0"}),
            "nova_object.version",
        ),
        (
            "instance.delete.end",
            make_payload(INSTANCE, **{"nova_object.data": None}),
            "nova_object.data",
        ),
        ("instance.delete.end", make_payload(None), "uuid"),
        ("instance.delete.end", make_payload(7), "uuid"),
        ("instance.delete.end", make_payload("' OR 1=1"), "uuid"),
        ("instance.delete.end", make_payload("x" * 10**6), "uuid"),
    ],
)
def test_parse_malformed_notification_raises_invalid(event: Any, payload: Any, field: str) -> None:
    with pytest.raises(Invalid) as raised:
        parse(event, payload)
    assert raised.value.details["field"] == field
    assert len(raised.value.message) < 500


@given(events, json_values, json_values, json_values)
def test_parse_any_json_returns_uuid_or_raises_invalid(
    event: Any, version: Any, data: Any, uuid: Any
) -> None:
    payloads: list[Any] = [
        data,
        make_payload(uuid),
        make_payload(INSTANCE, **{"nova_object.version": version}),
        make_payload(INSTANCE, **{"nova_object.data": data}),
    ]
    for payload in payloads:
        try:
            hint = parse(event, payload)
        except Invalid:
            continue
        if hint is not None:
            assert isinstance(payload, Mapping)
            assert str(UUID(hint.instance)) == hint.instance


def test_decide_releases_only_what_both_services_have_given_up() -> None:
    decisions = {presence: decide(presence, MIN_BIND_AGE) for presence in Presence}
    assert decisions == {
        Presence.NOT_FOUND: Decision.DELETE,
        Presence.OFFLOADED: Decision.UNBIND,
        Presence.ELSEWHERE: Decision.SUSPECT,
        Presence.ON_HOST: Decision.SUSPECT,
        Presence.UNKNOWN: Decision.RETRY,
    }


def test_decide_releases_no_new_bind() -> None:
    age = MIN_BIND_AGE - timedelta(seconds=1)
    decisions = {presence: decide(presence, age) for presence in Presence}
    assert decisions == {
        Presence.NOT_FOUND: Decision.RETRY,
        Presence.OFFLOADED: Decision.RETRY,
        Presence.ELSEWHERE: Decision.SUSPECT,
        Presence.ON_HOST: Decision.SUSPECT,
        Presence.UNKNOWN: Decision.RETRY,
    }


def test_next_check_of_settled_instance_is_limited() -> None:
    times, hint, now = [], HINT, 1.0
    while (following := next_check(hint, now, answered=True)) is not None:
        hint, now = following, following.due
        times.append(now)
    assert times == [6.0, 31.0]


def test_next_check_while_a_service_is_away_backs_off_until_the_hint_is_old() -> None:
    times, hint, now = [], HINT, 1.0
    while (following := next_check(hint, now, answered=False)) is not None:
        hint, now = following, following.due
        times.append(now)
    assert times[:6] == [6.0, 16.0, 36.0, 76.0, 136.0, 196.0]
    assert MAX_AGE <= times[-1] <= MAX_AGE + 60
    # The checks of the plan are not used up by an outage.
    assert hint.checks == HINT.checks


def test_next_check_after_a_failure_is_extended_by_the_jitter() -> None:
    pauses = []
    for jitter in (0.0, 1.0):
        following = next_check(HINT, 1.0, answered=False, jitter=jitter)
        assert following is not None
        pauses.append(following.due - 1.0)
    assert pauses == [5.0, 6.25]


def test_postpone_counts_no_failure_and_ends_when_the_hint_is_old() -> None:
    assert postpone(HINT, 1.0) == replace(HINT, due=6.0)
    assert postpone(HINT, 1.0, jitter=1.0) == replace(HINT, due=7.25)
    assert postpone(HINT, MAX_AGE) is None


def test_merge_keeps_both_times_and_the_most_checks() -> None:
    start = Hint(INSTANCE, due=61.0, received=1.0, checks=1)
    end = Hint(INSTANCE, due=4.0, received=3.0, checks=3)
    assert start.merge(end) == end.merge(start) == Hint(INSTANCE, 4.0, 3.0, 3, last=61.0)
    assert start.merge(replace(end, failures=5)).failures == 0


@pytest.mark.parametrize(
    ("checks", "last", "expected"),
    [
        (1, 61.0, [61.0]),
        (1, 0.5, []),
        (3, 61.0, [6.0, 31.0, 61.0]),
        (3, 10.0, [6.0, 10.0, 35.0]),
    ],
)
def test_next_check_includes_the_last_time_of_a_merged_hint(
    checks: int, last: float, expected: list[float]
) -> None:
    times, now = [], 1.0
    hint = Hint(INSTANCE, due=1.0, received=0.0, checks=checks, last=last)
    while (following := next_check(hint, now, answered=True)) is not None:
        hint, now = following, following.due
        times.append(now)
    assert times == expected


ANSWERS = {
    "has no such server (404, as above)": Presence.NOT_FOUND,
    "shows it as ``SHELVED_OFFLOADED``, on no host": Presence.OFFLOADED,
    "shows it elsewhere, or otherwise on no host": Presence.ELSEWHERE,
    "shows it on the device's host, or hides hosts": Presence.ON_HOST,
    "does not answer": Presence.UNKNOWN,
}
OUTCOMES = {
    "is deleted at once": Decision.DELETE,
    "becomes ``Unbound`` at once": Decision.UNBIND,
    "is marked as suspected: a round": Decision.SUSPECT,
    "is marked as suspected and stays ``Bound``": Decision.SUSPECT,
    "is marked as suspected, and checked again": Decision.RETRY,
}


@pytest.mark.static
def test_documentation_lists_the_decision_for_every_answer_of_nova() -> None:
    page = Path(cyborg.__file__).parents[1] / "doc" / "source" / "admin" / "orphans.rst"
    table = page.read_text(encoding="utf-8").partition("the answer of Nova decides:")[2]
    rows = [re.split(r"  +", line, maxsplit=1) for line in table.split("=\n", 3)[2].splitlines()]
    documented = {
        ANSWERS[row[0]]: next(OUTCOMES[text] for text in OUTCOMES if row[1].startswith(text))
        for row in rows
        if row[0] and not row[0].startswith("=")
    }
    assert documented == {presence: decide(presence, MIN_BIND_AGE) for presence in Presence}


@pytest.mark.static
def test_documentation_lists_every_event_with_its_delay() -> None:
    page = Path(cyborg.__file__).parents[1] / "doc" / "source" / "admin" / "orphans.rst"
    text = page.read_text(encoding="utf-8")
    documented = dict(re.findall(r"^``(instance\.[a-z_.]+)`` +after (\d+) s", text, re.MULTILINE))
    assert documented == {event: f"{plan.delay:.0f}" for event, plan in CHECKS.items()}
