# SPDX-License-Identifier: Apache-2.0
"""Lock that is given to its waiting threads in the order in which they began to wait."""

import threading
from collections import deque


class FifoLock:
    """Mutual exclusion without starvation.

    A thread that releases a ``threading.Lock`` and acquires it again at once usually gets it before
    a waiting thread wakes up: a loop in one thread can delay the others without a limit.
    """

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
