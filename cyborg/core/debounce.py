# SPDX-License-Identifier: Apache-2.0
"""Debouncing of kernel events: when to run a discovery after a batch of them."""

from dataclasses import dataclass, replace

QUIET_PERIOD = 0.1
"""Seconds without an event after which a batch is complete."""

MAX_DELAY = 0.5
"""Seconds after which a batch is complete even if events keep arriving."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Kernel events that together cause one discovery: one added card causes several events.

    ``first`` and ``last`` are the times of the first and last event, in seconds of a monotonic
    clock. ``subsystems`` are the kernel subsystems of the events. ``overflow`` is set when events
    were dropped, so that their subsystems are unknown.
    """

    first: float
    last: float
    subsystems: frozenset[str] = frozenset()
    events: int = 0
    overflow: bool = False

    @property
    def due(self) -> float:
        """Return when the batch is complete, on the clock of ``first`` and ``last``."""
        return min(self.last + QUIET_PERIOD, self.first + MAX_DELAY)


def add(batch: EventBatch | None, now: float, subsystem: str) -> EventBatch:
    """Return the batch with one more event; None starts a new batch."""
    previous = batch or EventBatch(now, now)
    return replace(
        previous,
        last=now,
        subsystems=previous.subsystems | {subsystem},
        events=previous.events + 1,
    )


def mark_overflow(batch: EventBatch | None, now: float) -> EventBatch:
    """Return the batch marked as having lost events; None starts a new batch."""
    return replace(batch or EventBatch(now, now), last=now, overflow=True)


def affects(batch: EventBatch, subsystems: frozenset[str]) -> bool:
    """Return whether a subscriber of these subsystems must run a discovery."""
    return bool(subsystems) and (batch.overflow or bool(subsystems & batch.subsystems))
