# SPDX-License-Identifier: Apache-2.0
"""Threads that do something again and again, on time or when woken, and survive its failures."""

import threading
import time
from collections.abc import Callable

from oslo_log import log

from cyborg.core.errors import Unavailable

LOG = log.getLogger(__name__)

QUIET = 60.0  # seconds between two complaints about the same neighbour


class Complaints:
    """Says what is wrong at most once a minute, and once more when it is over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` counts seconds upwards."""
        self._clock = clock
        self._last: float | None = None

    def wrong(self, what: str) -> bool:
        """Log a failure unless one was logged within the last minute; tell whether it was."""
        now = self._clock()
        if self._last is not None and now - self._last < QUIET:
            return False
        self._last = now
        LOG.warning("%s; trying again", what)
        return True

    def right(self, what: str) -> None:
        """Log that it works again, if a failure was logged."""
        if self._last is not None:
            self._last = None
            LOG.info("%s works again", what)


class Loop:
    """One thread that runs ``work`` every ``interval`` seconds and whenever it is woken."""

    def __init__(
        self, name: str, interval: float, work: Callable[[], object], *, linger: float = 0.0
    ) -> None:
        """``work`` returns soon after the service stops; what it raises ends one round only.

        Once woken it begins ``linger`` seconds later, so that what comes meanwhile is done with it.
        """
        self._name = name
        self._interval = interval
        self._linger = linger
        self._work = work
        self._complaints = Complaints()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin, with a round at once."""
        self._thread.start()

    def wake(self) -> None:
        """Have a round begin now, or another one after the one in progress."""
        self._wake.set()

    def stop(self) -> None:
        """Begin no more rounds."""
        self._stopped.set()
        self._wake.set()

    def join(self, seconds: float) -> bool:
        """Wait for the round in progress; tell whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def round(self) -> None:
        """Run the work once; log what it raises."""
        try:
            self._work()
        except Unavailable as bad:
            self._complaints.wrong(f"{self._name}: {bad.message}")
        except Exception:
            LOG.exception("%s failed for a reason nobody foresaw", self._name)
        else:
            self._complaints.right(self._name)

    def _run(self) -> None:
        while not self._stopped.is_set():
            # Cleared before the round: a wake during it is not lost.
            self._wake.clear()
            if self._stopped.is_set():
                return
            self.round()
            if self._wake.wait(self._interval) and self._linger:
                self._stopped.wait(self._linger)
