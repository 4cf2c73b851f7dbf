# SPDX-License-Identifier: Apache-2.0
"""Interval of the heartbeats of agents, and the deadlines that a heartbeat sets."""

import time
from collections.abc import Callable
from datetime import datetime

from oslo_config import cfg

from cyborg.core.hosts.liveness import choose_interval, compute_deadlines
from cyborg.core.log import get_logger
from cyborg.db.services import write as services
from cyborg.db.services.write import HeartbeatTimes
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

MAX_COUNT_AGE = 30.0  # seconds for which the number of agents is used


class HeartbeatInterval:
    """Interval that this conductor gives to agents. It follows the numbers of the daemons."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        *,
        now: Callable[[], datetime] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``now`` returns naive UTC; ``clock`` returns monotonic seconds."""
        self._options = conf.conductor
        self._uow = uow
        self._now = now or uow.clock
        self._clock = clock
        self._counted_at = float("-inf")
        self.seconds: float = self._options.hello_interval
        """Seconds between two heartbeats of an agent."""

    def sweep(self) -> int:
        """Count the daemons if the last count is old; return 1 if the interval has changed."""
        if self._clock() - self._counted_at < MAX_COUNT_AGE:
            return 0
        now, options = self._now(), self._options
        found = self._uow.run(lambda tx: services.count_up(tx, now))
        self._counted_at = self._clock()
        # The workers of one host share one service; all hosts are expected to run as many.
        processes = found["conductors"] * options.workers
        minimum, maximum = options.hello_interval, options.max_hello_interval
        previous = self.seconds
        self.seconds = choose_interval(found["agents"], processes, minimum, maximum)
        if self.seconds == previous:
            return 0
        LOG.info(
            "Heartbeat interval of the agents is %.1f s instead of %.1f s: %d agents, %d conductor "
            "processes",
            self.seconds,
            previous,
            found["agents"],
            processes,
        )
        return 1

    def agent_times(self, now: datetime) -> HeartbeatTimes:
        """Return the time of an agent's heartbeat, with the deadlines of the interval."""
        return self._times(now, self.seconds)

    def service_times(self, now: datetime) -> HeartbeatTimes:
        """Return the time of another daemon's heartbeat, with its deadlines."""
        return self._times(now, self._options.hello_interval)

    def _times(self, now: datetime, interval: float) -> HeartbeatTimes:
        options = self._options
        deadlines = compute_deadlines(
            now, interval, options.late_heartbeats, options.down_heartbeats
        )
        return {
            "last_seen_at": now,
            "late_at": deadlines.late_at,
            "down_at": deadlines.down_at,
        }
