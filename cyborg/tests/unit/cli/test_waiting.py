# SPDX-License-Identifier: Apache-2.0
"""Waiting for work that goes on whether or not somebody looks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cyborg.cli import waiting
from cyborg.cli.answers import Refused
from cyborg.cli.waiting import TRIES, Progress, wait


class Clock:
    """Time that passes while somebody sleeps and at no other moment."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, time: float) -> None:
        # Who sleeps not at all looks at the clock until it moves.
        self.now += max(time, 0.001)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(waiting, "time", found)
    return found


def answers(*given: dict[str, Any] | Refused) -> Callable[[], dict[str, Any]]:
    """Return a question that gets one answer after another, the last again and again."""
    left: Sequence[dict[str, Any] | Refused] = given

    def ask() -> dict[str, Any]:
        nonlocal left
        answer, left = left[0], left[1:] or left
        if isinstance(answer, Refused):
            raise answer
        return answer

    return ask


def look(found: dict[str, Any]) -> Progress:
    parts: list[str] = found["parts"]
    late = "two are silent" if found["open"] else None
    return Progress(len(parts), 3, late, [f"{part} is there" for part in parts])


OPEN = {"open": True, "parts": ["a"]}
MORE = {"open": True, "parts": ["a", "b"]}
DONE = {"open": False, "parts": ["a", "[b]", "c" * 200]}
AWAY = Refused("the broker is away (HTTP 503)")


def test_each_part_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    ask = answers(OPEN, OPEN, MORE, DONE)
    assert wait(ask, look, "waiting", within=60, pause=0.5, counted=True) == DONE
    lines = [line.strip() for line in capsys.readouterr().err.splitlines() if "there" in line]
    # As they are: neither markup nor broken into lines.
    assert lines == [f"{part} is there" for part in ("a", "b", "[b]", "c" * 200)]


def test_a_question_may_fail_and_more_than_one(capsys: pytest.CaptureFixture[str]) -> None:
    ask = answers(AWAY, AWAY, OPEN, *[AWAY] * (TRIES - 1), DONE)
    assert wait(ask, look, "waiting", within=60, pause=0.5) == DONE


def test_somebody_who_is_away_for_good() -> None:
    with pytest.raises(Refused, match="the broker is away"):
        wait(answers(OPEN, *[AWAY] * TRIES, DONE), look, "waiting", within=60, pause=0.5)


@pytest.mark.parametrize("given", [[OPEN], [OPEN, AWAY]])
def test_nobody_waits_longer_than_asked_to(clock: Clock, given: list[Any]) -> None:
    said = "the broker is away" if AWAY in given else r"^two are silent after 2\.5 s$"
    with pytest.raises(Refused, match=said):
        wait(answers(*given), look, "waiting", within=2.5, pause=1)
    assert 2.5 <= clock.now < 2.6
