# SPDX-License-Identifier: Apache-2.0
"""Heartbeats at the interval that the conductor sets, and full reports on its request.

Agents that start together do not call together: the times are spread over the agents, and limited
in their rate.
"""

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from oslo_context import context

from cyborg.agent.backends.backend import Backend
from cyborg.agent.backends.inventory import Inventory, collect
from cyborg.agent.jobs.checkpoint import Outcomes
from cyborg.agent.state_file import StateFile
from cyborg.core import hosts, log
from cyborg.core.drivers.desired_state import BackendOutcome
from cyborg.core.drivers.registry import DriverEntry
from cyborg.core.errors import CyborgError, Stale, Unavailable, is_expected
from cyborg.core.inventory.report import BackendState, Report
from cyborg.rpc.contract import AGENT, ConductorAPI
from cyborg.threads.failures import JITTER, Backoff, RateLimitedLogger
from cyborg.threads.periodic import LoopThread

LOG = log.get_logger(__name__)

# Reports that may follow each other without a pause: the virtual functions of a card come and go
# one after the other, and Placement must have each within a second.
BURST = 16

# Seconds between two reports when an outcome waits that must not be delivered before them.
MIN_PAUSE = 1.0


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
        # Down to -1: a report that a heartbeat requests is sent without a token. If it cost none,
        # each interval could have that report and another one for a change.
        self._tokens = max(-1.0, self._tokens - 1)
        self._sent_at = now


# Share of the interval within which the first heartbeat is sent after a restart.
START_SHARE = 0.5

# Growth of the interval after which the heartbeats of all agents must be spread again.
#
# Agents that were spread over a shorter interval call within that part of a longer one.
RESPREAD_RATIO = 1.5

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


INITIAL_PAUSE = 0.5  # seconds before the first retry when the conductor is unreachable


class DesiredStateListener(Protocol):
    """Reconciler of the host's desired state."""

    @property
    def reported_generation(self) -> int:
        """Return the generation last acknowledged by the conductor."""

    def request(self, generation: int) -> int:
        """Request reconciliation to a generation; return the generation that was last reported."""

    def acknowledge(self, generation: int, accepted: bool) -> None:
        """Record whether the conductor accepted the outcomes of a generation."""


class _DiscoveryKey(NamedTuple):
    discovery_id: str
    backend: str


