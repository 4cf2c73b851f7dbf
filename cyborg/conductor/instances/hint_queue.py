# SPDX-License-Identifier: Apache-2.0
"""Queue of the instances to check: one entry for each instance, limited in size. Thread-safe."""

import threading
from collections.abc import Sequence
from enum import StrEnum

from cyborg.core.instances.hints import Hint

MAX_INSTANCES = 10_000


class Added(StrEnum):
    """The result of adding a hint."""

    QUEUED = "queued"
    COALESCED = "coalesced"  # the instance was in the queue
    DROPPED = "dropped"  # the queue was full


class HintQueue:
    """Hints by instance. A hint for an instance that is in the queue is merged with its entry."""

    def __init__(self, max_instances: int = MAX_INSTANCES) -> None:
        self._max = max_instances
        self._hints: dict[str, Hint] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of instances in the queue."""
        return len(self._hints)

    def add(self, hint: Hint) -> Added:
        """Add a hint unless the queue is full."""
        with self._lock:
            present = self._hints.get(hint.instance)
            if present is None and len(self._hints) >= self._max:
                return Added.DROPPED
            self._hints[hint.instance] = hint if present is None else present.merge(hint)
            return Added.QUEUED if present is None else Added.COALESCED

    def take_due(self, now: float, limit: int) -> Sequence[Hint]:
        """Remove and return up to ``limit`` due hints, those with the fewest failures first.

        Among hints with equal failures, the hints that have been due longest come first. ``now`` is
        a time of the clock of the hints, in seconds.
        """
        with self._lock:
            due = sorted(
                (hint for hint in self._hints.values() if hint.due <= now),
                key=lambda hint: (hint.failures, hint.due),
            )[:limit]
            for hint in due:
                del self._hints[hint.instance]
            return due
