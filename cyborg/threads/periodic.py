# SPDX-License-Identifier: Apache-2.0
"""Threads that run work in rounds, periodically or when woken, and survive its failures."""

import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from cyborg.core import errors, log
from cyborg.threads.failures import RateLimitedLogger

LOG = log.get_logger(__name__)

ERROR_PAUSE = 10.0  # seconds until the next round after an unexpected error


class LoopThread:
    """Base class of a thread that calls ``run_once`` until it is stopped."""

    def __init__(self, name: str, *, run_at_start: bool = True) -> None:
        """If ``run_at_start`` is False, the first round begins only after a ``wake``."""
        self._run_at_start = run_at_start
        self._wake = threading.Event()
        self._stopped = threading.Event()
        # A daemon, so that a round that hangs does not keep the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def run_once(self) -> float | None:
        """Run one round; return the seconds until the next round, None to wait for ``wake``."""
        raise NotImplementedError

    def on_end(self) -> None:
        """Clean up at the end of the thread."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Start a round now, or after the current round."""
        self._wake.set()

    def stop(self) -> None:
        """Start no more rounds."""
        self._stopped.set()
        self._wake.set()

    def join(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the current round; return whether the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if not self._run_at_start:
            self._wake.wait()
        while True:
            # Cleared before the check and the round: neither a stop nor a wake-up is lost.
            self._wake.clear()
            if self._stopped.is_set():
                break
            self._wait(self._run_safely())
        self.on_end()

    def _run_safely(self) -> float | None:
        """Run one round and log an unexpected error, which must not end the thread."""
        try:
            return self.run_once()
        except Exception:
            LOG.exception("Unexpected error in thread %s", self._thread.name)
            # A round that fails at once must not become a busy loop.
            return ERROR_PAUSE

    def _wait(self, seconds: float | None) -> None:
        """Wait for the next round."""
        self._wake.wait(seconds)


OVERDUE_INTERVALS = 3
# Minimum age of the last run for a task to count as overdue: a run with much work takes long.
OVERDUE_SECONDS = 60.0


@dataclass(eq=False)
class PeriodicTask(LoopThread):
    """Thread that runs ``work`` every ``interval`` seconds and whenever it is woken.

    ``work`` must return soon after the service stops; exceptions end only the current run.

    A run starts ``batch_delay`` seconds after a wake-up, so that it also processes items added
    in this time. ``clock`` returns monotonic seconds.
    """

    name: str
    interval: float
    work: Callable[[], object]
    _: KW_ONLY
    batch_delay: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        super().__init__(self.name)
        self._run_started: float | None = None
        self._failure_log = RateLimitedLogger(logger=LOG)

    def start(self) -> None:
        """Start the thread; the first run begins immediately."""
        # Also for a task whose first round never begins.
        self._run_started = self.clock()
        super().start()

    def overdue(self) -> float:
        """Return the seconds since the last run started if the task is overdue, else 0.0.

        A task is overdue after OVERDUE_INTERVALS intervals, and OVERDUE_SECONDS at least. A task
        that is not started, or is stopped, is not overdue.
        """
        if self._run_started is None or self._stopped.is_set():
            return 0.0
        seconds = self.clock() - self._run_started
        limit = max(OVERDUE_SECONDS, OVERDUE_INTERVALS * self.interval)
        return seconds if seconds > limit else 0.0

    def run_once(self) -> float:
        """Run the work once and log its errors; return the seconds until the next run."""
        self._run_started = self.clock()
        try:
            self.work()
            self._failure_log.recovered(self.name)
        except Exception as exc:
            if errors.is_expected(exc):
                self._failure_log.warn(f"{self.name}: {exc}; retrying")
            else:
                # With a traceback each time: unlike an outage, this is a mistake of the program.
                LOG.exception("Unexpected error in periodic task %s", self.name)
        return self.interval

    def _wait(self, seconds: float | None) -> None:
        # Only after a wake-up: one row is often followed by others of the same request.
        if self._wake.wait(seconds) and self.batch_delay:
            self._stopped.wait(self.batch_delay)
