# SPDX-License-Identifier: Apache-2.0
"""One expensive request at a time: others wait shortly, or are told when to come back."""

import threading

import pytest
from webob import exc

from cyborg.api.slots import Turns

REASON = "others are served"


def take(turns: Turns, taken: threading.Event, done: threading.Event) -> threading.Thread:
    """Start a thread that keeps the turn until ``done`` is set."""

    def keep() -> None:
        with turns.take():
            taken.set()
            assert done.wait(10)

    thread = threading.Thread(target=keep)
    thread.start()
    return thread


def test_turn_is_refused_with_the_time_to_retry() -> None:
    turns = Turns(REASON, max_waiting=1, seconds=0.01)
    for _ in range(2):  # a refusal takes no slot
        with turns.take(), pytest.raises(exc.HTTPTooManyRequests) as refused, turns.take():
            pass
        assert refused.value.headers["Retry-After"] == "1"
        assert refused.value.detail == f"{REASON}, retry in 1 s"


def test_turn_is_taken_after_an_error() -> None:
    turns = Turns(REASON, max_waiting=0, seconds=0.01)
    with pytest.raises(ValueError, match="x"), turns.take():
        raise ValueError("x")
    with turns.take():
        pass


def test_waiting_request_gets_its_turn() -> None:
    turns = Turns(REASON, max_waiting=1, seconds=10)
    first_taken, first_done, second_taken, second_done = (threading.Event() for _ in range(4))
    first = take(turns, first_taken, first_done)
    assert first_taken.wait(10)
    second = take(turns, second_taken, second_done)
    assert not second_taken.is_set()
    first_done.set()
    assert second_taken.wait(10)
    second_done.set()
    first.join()
    second.join()


def test_no_more_wait_than_allowed() -> None:
    turns = Turns(REASON, max_waiting=0, seconds=10)
    taken, done = threading.Event(), threading.Event()
    first = take(turns, taken, done)
    assert taken.wait(10)
    # At once, although a request that may wait would do so for ten seconds.
    with pytest.raises(exc.HTTPTooManyRequests), turns.take():
        pass
    done.set()
    first.join()
