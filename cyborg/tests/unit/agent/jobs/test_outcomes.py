# SPDX-License-Identifier: Apache-2.0
"""Outcomes are kept until the conductor has accepted them."""

import pytest

from cyborg.agent.jobs.checkpoint import Outcomes
from cyborg.core.errors import CyborgError, Invalid, NotFound, Stale, TimedOut, Unavailable
from cyborg.tests.fixtures.machine.log_lines import texts_of


class Receiver:
    """Takes outcomes, or fails with the errors that a key has."""

    def __init__(self, **errors: Exception) -> None:
        self.errors = errors
        self.taken: list[tuple[str, int]] = []

    def send(self, key: str, outcome: int) -> None:
        if key in self.errors:
            raise self.errors[key]
        self.taken.append((key, outcome))


@pytest.fixture
def outcomes() -> Outcomes[str, int]:
    outcomes = Outcomes[str, int]("job")
    for number, key in enumerate(("a", "b", "c")):
        outcomes.put(key, number)
    return outcomes


def test_put_many_outcomes_keeps_all(outcomes: Outcomes[str, int]) -> None:
    for number in range(5000):
        outcomes.put(f"n{number}", number)
    receiver = Receiver()
    outcomes.deliver(outcomes.pending(), receiver.send)
    assert len(receiver.taken) == 5003
    assert receiver.taken[0] == ("a", 0), "the oldest first"
    assert len(outcomes) == 0


@pytest.mark.parametrize("error", [Unavailable("away"), TimedOut("late"), OSError("broken")])
def test_deliver_conductor_unreachable_keeps_outcomes(
    outcomes: Outcomes[str, int], error: Exception
) -> None:
    receiver = Receiver(b=error)
    with pytest.raises(type(error)):
        outcomes.deliver(outcomes.pending(), receiver.send)
    assert outcomes.pending() == [("b", 1), ("c", 2)]


@pytest.mark.parametrize("error", [NotFound("no"), Invalid("what"), Stale("old")])
def test_deliver_permanent_refusal_drops_outcome_with_warning(
    outcomes: Outcomes[str, int], error: CyborgError, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver(b=error)
    outcomes.deliver(outcomes.pending(), receiver.send)
    assert (receiver.taken, len(outcomes)) == ([("a", 0), ("c", 2)], 0)
    assert texts_of(caplog.records) == [
        f"[job=b] Conductor rejected an outcome, discarding it: {error.message}"
    ]


def test_deliver_temporary_failure_keeps_outcome_and_sends_others(
    outcomes: Outcomes[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Receiver(a=CyborgError("internal error"))
    for _ in range(3):
        outcomes.deliver(outcomes.pending(), receiver.send)
    assert receiver.taken == [("b", 1), ("c", 2)]
    assert outcomes.pending() == [("a", 0)]
    assert caplog.text.count("retrying: internal error") == 1
    receiver.errors.clear()
    outcomes.deliver(outcomes.pending(), receiver.send)
    assert receiver.taken[-1] == ("a", 0)


def test_deliver_newer_outcome_of_same_key_is_kept(
    outcomes: Outcomes[str, int],
) -> None:
    receiver = Receiver()

    def send(key: str, outcome: int) -> None:
        receiver.send(key, outcome)
        if outcome == 0:
            outcomes.put("a", 7)
            outcomes.put("d", 8)

    outcomes.deliver(outcomes.pending(), send)
    assert outcomes.pending() == [("a", 7), ("d", 8)]
