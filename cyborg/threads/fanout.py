# SPDX-License-Identifier: Apache-2.0
"""Call many agents concurrently in background threads."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_THREADS = 8
"""Threads of one ``FanOut``. An unresponsive agent occupies a thread for ``[rpc] timeout``."""


class _Batch(Generic[T]):
    """Items for which one function must still be called."""

    def __init__(self, func: Callable[[T], None], items: Iterable[T]) -> None:
        self._func = func
        self._items = deque(items)

    def __len__(self) -> int:
        return len(self._items)

    def take(self) -> Callable[[], None]:
        """Remove the first item of the queue and return the function that calls its agent."""
        item = self._items.popleft()
        return lambda: self._func(item)


class FanOut:
    """Pool of at most MAX_THREADS daemon threads that calls functions for lists of items."""

    def __init__(self, name: str) -> None:
        """``name`` is the name of the threads."""
        self._name = name
        self._lock = threading.Lock()
        self._batches: deque[_Batch[object]] = deque()
        self._threads = 0
        self._stopped = False

    def submit(self, func: Callable[[T], None], items: Iterable[T]) -> None:
        """Call ``func`` for each item in the background; do not wait.

        ``func`` must not raise. Batches take turns, call by call, so that a small batch does not
        wait for a large one. After ``stop`` nothing is submitted.
        """
        batch: _Batch[object] = _Batch(func, items)  # type: ignore[arg-type]
        with self._lock:
            if self._stopped or not batch:
                return
            self._batches.append(batch)
            new_threads = min(MAX_THREADS - self._threads, len(batch))
            self._threads += new_threads
        for started in range(new_threads):
            # No ThreadPoolExecutor: its threads are not daemons, and a call to a dead agent must
            # not delay the end of the process.
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads can start: the running ones do the work
                with self._lock:
                    self._threads -= new_threads - started
                    idle = self._threads == 0
                if idle:
                    raise
                return

    def stop(self) -> None:
        """Discard the calls that have not started."""
        with self._lock:
            self._stopped = True
            self._batches.clear()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        """Return the next call, or None to end the thread."""
        with self._lock:
            if not self._batches:
                self._threads -= 1
                return None
            batch = self._batches.popleft()
            call = batch.take()
            if batch:
                self._batches.append(batch)
            return call
