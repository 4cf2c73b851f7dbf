# SPDX-License-Identifier: Apache-2.0
"""Concurrent work: the same function in several threads, its rate and its CPU time."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass


def run_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work`` with each number in a thread; raise the first exception after all ended."""
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work, number) for number in range(count)]:
            future.result()


@dataclass(frozen=True)
class Rate:
    """Calls per second, and the CPU time of one call in ms."""

    per_second: float
    cpu_ms: float


def measure_rate(
    make: Callable[[int], Callable[[], None]],
    count: int,
    seconds: float,
    read_cpu: Callable[[], float],
) -> Rate:
    """Return the rate of functions that ``make`` returns, one for each thread.

    ``read_cpu`` returns the CPU time in ms that the processes of interest have used.
    """
    calls, limits, cpu = [0] * count, [0.0, 0.0], [0.0]

    def start() -> None:
        cpu[0] = read_cpu()
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
    took, used = time.perf_counter() - limits[0], read_cpu() - cpu[0]
    return Rate(sum(calls) / took, used / max(1, sum(calls)))
