# SPDX-License-Identifier: Apache-2.0
"""Locks: one in the order of its waiting threads, and a value that one thread at a time reads."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cyborg.core.errors import Unavailable


class FifoLock:
    """Mutual exclusion without starvation."""

    # A thread that releases a threading.Lock and acquires it again at once usually gets it before a
    # waiting thread wakes up: a loop in one thread can delay the others without a limit.

    def __init__(self) -> None:
        """Create the lock, unlocked."""
        self._mutex = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self, timeout: float = -1) -> bool:
        """Wait for the lock, up to ``timeout`` seconds if it is not negative; return success."""
        with self._mutex:
            if not self._held:
                self._held = True
                return True
            # Held until ``release`` hands the lock over to this thread.
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        if turn.acquire(timeout=timeout):
            return True
        with self._mutex:
            if turn in self._waiting:
                self._waiting.remove(turn)
                return False
        # The lock was handed over after the timeout.
        return True

    def release(self) -> None:
        """Hand the lock over to the thread that has waited longest, if any."""
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def __enter__(self) -> None:
        """Acquire the lock."""
        self.acquire()

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self.release()


T = TypeVar("T")

# Seconds to wait for another thread that reads the value.
MAX_WAIT = 10.0


@dataclass(frozen=True, slots=True)
class _Read(Generic[T]):
    """A value, and when its read began and ended."""

    value: T
    started: float
    ended: float


class CachedValue(Generic[T]):
    """A value with a maximum age; thread-safe. An error is not cached.

    A call that waits for a read uses its value, also if the read took longer than the maximum age.
    It waits up to MAX_WAIT: if a read hangs, no call waits for more than one timeout.
    """

    def __init__(
        self, read: Callable[[], T], max_age: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``max_age`` are seconds, ``clock`` returns monotonic seconds."""
        self._read = read
        self._max_age = max_age
        self._clock = clock
        self._lock = threading.Lock()
        self._last: _Read[T] | None = None

    def get(self) -> T:
        """Return the value. Raise what ``read`` raises, and Unavailable after MAX_WAIT."""
        called = self._clock()
        # Calls that come together wait for one read, instead of reading as often.
        if not self._lock.acquire(timeout=MAX_WAIT):
            raise Unavailable(f"another request has read this for {MAX_WAIT:.0f} s, retry later")
        try:
            last = self._last
            # A slow read ends with a value that is too old for later calls. The calls that have
            # waited for it take it: otherwise they would read one after another.
            if last is not None and (
                self._clock() - last.started < self._max_age or last.ended > called
            ):
                return last.value
            # The time before the read, so that no part of the value is older than ``max_age``.
            started = self._clock()
            value = self._read()
            self._last = _Read(value, started, self._clock())
            return value
        finally:
            self._lock.release()
