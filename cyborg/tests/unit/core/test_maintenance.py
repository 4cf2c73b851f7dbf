# SPDX-License-Identifier: Apache-2.0
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.attachments.attachment import ATTACH_STEPS, RELEASE_STEPS, AttachmentState, Step
from cyborg.core.errors import Invalid
from cyborg.core.maintenance import (
    SuccessorMode,
    SuccessorState,
    parse_window,
    retry_time,
    successor_state,
)

NOW = datetime(2026, 3, 1, 12)
LONGEST = timedelta(days=30)
DEVICE = str(uuid4())


def request(until: Any, **values: Any) -> dict[str, Any]:
    return {"uuid": DEVICE, "until": until, **values}


@given(
    st.timedeltas(min_value=timedelta(microseconds=1), max_value=LONGEST),
    st.timezones(),
    st.sampled_from([None, *SuccessorMode]),
)
def test_parse_window_keeps_any_time_of_any_zone_within_the_limit(
    length: timedelta, zone: Any, successor: SuccessorMode | None
) -> None:
    until = NOW + length
    text = until.replace(tzinfo=UTC).astimezone(zone).isoformat()
    # Old time zones have offsets with seconds, which ISO 8601 of Python can express too.
    window = parse_window(request(text, successor=successor), NOW, LONGEST)
    assert (window.device, window.until, window.successor) == (DEVICE, until, successor)


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=1000)))
def test_parse_window_refuses_any_other_time(length: timedelta) -> None:
    with pytest.raises(Invalid, match="in the past"):
        parse_window(request((NOW - length).isoformat()), NOW, LONGEST)
    late = NOW + LONGEST + length + timedelta(microseconds=1)
    with pytest.raises(Invalid, match="at most 2592000 seconds"):
        parse_window(request(late.isoformat()), NOW, LONGEST)


@given(st.one_of(st.none(), st.text(), st.integers(), st.lists(st.integers())))
def test_parse_window_refuses_what_is_no_time(value: Any) -> None:
    with pytest.raises(Invalid) as caught:
        parse_window(request(value), NOW, LONGEST)
    assert caught.value.details["field"] == "until"


@pytest.mark.parametrize("value", ["manual", "", 1, ["auto"], {"auto": 1}])
def test_parse_window_refuses_other_successors(value: Any) -> None:
    with pytest.raises(Invalid, match="successor"):
        parse_window(request("2026-03-02", successor=value), NOW, LONGEST)


def test_successor_state_of_each_step() -> None:
    for step in ATTACH_STEPS:
        found = successor_state(AttachmentState.ATTACHING, step)
        assert found is SuccessorState.PREPARING
    for step in RELEASE_STEPS:
        found = successor_state(AttachmentState.ATTACHING, step)
        assert found is SuccessorState.FAILED, "it is being undone"
    waiting = {
        step
        for step in RELEASE_STEPS
        if successor_state(AttachmentState.DETACHING, step) is SuccessorState.AWAITING_RESTART
    }
    assert waiting == {Step.HIDE, Step.GUEST}
    assert successor_state(AttachmentState.DETACHING, Step.CLEAN) is SuccessorState.RELEASING
    assert successor_state(AttachmentState.ERROR, None) is SuccessorState.FAILED


def test_retry_time_doubles_between_a_minute_and_an_hour() -> None:
    now, delays = NOW, []
    for _ in range(9):
        following = retry_time(NOW, now)
        delays.append((following - now).total_seconds())
        now = following
    assert delays == [60, 60, 120, 240, 480, 960, 1920, 3600, 3600]
