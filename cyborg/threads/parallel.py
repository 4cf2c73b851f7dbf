# SPDX-License-Identifier: Apache-2.0
"""Call a function for several items at a time, and wait for all results."""

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_parallel(
    name: str, func: Callable[[T], R], items: Sequence[T], max_threads: int
) -> list[R]:
    """Return the result of ``func`` for each item, in order, with at most ``max_threads`` calls.

    ``name`` is the name of the threads. If a call raises, no further call starts, and the exception
    is raised after the running calls have ended.
    """
    results: list[Any] = [None] * len(items)
    errors: list[BaseException] = []
    positions = iter(range(len(items)))
    lock = threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                position = next(positions, None)
            if position is None:
                return
            try:
                results[position] = func(items[position])
            except BaseException as exc:  # noqa: BLE001  raised by the caller's thread
                errors.append(exc)

    # The caller's thread is one of them, so that a single call needs no thread. The others are
    # daemons, so that a call that hangs does not keep the process.
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(work,), name=name, daemon=True
        )
        for _ in range(min(max_threads, len(items)) - 1)
    ]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
