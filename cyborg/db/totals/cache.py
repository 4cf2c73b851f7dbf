# SPDX-License-Identifier: Apache-2.0
"""Cache of the numbers of objects, whose counting reads whole tables.

Counting takes a small share of the database's time at any size of the cloud: the longer it takes,
the longer its result is used. In a large cloud a conductor counts for all processes, and stores the
result, so that no process waits for its first counts. Alternative not taken: counters that each
write changes, on which all binds of a cloud would wait for each other.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from cyborg.core.errors import Unavailable
from cyborg.core.log import get_logger
from cyborg.db.engine import Reader
from cyborg.db.totals import read as totals
from cyborg.db.totals.read import Counts

LOG = get_logger(__name__)

# Counts are used for this many times the seconds that counting took.
SHARE = 100
# Seconds after which counts are always counted again.
MAX_AGE = 600.0
# If counting takes no longer than this, it is not done in the background.
INLINE_SECONDS = 0.05
# Stored counts of fewer handles are not used: a busy machine that counts them slowly must not show
# those of a minute ago.
MIN_STORED_HANDLES = 10_000
# Seconds that ``stop`` waits for counting in the background.
STOP_SECONDS = 5.0


def lifetime(duration: float) -> float:
    """Return for how many seconds counts are used that took ``duration`` seconds to count."""
    return min(SHARE * duration, MAX_AGE)


class _Counted(NamedTuple):
    """The counts, when they were counted (monotonic), and the seconds that it took."""

    counts: Counts
    at: float
    duration: float


class CountCache:
    """Cache of the numbers of objects in the database; thread-safe."""

    def __init__(self, reader: Reader, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns monotonic seconds."""
        self._reader = reader
        self._clock = clock
        self._lock = threading.Lock()
        self._last: _Counted | None = None
        self._thread: threading.Thread | None = None

    def read(self) -> tuple[Counts, float]:
        """Return the counts and their age in seconds. Raise Unavailable.

        If the counts are too old, count again. This call waits for the new counts if counting is
        quick, if there are no counts yet and no conductor has stored any, or if the counts are
        older than twice MAX_AGE. Otherwise counting runs in the background.
        """
        with self._lock:
            last = self._last
        last = last or self._load()
        if last is not None:
            age = self._clock() - last.at
            if age < lifetime(last.duration):
                return last.counts, age
            if last.duration > INLINE_SECONDS and age < 2 * MAX_AGE:
                self._start()
                return last.counts, age
        return self._count(), 0.0

    def stop(self) -> None:
        """Wait for counting in the background, for up to STOP_SECONDS. Idempotent."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(STOP_SECONDS)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                # A daemon, so that a database that hangs does not keep the process.
                self._thread = threading.Thread(
                    target=self._count_in_background, name="count", daemon=True
                )
                self._thread.start()

    def _count_in_background(self) -> None:
        try:
            stored = self._load()
            if stored is None or self._clock() - stored.at >= lifetime(stored.duration):
                self._count()
        except Unavailable as exc:
            LOG.warning("Cannot count objects, older counts are shown: %s", exc.message)

    def _load(self) -> _Counted | None:
        """Return the counts that a conductor has stored, and use them unless newer ones are known.

        Return None if there are none, if they are too old, or if counting is or should be quick.
        """
        with self._reader.connect() as connection:
            stored = totals.find_stored(connection)
        if stored is None or stored.seconds <= INLINE_SECONDS:
            return None
        if sum(stored.counts.handles.values()) < MIN_STORED_HANDLES:
            return None
        age = (self._reader.clock() - stored.counted_at).total_seconds()
        if age >= 2 * MAX_AGE:
            return None
        counted = _Counted(stored.counts, at=self._clock() - age, duration=stored.seconds)
        with self._lock:
            if self._last is None or self._last.at < counted.at:
                self._last = counted
        return counted

    def _count(self) -> Counts:
        start = self._clock()
        # Without the lock: a call that finds older counts does not wait for the new ones.
        with self._reader.connect() as connection:
            counts = totals.count(connection)
        end = self._clock()
        with self._lock:
            self._last = _Counted(counts, at=start, duration=end - start)
        return counts
