# SPDX-License-Identifier: Apache-2.0
"""Times of heartbeats and reports: spread over the agents, and limited in their rate.

Agents that start together do not call together.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cyborg.agent.state_file import StateFile
from cyborg.threads.failures import JITTER

BURST = 16
"""Reports that may follow each other without a pause: the virtual functions of a card come and go
one after the other, and Placement must have each within a second."""

MIN_PAUSE = 1.0
"""Seconds between two reports when an outcome waits that must not be delivered before them."""


class ReportPace:
    """Token bucket: a burst of BURST reports, then one report for each heartbeat interval.

    Times are in seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._tokens = float(BURST)
        self._refilled_at: float | None = None
        self._sent_at = float("-inf")

    def next_report(self, now: float, interval: float, *, urgent: bool) -> float | None:
        """Return the earliest time for a report; None if it must wait for the next heartbeat.

        ``interval`` is the time between two heartbeats. If the report is not sent before the next
        heartbeat, the answer to that heartbeat requests it. ``urgent`` is set if an outcome is sent
        only after the report.
        """
        if self._refilled_at is not None and interval > 0:
            refill = max(0.0, now - self._refilled_at) / interval
            self._tokens = min(float(BURST), self._tokens + refill)
        self._refilled_at = now
        if self._tokens >= 1:
            return now
        # Somebody waits for the outcome of a job, so that it does not wait for the next heartbeat.
        return max(now, self._sent_at + MIN_PAUSE) if urgent else None

    def sent(self, now: float) -> None:
        """Count a sent report. Reports that the answer to a heartbeat requested count too."""
        # Below zero: a heartbeat's report and a change's must not share one interval for ever.
        self._tokens = max(-1.0, self._tokens - 1)
        self._sent_at = now


START_SHARE = 0.5
"""Share of the interval within which the first heartbeat is sent after a restart."""

RESPREAD_RATIO = 1.5
"""Growth of the interval after which the heartbeats of all agents must be spread again.

Agents that were spread over a shorter interval call within that part of a longer one."""

MAX_INTERVAL = 3600.0  # seconds; a longer interval in the file is not used
MAX_PAUSE = 10.0  # seconds between two attempts, unless half of the interval is longer


class HeartbeatSchedule:
    """Times of one agent's heartbeats; times are seconds of a monotonic clock.

    After a restart of all agents, all conductors or the broker, all agents call at the same time.
    So the first heartbeat is sent at a random time, and the heartbeat that follows the first one,
    or one that failed, after a random part of the interval. After that, the times of all agents are
    spread evenly over the interval, and each agent keeps its own.
    """

    def __init__(
        self, previous_interval: float = 0.0, random_share: Callable[[], float] = JITTER.random
    ) -> None:
        """``previous_interval`` is the interval before the restart, 0 if it is not known.

        ``random_share`` returns a random number from 0 to 1.
        """
        self._share = random_share
        self._spread_over = 0.0  # seconds over which the heartbeats were spread last
        self.interval = previous_interval
        """Seconds between two heartbeats, as the conductor set it last."""
        self.first_delay = START_SHARE * previous_interval * random_share()
        """Seconds from the start of the agent to its first heartbeat."""

    @property
    def max_pause(self) -> float:
        """Return the longest pause between two attempts to reach a conductor."""
        return max(MAX_PAUSE, self.interval / 2)

    def record_failure(self) -> None:
        """Record that a conductor did not answer: other agents may have the same outage."""
        self._spread_over = 0.0

    def next_heartbeat(self, now: float, interval: float) -> float:
        """Return when the next heartbeat is due after one that was answered with ``interval``."""
        self.interval = interval
        if interval > RESPREAD_RATIO * self._spread_over:
            self._spread_over = interval
            # A random part once, then the fixed interval: random intervals would bunch up again by
            # chance.
            return now + interval * self._share()
        # A shorter interval keeps the spread, over its own length.
        self._spread_over = min(self._spread_over, interval)
        return now + interval


class IntervalFile:
    """File with the last interval, which the restarted agent reads."""

    def __init__(self, path: Path) -> None:
        """Read the file. A missing or malformed file counts as 0."""
        self._file = StateFile(
            path,
            _load_interval,
            description="The file of the heartbeat interval",
            consequence="the first heartbeat is sent without a delay",
        )
        self.interval = self._file.read() or 0.0

    def record(self, interval: float) -> None:
        """Write an interval if it differs much from the written one."""
        low, high = sorted((interval, self.interval))
        if high <= RESPREAD_RATIO * low:
            return
        self.interval = interval
        self._file.try_write({"interval": interval})


def _load_interval(data: Any) -> float:
    interval = float(data["interval"])
    return interval if 0 <= interval <= MAX_INTERVAL else 0.0
