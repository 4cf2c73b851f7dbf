# SPDX-License-Identifier: Apache-2.0
"""The activity of a job, and its form in the answer of an agent."""

import contextvars
import threading
from typing import Any

import pytest

from cyborg.core.jobs.progress import (
    MAX_STEP,
    Activity,
    ActivityRecorder,
    parse_activity,
    show_activity,
)


def test_show_activity_nested_restores_the_step_around_it() -> None:
    recorder = ActivityRecorder()
    with recorder.record(), show_activity("program card"):
        with show_activity("fetch image", 10) as set_done:
            assert recorder.current == Activity("fetch image", 0, 10)
            set_done(4)
            assert recorder.current == Activity("fetch image", 4, 10)
        assert recorder.current == Activity("program card")
    assert recorder.current is None


def test_show_activity_of_a_failed_step_is_not_left_behind() -> None:
    recorder = ActivityRecorder()
    with recorder.record(), pytest.raises(ZeroDivisionError), show_activity("divide"):
        raise ZeroDivisionError
    assert recorder.current is None


def test_show_activity_outside_of_a_job_does_nothing() -> None:
    recorder = ActivityRecorder()
    with recorder.record():
        pass
    with show_activity("fetch image", 10) as set_done:
        set_done(4)
    assert recorder.current is None


def test_activity_of_jobs_in_parallel_is_separate() -> None:
    first, second = ActivityRecorder(), ActivityRecorder()
    with first.record(), show_activity("first"):

        def run() -> None:
            with second.record(), show_activity("second"):
                seen.append((first.current, second.current))

        seen: list[Any] = []
        thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))
        thread.start()
        thread.join()
        assert seen == [(Activity("first"), Activity("second"))]


@pytest.mark.parametrize(
    ("activity", "text"),
    [
        (Activity("erase"), "erase"),
        (Activity("fetch", 0, 3), "0 % fetch"),
        (Activity("fetch", 2, 3), "66 % fetch"),
        (Activity("fetch", 0, 0), "fetch"),
    ],
)
def test_text_begins_with_the_percentage(activity: Activity, text: str) -> None:
    assert str(activity) == text


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"step": "fetch", "done": 2, "total": 3}, Activity("fetch", 2, 3)),
        ({"step": "fetch", "unit": "from a newer agent"}, Activity("fetch")),
        ({"step": "a\nb\0c" + "x" * 999}, Activity(("a b c" + "x" * 999)[:MAX_STEP])),
    ],
)
def test_parse_activity_returns_a_text_that_fits(body: Any, expected: Activity) -> None:
    assert parse_activity(body) == expected


@pytest.mark.parametrize("body", [None, "fetch", [], {}, {"step": 1}, {"step": " "}])
def test_parse_activity_without_a_step_is_none(body: Any) -> None:
    assert parse_activity(body) is None


@pytest.mark.parametrize("number", [-1, 1 << 63, True, 1.5, "1", [1]])
def test_parse_activity_with_a_malformed_number_is_none(number: Any) -> None:
    for key in ("done", "total"):
        assert parse_activity({"step": "fetch", key: number}) is None
