# SPDX-License-Identifier: Apache-2.0
"""Health of this process, and the heartbeats by which it measures the conductor."""

import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

from oslo_config import cfg

from cyborg.api.versions import LATEST
from cyborg.core import hosts
from cyborg.core.errors import CyborgError, Unavailable
from cyborg.core.log import get_logger
from cyborg.core.upgrade import SCHEMA
from cyborg.db.engine import Reader
from cyborg.db.schema import REVISION
from cyborg.rpc.contract import CONDUCTOR, ConductorAPI
from cyborg.threads.failures import RateLimitedLogger
from cyborg.threads.periodic import LoopThread

LOG = get_logger(__name__)

# How long the result of a database check is reused.
CACHE_SECONDS = 1.0

# Age after which a result is outdated. A probe during another probe's check waits for that check if
# the last result is outdated.
STALE_SECONDS = 3.0

# Seconds that a probe waits for a check that another probe has started.
WAIT_TIMEOUT = 1.0

# The same for the first check after the start, when there is no result to reuse.
FIRST_WAIT_TIMEOUT = 5.0

# Seconds that the database may take for a check.
CHECK_TIMEOUT = 2.0


class Health:
    """Health state: checks the database at most once a second, whatever the number of probes.

    The state of the conductor is reported but does not make the API unhealthy: reads, which are
    most requests, work without it.
    """

    def __init__(self, reader: Reader, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader = reader
        self._clock = clock
        self._condition = threading.Condition()
        self._checking = False
        # The last finished check: its start and end by the clock, and the reason of a failure.
        self._started = self._ended = float("-inf")
        self._reason: str | None = None
        self._conductor: bool | None = None

    def check(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the API is healthy, and the document to show.

        This takes as long as a database check. While another probe runs the check, this waits up to
        WAIT_TIMEOUT, or up to FIRST_WAIT_TIMEOUT if there is no result yet.
        """
        # Only one of concurrent probes checks: a database that hangs must not block every thread.
        if self._start_check():
            started = self._clock()
            self._finish_check(started, self._check_database())
        reason = self._failure_reason()
        return reason is None, {
            "status": "healthy" if reason is None else "unhealthy",
            "reason": reason or "the database responds",
            "database": _status_text(reason is None),
            "conductor": _status_text(self._conductor),
        }

    def _start_check(self) -> bool:
        """Return True if this probe has to check the database itself.

        Return False if the last result is recent. If another probe is checking, wait for its
        result if the last result is old, and return False.
        """
        with self._condition:
            if self._clock() - self._ended < CACHE_SECONDS:
                return False
            if not self._checking:
                self._checking = True
                return True
            # From the start of the last check: no part of its result is older.
            if self._clock() - self._started > STALE_SECONDS:
                # Without any result the answer would be unhealthy, right after each start.
                first = self._ended == float("-inf")
                # A bounded wait, since the check may hang: then the answer is the old result.
                self._condition.wait_for(
                    lambda: not self._checking, FIRST_WAIT_TIMEOUT if first else WAIT_TIMEOUT
                )
            return False

    def _finish_check(self, started: float, reason: str | None) -> None:
        with self._condition:
            self._started = started
            self._ended = self._clock()
            self._reason = reason
            self._checking = False
            self._condition.notify_all()

    def _failure_reason(self) -> str | None:
        """Return why the API is unhealthy; None if it is healthy."""
        with self._condition:
            age = self._clock() - self._started
            if self._reason is not None or age <= STALE_SECONDS:
                return self._reason
            if self._ended == float("-inf"):
                return "starting, the database has not responded yet"
            return f"the database has not responded for {age:.0f} s"

    def record_conductor(self, answered: bool) -> None:
        """Record whether the conductor answered the last call."""
        self._conductor = answered

    def _check_database(self) -> str | None:
        """Return why the database cannot be used, None if it can."""
        try:
            self._reader.check(CHECK_TIMEOUT)
        except Unavailable as exc:
            LOG.warning("Health check failed: %s", exc.message)
            return exc.message
        except Exception as exc:
            # A check that never finishes would make every later probe wait for it.
            LOG.exception("Database check failed")
            return f"the database check failed: {type(exc).__name__}"
        return None


def _status_text(available: bool | None) -> str:
    return {True: "ok", False: "unavailable", None: "unknown"}[available]


STOP_TIMEOUT = 2.0  # seconds that stop() waits for a call in flight


class Heartbeat(LoopThread):
    """A thread that sends heartbeats to the conductor, at the interval that the conductor sets.

    All workers of one server are one service with one epoch, which is derived from ``server_id``,
    an identifier of one run of the server. A failure is logged once a minute and has no other
    effect.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        conductor: ConductorAPI,
        server_id: str,
        health: Health,
    ) -> None:
        super().__init__("heartbeat")
        self._conf = conf
        self._conductor = conductor
        # Not a random value: each worker would be an incarnation of its own, and each heartbeat
        # a restart of the service.
        self._epoch = str(uuid5(NAMESPACE_DNS, f"{conf.host}/{server_id}"))
        self._health = health
        self._failure_log = RateLimitedLogger(logger=LOG)

    def stop(self) -> None:
        """Stop the thread; abandon a call in progress after STOP_TIMEOUT seconds."""
        super().stop()
        self.join(STOP_TIMEOUT)

    def run_once(self) -> float:
        """Send one heartbeat; return the seconds until the next one."""
        versions = {"api": LATEST, "rpc": CONDUCTOR.version, SCHEMA: REVISION}
        try:
            response = self._conductor.service_hello(
                hosts.API, self._conf.host, self._epoch, versions
            )
        except CyborgError as exc:
            self._health.record_conductor(False)
            interval = float(self._conf.conductor.hello_interval)
            self._failure_log.warn(
                "Heartbeat to conductor failed, retrying in %g s: %s",
                interval,
                exc.message,
                host=self._conf.host,
            )
            return interval
        self._health.record_conductor(True)
        self._failure_log.reset()
        return float(response["interval"])
