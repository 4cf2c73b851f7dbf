# SPDX-License-Identifier: Apache-2.0
"""Calls for several items at a time."""

import threading
from collections.abc import Sequence

import pytest

from cyborg.threads.calls import map_parallel


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
