# SPDX-License-Identifier: Apache-2.0
"""The sweeps of a conductor as one periodic task, and the watchdog of periodic tasks.

A sweep is a function such as ``FailureDetector.sweep``. The watchdog logs the tasks that no longer
run, and reports them with the heartbeat.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from cyborg.core.errors import Unavailable, is_expected
from cyborg.core.hosts import ServiceStatus
from cyborg.core.log import get_logger
from cyborg.threads.failures import LOG_INTERVAL
from cyborg.threads.periodic import PeriodicTask

LOG = get_logger(__name__)


class LoopWatch:
    """Watchdog of the periodic tasks of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._loops: list[PeriodicTask] = []
        self._logged: dict[str, float] = {}

    def add(self, loops: Sequence[PeriodicTask]) -> None:
        """Add tasks to watch."""
        self._loops += loops

    def overdue(self) -> dict[str, float]:
        """Return, by task name, the seconds since the last run if the task is overdue, else 0.0.

        An overdue task is logged once a minute, and its recovery once.
        """
        overdue = {loop.name: loop.overdue() for loop in self._loops}
        with self._lock:
            for name, seconds in overdue.items():
                self._log(name, seconds)
        return overdue

    def status(self) -> ServiceStatus:
        """Return the status of this process for its heartbeat."""
        degraded = any(self.overdue().values())
        return ServiceStatus.DEGRADED if degraded else ServiceStatus.READY

    def _log(self, name: str, seconds: float) -> None:
        now, logged_at = self._clock(), self._logged.get(name)
        if not seconds:
            if logged_at is not None:
                del self._logged[name]
                LOG.info("Periodic task %s runs again", name)
        elif logged_at is None or now - logged_at >= LOG_INTERVAL:
            self._logged[name] = now
            LOG.error(
                "Periodic task %s has not run for %.0f s, this service reports itself as DEGRADED",
                name,
                seconds,
            )


def run_all(sweeps: Mapping[str, Callable[[], object]]) -> None:
    """Run every sweep, even if others fail; raise the first failure and log the other failures.

    ``sweeps`` maps names for the log to functions. While the database is unavailable, all sweeps
    fail with the same error, which is raised once and not logged here.
    """
    failures: list[tuple[str, Exception]] = []
    # One after the other, in one thread: none of them is urgent, and each uses one connection.
    for name, sweep in sweeps.items():
        try:
            sweep()
        except Exception as exc:  # noqa: BLE001  a failure must not stop the other sweeps
            failures.append((name, exc))
    if failures:
        _, first = failures[0]
        for name, other in failures[1:]:
            is_same_outage = isinstance(first, Unavailable) and isinstance(other, Unavailable)
            if not is_expected(other):
                LOG.error("Periodic sweep of %s failed", name, exc_info=other)
            elif not is_same_outage:
                LOG.warning("Periodic sweep of %s failed, retrying: %s", name, other)
        raise first