@dataclass(eq=False)
class Reporter(LoopThread):
    """Sender of this agent's heartbeats and reports; one object for each epoch of the agent.

    ``clock`` returns monotonic seconds, for heartbeats, reports and rate-limited logs.

    ``record_interval`` is called with the interval in each answer to a heartbeat.

    ``identity`` returns the names of the host, and ``drivers`` the installed drivers; both are
    called before each heartbeat. ``boot_id`` is the boot id of the host. Set ``desired_state``
    to the reconciler, so that heartbeats include its generation, and ``live_attach`` to whether
    this agent attaches devices to running guests.
    """

    host: str
    endpoint: str
    conductor: ConductorAPI
    backends: Sequence[Backend]
    clock: Callable[[], float] = time.monotonic
    identity: Callable[[], hosts.Identity] = lambda: hosts.NO_IDENTITY
    drivers: Callable[[], Sequence[DriverEntry] | None] = lambda: None
    boot_id: str | None = None
    schedule: HeartbeatSchedule | None = None
    record_interval: Callable[[float], object] = lambda interval: None

    def __post_init__(self) -> None:
        super().__init__("reporter")
        self.desired_state: DesiredStateListener | None = None
        self.epoch = str(uuid.uuid4())
        self.live_attach = False
        # Called after each report that a conductor requested: it may lack what it had before.
        self.on_requested_report: Callable[[], object] = lambda: None
        self._report_number = 0
        self._reported_digest: str | None = None  # of the last report of this epoch
        self._schedule = self.schedule or HeartbeatSchedule()
        self._start_at: float | None = None  # when the first heartbeat is due
        self._heartbeat_at = float("-inf")  # when the next heartbeat is due
        self._pace = ReportPace()
        self._discoveries = Outcomes[_DiscoveryKey, BackendState](
            "discovery", subject_of=lambda key: key.discovery_id
        )
        self._jobs = Outcomes[str, tuple[str, str | None]]("job")  # state and error by job
        self._backend_outcomes: tuple[int, Sequence[BackendOutcome]] | None = None
        self._lock = threading.Lock()  # of the backend outcomes
        self._backoff = Backoff(INITIAL_PAUSE, self._schedule.max_pause, jitter=True)
        self._failure_log = RateLimitedLogger(self.clock, LOG)

    def add_discovery_outcome(self, discovery_id: str, state: BackendState) -> None:
        """Queue the outcome of a discovery; it is sent after the report of the found devices."""
        self._discoveries.put(_DiscoveryKey(discovery_id, state.name), state)
        self.wake()

    def add_job_outcome(self, job: str, state: str, error: str | None) -> None:
        """Queue the outcome of a job."""
        self._jobs.put(job, (state, error))
        self.wake()

    def count_undelivered(self) -> int:
        """Return the number of undelivered outcomes of jobs and discoveries."""
        return len(self._jobs) + len(self._discoveries)

    def add_backend_outcomes(self, generation: int, outcomes: Sequence[BackendOutcome]) -> None:
        """Queue the outcomes of a generation; they are sent after the report of its devices.

        The outcomes replace undelivered outcomes of an older generation.
        """
        with self._lock:
            self._backend_outcomes = (generation, outcomes)
        self.wake()

    def run_once(self) -> float:
        """Send due messages; return the seconds until the next round."""
        # Each round has a request id of its own, which all lines and calls of the round have.
        context.RequestContext()
        try:
            pause = self._sync()
        except Exception as exc:
            failure = (
                exc.message if isinstance(exc, CyborgError) else f"{type(exc).__name__}: {exc}"
            )
            # The traceback of an outage says nothing and repeats with each retry.
            LOG.debug("Call to the conductor failed: %s", failure, exc_info=not is_expected(exc))
        else:
            if self._failure_log.reset():
                LOG.info("Connection to conductor restored", host=self.host)
            self._backoff.reset()
            return pause
        self._schedule.record_failure()
        pause = self._backoff.next_delay()
        self._failure_log.warn(
            "Heartbeat to conductor failed, retrying in %.1f s: %s", pause, failure, host=self.host
        )
        return pause

    def _sync(self) -> float:
        """Send what is due; return the seconds until the next call."""
        # Read before the devices are collected: an outcome is sent only after its devices.
        outcomes = self._backend_outcomes
        jobs = self._jobs.pending()
        discoveries = self._discoveries.pending()
        urgent = outcomes is not None or bool(jobs or discoveries)
        snapshots = [backend.snapshot for backend in self.backends]
        # At each heartbeat, because a name of the host or a driver may have come since.
        inventory = collect(snapshots, self.identity(), self.drivers())
        now = self.clock()
        reported = False
        if self._start_at is None:
            self._start_at = now + self._schedule.first_delay
        if now < self._start_at and not urgent:
            return self._start_at - now
        if now < self._heartbeat_at and self._has_changed(inventory):
            report_at = self._pace.next_report(now, self._schedule.interval, urgent=urgent)
            if report_at is None:
                # The next heartbeat sends the latest state.
                return self._heartbeat_at - now
            if report_at > now:
                # The outcomes wait too: they follow the devices.
                return min(self._heartbeat_at, report_at) - now
            reported = self._report_early(inventory)
        if not reported:
            self._heartbeat(inventory)
        if outcomes is not None:
            self._flush_backend_outcomes(outcomes)
        self._jobs.deliver(jobs, self._deliver_job)
        self._discoveries.deliver(discoveries, self._deliver_discovery)
        return max(0.0, self._heartbeat_at - self.clock())

    def _heartbeat(self, inventory: Inventory) -> None:
        """Send a heartbeat, and a report if the answer requests it."""
        answer = self._send_hello(inventory)
        if answer["report"] and inventory.digest is not None:
            try:
                self._report(inventory, inventory.digest)
            except Stale:
                # Another agent registered for this host; a heartbeat makes this epoch current.
                self._send_hello(inventory)
                self._report(inventory, inventory.digest)
            self.on_requested_report()

    def _has_changed(self, inventory: Inventory) -> bool:
        """Return whether the inventory differs from the last report of this epoch.

        Return False before the first report and after a failed report: then a heartbeat must be
        sent first, because the conductor may still know another epoch.
        """
        return self._reported_digest is not None and inventory.digest not in (
            None,
            self._reported_digest,
        )

    def _report_early(self, inventory: Inventory) -> bool:
        """Report ahead of the next heartbeat; return whether the conductor accepted it."""
        try:
            self._report(inventory, str(inventory.digest))
        except Stale:
            return False
        return True

    def _flush_backend_outcomes(self, pending: tuple[int, Sequence[BackendOutcome]]) -> None:
        """Send the outcomes of a generation once; if rejected, they are requested again."""
        generation, outcomes = pending
        bodies = [outcome.to_dict() for outcome in outcomes]
        accepted = False
        try:
            self.conductor.report_backend_outcomes(
                host=self.host, epoch=self.epoch, generation=generation, outcomes=bodies
            )
            accepted = True
        except Unavailable:
            raise
        except CyborgError as exc:
            # The answer to the next heartbeat requests the generation again.
            LOG.warning(
                "Conductor rejected the outcomes of generation %d, the next heartbeat requests "
                "them again: %s",
                generation,
                exc.message,
                host=self.host,
            )
        with self._lock:
            # Newer outcomes may have replaced them during the call.
            if self._backend_outcomes is pending:
                self._backend_outcomes = None
        if self.desired_state is not None:
            self.desired_state.acknowledge(generation, accepted)

    def _deliver_job(self, job: str, outcome: tuple[str, str | None]) -> None:
        state, error = outcome
        self.conductor.job_done(job=job, host=self.host, state=state, error=error, epoch=self.epoch)

    def _deliver_discovery(self, key: _DiscoveryKey, state: BackendState) -> None:
        body = state.without_details().to_dict()
        self.conductor.discovery_done(key.discovery_id, self.host, [body], self.epoch)

    def _send_hello(self, inventory: Inventory) -> Mapping[str, Any]:
        """Send a heartbeat, follow its answer (interval, generation), and return it."""
        driver_versions = {b.driver.name: b.driver.version for b in self.backends}
        answer = self.conductor.hello(
            host=self.host,
            epoch=self.epoch,
            endpoint=self.endpoint,
            status="READY",
            drivers=[state.without_details().to_dict() for state in inventory.states],
            digest=inventory.digest,
            versions={
                "rpc": AGENT.version,
                "drivers": driver_versions,
                hosts.LIVE_ATTACH: self.live_attach,
                # A conductor accepts a result without an epoch only from agents that send none.
                hosts.RESULT_EPOCHS: True,
            },
            observed_generation=None
            if self.desired_state is None
            else self.desired_state.reported_generation,
            boot_id=self.boot_id,
        )
        interval = float(answer["interval"])
        self._heartbeat_at = self._schedule.next_heartbeat(self.clock(), interval)
        # A longer interval means more agents, whose retries must be spread as far.
        self._backoff.maximum = self._schedule.max_pause
        self.record_interval(interval)
        desired = answer.get("desired_generation")
        if desired is not None and self.desired_state is not None:
            self.desired_state.request(desired)
        return answer

    def _report(self, inventory: Inventory, digest: str) -> None:
        """Send the whole inventory under the next report number."""
        # Also if the call fails: the conductor may have recorded this number, and accepts only a
        # higher one.
        self._report_number += 1
        # Until the conductor accepts it: after a failure nobody knows which inventory it has.
        self._reported_digest = None
        self._pace.sent(self.clock())
        LOG.info(
            "Sending report %d: %d devices",
            self._report_number,
            len(inventory.devices),
            host=self.host,
        )
        report = Report(
            host=self.host,
            epoch=self.epoch,
            generation=self._report_number,
            digest=digest,
            backends=inventory.states,
            devices=inventory.devices,
            identity=inventory.identity,
            drivers=inventory.drivers,
        )
        self.conductor.report(report.dump())
        self._reported_digest = digest
