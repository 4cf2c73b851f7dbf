# SPDX-License-Identifier: Apache-2.0
"""Calls to many agents, a few at once, beside the conductor's own work."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 8


class Calls:
    """Has something called for each of many things, in threads that nobody waits for."""

    def __init__(self, name: str) -> None:
        """``name`` is that of the threads."""
        self._name = name
        self._stopped = threading.Event()

    def begin(self, call: Callable[[T], None], things: Iterable[T]) -> None:
        """Begin to call for each, in their order, and return at once; ``call`` raises nothing."""
        todo = deque(things)
        # Daemon threads, not a pool: a call to a dead agent must not keep the process from ending.
        for _ in range(min(AT_ONCE, len(todo))):
            threading.Thread(
                target=self._work, args=(call, todo), name=self._name, daemon=True
            ).start()

    def stop(self) -> None:
        """Begin no more calls."""
        self._stopped.set()

    def _work(self, call: Callable[[T], None], todo: deque[T]) -> None:
        while not self._stopped.is_set():
            try:
                thing = todo.popleft()
            except IndexError:
                return
            call(thing)
