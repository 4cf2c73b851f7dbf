# SPDX-License-Identifier: Apache-2.0
"""The waits of binds for handles that are being cleaned.

A server can be scheduled to a device in the moment between its release and the time when Placement
has it reserved; the cleaning of most devices takes a few seconds.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from cyborg.conductor.binding.claims import BeingCleaned
from cyborg.core.errors import STOPPING, Unavailable
from cyborg.core.log import get_logger
from cyborg.db import deadline
from cyborg.db.binding import claims as handle_claims
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

# Seconds that a bind waits for handles, and those between two queries for their state.
MAX_CLEANING_WAIT = 10.0
CLEANING_INTERVAL = 0.5
# Seconds of the call that a wait leaves for the last attempt.
ATTEMPT_SECONDS = 2.0
# Each waiting bind uses a thread that answers calls: this part of them, and at least one, may wait.
WAITING_PART = 4


@dataclass(frozen=True, slots=True)
class CleaningWaits:
    """The waits of the binds of a process.

    ``pause`` waits so many seconds, and returns True if the service stops meanwhile. ``slots``
    limits the binds that wait at the same time.
    """

    uow: UnitOfWork
    now: Callable[[], datetime]
    pause: Callable[[float], bool]
    slots: threading.Semaphore

    @contextlib.contextmanager
    def of_bind(self) -> Iterator["CleaningWait"]:
        """Yield the wait of one bind, which keeps its slot from its first wait until the end."""
        wait = CleaningWait(self)
        try:
            yield wait
        finally:
            wait.release()


def make_slots(call_threads: int) -> threading.Semaphore:
    """Return the slots of a process that answers so many calls at the same time."""
    return threading.Semaphore(max(1, call_threads // WAITING_PART))


@dataclass(slots=True)
class CleaningWait:
    """The wait of one bind. ``seconds`` is how long it has waited."""

    waits: CleaningWaits
    seconds: float = 0.0
    _end: float | None = None  # monotonic seconds; None without a slot

    def run(self, cause: BeingCleaned) -> bool:
        """Wait until a handle of ``cause`` is not being cleaned; return whether to bind again.

        Return True at the end of the time, too, for a last attempt, and False if no time was left
        at the start or too many other binds wait. A call without a deadline does not wait: nothing
        says how long its caller does. Call this outside a transaction. Raise Unavailable, also if
        the service stops: the caller then repeats the bind at another conductor.
        """
        if deadline.seconds_left() == float("inf") or not self._take_slot(cause):
            return False
        left = self._seconds_left()
        if left <= 0:
            return False
        started = time.monotonic()
        try:
            while left > 0:
                if self.waits.pause(min(CLEANING_INTERVAL, left)):
                    # Not NoHandle: the devices may be clean in a moment, for another conductor.
                    raise Unavailable(f"the conductor stops: {cause.message}", **{STOPPING: True})
                # One short read: an attempt locks rows, and explains each handle.
                if self.waits.uow.run(
                    lambda tx: handle_claims.find_cleaning(tx, cause.handles, self.waits.now())
                ) != set(cause.handles):
                    return True
                left = self._seconds_left()
            return True
        finally:
            self.seconds += time.monotonic() - started

    def release(self) -> None:
        """Give the slot to another bind."""
        if self._end is not None:
            self._end = None
            self.waits.slots.release()

    def _take_slot(self, cause: BeingCleaned) -> bool:
        if self._end is not None:
            return True
        if not self.waits.slots.acquire(blocking=False):
            return False
        LOG.info("Bind waits for the cleaning of handles: %s", cause.message)
        self._end = time.monotonic() + MAX_CLEANING_WAIT
        return True

    def _seconds_left(self) -> float:
        end = self._end or 0.0
        return min(end - time.monotonic(), deadline.seconds_left() - ATTEMPT_SECONDS)
