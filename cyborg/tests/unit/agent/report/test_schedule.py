# SPDX-License-Identifier: Apache-2.0
"""Times of heartbeats: many agents that start, fail or get another interval at the same time."""

import logging
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.agent.report.heartbeat import (
    RESPREAD_RATIO,
    START_SHARE,
    HeartbeatSchedule,
    IntervalFile,
)

AGENTS = 1000


def make_schedules(previous: float = 0.0) -> list[HeartbeatSchedule]:
    source = random.Random(7)
    return [HeartbeatSchedule(previous, source.random) for _ in range(AGENTS)]


def count_busiest(times: Sequence[float], seconds: float) -> int:
    """Return the largest number of times in one of the periods of this length."""
    return max(Counter(int(time // seconds) for time in times).values())


def test_agents_that_restart_together_call_at_different_times() -> None:
    interval = 20.0
    schedules = make_schedules(interval)
    first = [schedule.first_delay for schedule in schedules]
    assert min(first) >= 0
    assert START_SHARE * interval >= max(first)
    # 100 in each of 10 seconds on average.
    assert count_busiest(first, 1.0) < 140
    times = [
        schedule.next_heartbeat(time, interval)
        for schedule, time in zip(schedules, first, strict=True)
    ]
    for _ in range(3):
        times = [
            schedule.next_heartbeat(time, interval)
            for schedule, time in zip(schedules, times, strict=True)
        ]
        assert count_busiest([time % interval for time in times], 1.0) < 80  # 50 on average


@pytest.mark.parametrize("event", ["unknown interval", "outage", "longer interval"])
def test_agents_that_call_together_are_spread_with_the_next_heartbeat(event: str) -> None:
    interval = 20.0
    schedules = make_schedules()
    if event != "unknown interval":
        for schedule in schedules:
            schedule.next_heartbeat(0.0, interval / 2 if event == "longer interval" else interval)
    if event == "outage":
        for schedule in schedules:
            schedule.record_failure()
    times = [schedule.next_heartbeat(0.0, interval) for schedule in schedules]
    assert count_busiest(times, 1.0) < 80  # 50 on average
    assert [s.next_heartbeat(t, interval) - t for s, t in zip(schedules, times, strict=True)] == (
        pytest.approx([interval] * AGENTS)
    )


@given(st.lists(st.floats(0.1, 600), min_size=1, max_size=20), st.floats(0, 1))
def test_next_heartbeat_is_never_later_than_the_interval(
    intervals: list[float], share: float
) -> None:
    """And the rate of agents that were spread is at most RESPREAD_RATIO times the intended one."""
    schedule = HeartbeatSchedule(random_share=lambda: share)
    now = 0.0
    for interval in intervals:
        due = schedule.next_heartbeat(now, interval)
        assert now <= due <= now + interval
        assert interval <= RESPREAD_RATIO * schedule._spread_over <= RESPREAD_RATIO * interval
        now = due


def test_interval_file_keeps_the_interval(tmp_path: Path) -> None:
    path = tmp_path / "agent" / "heartbeat-h.json"
    file = IntervalFile(path)
    assert file.interval == 0.0
    file.record(20.0)
    assert IntervalFile(path).interval == 20.0
    before = path.stat()
    file.record(21.0)
    assert path.stat() == before, "small changes are not written"
    file.record(5.0)
    assert IntervalFile(path).interval == 5.0


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"interval": "x"}', b'{"interval": null}'])
def test_interval_file_malformed_counts_as_unknown(
    tmp_path: Path, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "heartbeat-h.json"
    path.write_bytes(body)
    assert IntervalFile(path).interval == 0.0
    assert "the first heartbeat is sent without a delay" in caplog.text


@pytest.mark.parametrize("interval", ["Infinity", "NaN", "-5", "1e9"])
def test_interval_file_out_of_range_counts_as_unknown(tmp_path: Path, interval: str) -> None:
    path = tmp_path / "heartbeat-h.json"
    path.write_text(f'{{"interval": {interval}}}')
    assert IntervalFile(path).interval == 0.0


def test_interval_file_not_writable_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "file").write_text("")
    file = IntervalFile(tmp_path / "file" / "heartbeat-h.json")
    file.record(20.0)
    assert "a restart loses its changes" in caplog.text
