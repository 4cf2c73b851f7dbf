# SPDX-License-Identifier: Apache-2.0
"""Rate limit of the reports that are sent before the next heartbeat."""

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
        return max(now, self._sent_at + MIN_PAUSE) if urgent else None

    def sent(self, now: float) -> None:
        """Count a sent report. Reports that the answer to a heartbeat requested count too."""
        # Below zero: a heartbeat's report and a change's must not share one interval for ever.
        self._tokens = max(-1.0, self._tokens - 1)
        self._sent_at = now
