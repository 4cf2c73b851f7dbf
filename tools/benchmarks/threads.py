# SPDX-License-Identifier: Apache-2.0
"""Concurrent work: the same function in several threads, and its rate."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work`` with each number in a thread; raise the first exception after all ended."""
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work, number) for number in range(count)]:
            future.result()


def measure_rate(make: Callable[[int], Callable[[], None]], count: int, seconds: float) -> float:
    """Return the calls per second of functions that ``make`` returns, one for each thread."""
    calls, limits = [0] * count, [0.0, 0.0]

    def start() -> None:
        limits[:] = time.perf_counter(), time.perf_counter() + seconds

    barrier = threading.Barrier(count, start, timeout=30)

    def work(number: int) -> None:
        try:
            call = make(number)
            call()
        except BaseException:
            barrier.abort()
            raise
        barrier.wait()
        while time.perf_counter() < limits[1]:
            call()
            calls[number] += 1

    run_threads(count, work)
    return sum(calls) / (time.perf_counter() - limits[0])
