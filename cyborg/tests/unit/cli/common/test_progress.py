# SPDX-License-Identifier: Apache-2.0
"""Waiting for long-running work of the service."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cyborg.cli.common import progress
from cyborg.cli.common.progress import MAX_FAILURES, Progress, wait_until_done
from cyborg.cli.common.rest import CommandError


class Clock:
    """A clock that advances only during ``sleep``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, time: float) -> None:
        # Callers that sleep 0 s poll the clock until it advances.
        self.now += max(time, 0.001)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    new_clock = Clock()
    monkeypatch.setattr(progress, "time", new_clock)
    return new_clock


def responses(*items: dict[str, Any] | CommandError) -> Callable[[], dict[str, Any]]:
    """Return a function that returns these responses in sequence and repeats the last one."""
    remaining: Sequence[dict[str, Any] | CommandError] = items

    def fetch() -> dict[str, Any]:
        nonlocal remaining
        response, remaining = remaining[0], remaining[1:] or remaining
        if isinstance(response, CommandError):
            raise response
        return response

    return fetch


def measure(response: dict[str, Any]) -> Progress:
    items: list[str] = response["items"]
    pending = "two are pending" if response["open"] else None
    return Progress(len(items), 3, pending, [f"{item} is there" for item in items])


STARTED = {"open": True, "items": ["a"]}
PROGRESSED = {"open": True, "items": ["a", "b"]}
FINISHED = {"open": False, "items": ["a", "[b]", "c" * 200]}
UNAVAILABLE = CommandError("the broker is unavailable (HTTP 503)")


def test_wait_until_done_prints_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    fetch = responses(STARTED, STARTED, PROGRESSED, FINISHED)
    assert (
        wait_until_done(fetch, measure, "waiting", timeout=60, interval=0.5, show_counts=True)
        == FINISHED
    )
    lines = [line.strip() for line in capsys.readouterr().err.splitlines() if "there" in line]
    # As they are: neither markup nor broken into lines.
    assert lines == [f"{item} is there" for item in ("a", "b", "[b]", "c" * 200)]


def test_wait_until_done_requests_become_rarer(clock: Clock) -> None:
    times: list[float] = []

    def fetch() -> dict[str, Any]:
        times.append(clock.now)
        return STARTED if clock.now < 100 else FINISHED

    wait_until_done(fetch, measure, "waiting", timeout=200, interval=0.2)
    pauses = [round(end - start, 6) for start, end in itertools.pairwise(times)]
    assert pauses[0] == 0.2
    assert pauses == sorted(pauses)
    assert pauses[-1] == 2.0
    assert len(times) < 90


def test_wait_until_done_tolerates_some_failures(capsys: pytest.CaptureFixture[str]) -> None:
    fetch = responses(
        UNAVAILABLE, UNAVAILABLE, STARTED, *[UNAVAILABLE] * (MAX_FAILURES - 1), FINISHED
    )
    assert wait_until_done(fetch, measure, "waiting", timeout=60, interval=0.5) == FINISHED


def test_wait_until_done_too_many_failures_raise() -> None:
    with pytest.raises(CommandError, match="the broker is unavailable"):
        wait_until_done(
            responses(STARTED, *[UNAVAILABLE] * MAX_FAILURES, FINISHED),
            measure,
            "waiting",
            timeout=60,
            interval=0.5,
        )


@pytest.mark.parametrize("items", [[STARTED], [STARTED, UNAVAILABLE]])
def test_wait_until_done_timeout_raises(clock: Clock, items: list[Any]) -> None:
    message = (
        "the broker is unavailable" if UNAVAILABLE in items else r"^two are pending after 2\.5 s$"
    )
    with pytest.raises(CommandError, match=message):
        wait_until_done(responses(*items), measure, "waiting", timeout=2.5, interval=1)
    assert 2.5 <= clock.now < 2.6
