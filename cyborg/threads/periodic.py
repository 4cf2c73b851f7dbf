# SPDX-License-Identifier: Apache-2.0
"""Run work periodically, or when woken, in threads that survive its failures."""

import time
from collections.abc import Callable

from cyborg.core.errors import is_expected
from cyborg.core.log import get_logger
from cyborg.threads.loop import LoopThread
from cyborg.threads.rate_limited_log import RateLimitedLogger

LOG = get_logger(__name__)

OVERDUE_INTERVALS = 3
OVERDUE_SECONDS = 60.0
"""Minimum age of the last run for a task to count as overdue: a run with much work takes long."""


class PeriodicTask(LoopThread):
    """Thread that runs ``work`` every ``interval`` seconds and whenever it is woken."""

    def __init__(
        self,
        name: str,
        interval: float,
        work: Callable[[], object],
        *,
        batch_delay: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``work`` must return soon after the service stops; exceptions end only the current run.

        A run starts ``batch_delay`` seconds after a wake-up, so that it also processes items added
        in this time. ``clock`` returns monotonic seconds.
        """
        super().__init__(name)
        self._clock = clock
        self._run_started: float | None = None
        self.name = name
        self._interval = interval
        self._batch_delay = batch_delay
        self._work = work
        self._failure_log = RateLimitedLogger(logger=LOG)

    def start(self) -> None:
        """Start the thread; the first run begins immediately."""
        self._run_started = self._clock()
        super().start()

    def overdue(self) -> float:
        """Return the seconds since the last run started if the task is overdue, else 0.0.

        A task is overdue after OVERDUE_INTERVALS intervals, and OVERDUE_SECONDS at least. A task
        that is not started, or is stopped, is not overdue.
        """
        if self._run_started is None or self._stopped.is_set():
            return 0.0
        seconds = self._clock() - self._run_started
        limit = max(OVERDUE_SECONDS, OVERDUE_INTERVALS * self._interval)
        return seconds if seconds > limit else 0.0

    def run_once(self) -> float:
        """Run the work once and log its errors; return the seconds until the next run."""
        self._run_started = self._clock()
        error: str | None = None
        try:
            self._work()
        except Exception as exc:
            if not is_expected(exc):
                LOG.exception("Unexpected error in periodic task %s", self.name)
                return self._interval
            error = str(exc)
        if error is not None:
            self._failure_log.warn(f"{self.name}: {error}; retrying")
        else:
            self._failure_log.recovered(self.name)
        return self._interval

    def _wait(self, seconds: float | None) -> None:
        if self._wake.wait(seconds) and self._batch_delay:
            self._stopped.wait(self._batch_delay)
