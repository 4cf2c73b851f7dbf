# SPDX-License-Identifier: Apache-2.0
"""Calls for several items at a time."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from cyborg.threads.calls import map_ahead, map_parallel


@pytest.mark.parametrize("items", [[], [1], [1, 2, 3, 4, 5, 6, 7]])
def test_map_parallel_returns_results_in_order(items: Sequence[int]) -> None:
    assert map_parallel("test", lambda item: 2 * item, items, 3) == [2 * item for item in items]


def test_map_parallel_runs_up_to_the_maximum_at_a_time() -> None:
    lock, barrier = threading.Lock(), threading.Barrier(3, timeout=30)
    running = most = 0

    def call(item: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait()
        with lock:
            running -= 1
        return item

    assert map_parallel("test", call, range(6), 3) == list(range(6))
    assert most == 3


def test_map_parallel_raises_the_first_error_and_starts_no_more_calls() -> None:
    started = []

    def call(item: int) -> None:
        started.append(item)
        raise ValueError(str(item))

    with pytest.raises(ValueError, match="0"):
        map_parallel("test", call, range(10), 1)
    assert started == [0]


@pytest.mark.parametrize("threads", [1, 3, 20])
def test_map_ahead_returns_results_in_order(threads: int) -> None:
    found = map_ahead("test", lambda n: 2 * n, range(9), max_threads=threads, max_ahead=5)
    assert list(found) == [2 * n for n in range(9)]
    assert not [thread for thread in threading.enumerate() if thread.name == "test"]


def test_map_ahead_continues_while_the_first_call_runs() -> None:
    last, taken = threading.Event(), list[int]()

    def read() -> Iterator[int]:
        for item in range(6):
            taken.append(item)
            yield item

    def call(item: int) -> int:
        if item == 3:
            last.set()
        # The first call ends only after that of the last item that may be ahead.
        assert item != 0 or last.wait(60)
        return item

    results = map_ahead("test", call, read(), max_threads=2, max_ahead=4)
    assert next(results) == 0
    assert taken == [0, 1, 2, 3]
    assert list(results) == [1, 2, 3, 4, 5]


def test_map_ahead_raises_an_error_in_its_place_and_starts_no_more_calls() -> None:
    started = list[int]()

    def call(item: int) -> int:
        started.append(item)
        if item == 1:
            raise KeyboardInterrupt
        return item

    results = map_ahead("test", call, range(100), max_threads=1, max_ahead=2)
    assert next(results) == 0
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert max(started) <= 2


def test_map_ahead_that_is_closed_waits_for_running_calls() -> None:
    ended = list[int]()

    def call(item: int) -> int:
        ended.append(item)
        return item

    results = map_ahead("test", call, range(100), max_threads=4, max_ahead=8)
    assert next(results) == 0
    results.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "test"]
    assert len(ended) <= 8


def test_map_ahead_can_be_ended_while_it_waits() -> None:
    ended = threading.Event()

    def stop() -> None:
        ended.set()
        raise InterruptedError

    results = map_ahead(
        "test", lambda _: ended.wait(60), [1], max_threads=1, max_ahead=1, on_wait=stop
    )
    with pytest.raises(InterruptedError):
        next(results)
