# SPDX-License-Identifier: Apache-2.0
"""Dispatcher of jobs (units of host work): each open job is leased by one conductor.

A conductor leases the jobs that are due, queries the agent of each job, and records the answer. The
agent also calls when a job ends; the query is needed only if this call is lost. Each step can run
twice or be interrupted: the row is authoritative, and another conductor takes over an expired
lease.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from cyborg import tracing
from cyborg.conductor.common.calls import check_epoch
from cyborg.conductor.common.work_lease import Leasing, new_owner
from cyborg.conductor.custody import entries
from cyborg.conductor.inventory.report_handler import ReportHandler
from cyborg.conductor.jobs import answers, cancellation, programming
from cyborg.conductor.jobs.answers import Answer, OpenJob
from cyborg.conductor.jobs.completion import NOT_IN_TIME, Completion, JobResult
from cyborg.conductor.notifications.notifications import ArqEventRecorder
from cyborg.core.errors import CyborgError, NotFound, Unavailable
from cyborg.core.jobs import job as jobs
from cyborg.core.jobs.job import AFTER_REBOOT, AgentJobStatus, JobKind, is_retryable
from cyborg.core.jobs.progress import parse_activity
from cyborg.core.log import Remark, get_logger, log_fields
from cyborg.core.self_heal import CorrectiveAction
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db import old_rows
from cyborg.db.binding import write as arqs
from cyborg.db.jobs import write as store
from cyborg.db.services import write as services
from cyborg.db.totals import write as self_heal
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.agent_api import AgentAPI
from cyborg.telemetry.recorder import BIND_SECONDS, BINDS, MetricRecorder

LOG = get_logger(__name__)

# Hosts whose agents are queried at the same time, after which no further jobs are leased.
MAX_HOSTS = 64
# Jobs that are leased together.
BATCH_SIZE = 64
# Seconds that a round waits for answers. A round that waits longer would lease the next jobs of
# other hosts later.
ROUND_TIMEOUT = 2.0
# How long jobs that have ended can be looked up.
RETENTION = timedelta(days=1)
# Ended jobs that one sweep deletes.
PURGE_LIMIT = 1000


@dataclass(eq=False)
class JobDispatcher:
    """Dispatcher of jobs to agents; safe to run in several conductors.

    ``on_result`` is called after the commit of each result. While the agents of ``max_hosts`` hosts
    are queried, no further jobs are leased; with 1, no thread is started.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    agents: AgentAPI
    recorder: ArqEventRecorder
    on_result: Callable[[JobResult], None] = lambda _: None
    max_hosts: int = MAX_HOSTS
    metrics: MetricRecorder = field(default_factory=MetricRecorder)

    def __post_init__(self) -> None:
        # One owner for all rounds: a job that it had before is no job taken over from another.
        self._owner = new_owner(self.conf.host)
        self._leasing = Leasing(self.conf, "jobs", now=self.uow.clock)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._queues: dict[str, deque[store.JobRow]] = {}

    def run_once(self) -> int:
        """Start to process every job that is due; return their number.

        Answers that arrive within ROUND_TIMEOUT are recorded before this returns. An agent that
        does not answer delays only the jobs of its own host, since each host has a thread.
        """
        count = 0
        while not self._stopped.is_set() and (slots := self._free_slots()):
            rows = self._lease(slots)
            if not rows:
                break
            count += len(rows)
            # A thread for each host: an agent that does not answer holds its thread for the whole
            # RPC timeout.
            threads = [thread for row in rows if (thread := self._start(row)) is not None]
            end = time.monotonic() + ROUND_TIMEOUT
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
        return count

    def complete(
        self, job: str, host: str, state: str, error: str | None, epoch: str | None = None
    ) -> None:
        """Record the result of a job that its agent reports; ignore it if the job has ended.

        Raise Invalid, NotFound if the host has no such job, and Stale if ``epoch`` is not that of
        the host's agent.
        """
        uuid, host = parse_uuid(job, "job"), check_text("host", host)
        status = answers.parse_state(state)
        message = answers.clean_error(error)
        epoch = None if epoch is None else parse_uuid(epoch, "epoch")

        def read(tx: sa.Connection) -> store.JobRow | None:
            check_epoch(tx, host, epoch)
            return store.get(tx, uuid)

        row = self.uow.run(read)
        if row is None or row["host"] != host:
            raise NotFound(f"host {host} has no job {uuid}", job=uuid)
        fields = answers.job_fields(row)
        if row["state"] != jobs.JobState.OPEN:
            LOG.info("Result %s ignored, because the job has ended", status, **fields)
            return
        # Only a result ends a job; the next query reads the activity of a running one.
        if status is AgentJobStatus.RUNNING:
            return
        with tracing.remote_span(
            "job.complete", row["trace_context"], tracing.SpanKind.CONSUMER, **fields
        ):
            # Another conductor may have the lease now: the UPDATE that ends the job is guarded by
            # its state.
            self._record(row, Answer(status, message), row["owner"])

    def sweep(self) -> int:
        """Repair objects without an open job, purge old jobs; return the number of objects."""
        now = self.uow.clock()
        result = self.uow.run(lambda tx: Completion(tx, self.recorder, now).sweep())
        if result.binds:
            self.metrics.count(BINDS, "prepare_failed", amount=result.binds)
        if result.jobs or result.events or result.providers:
            self.on_result(result)
        purged = self.uow.run(lambda tx: old_rows.JOBS.purge(tx, now - RETENTION, PURGE_LIMIT))
        return result.completed + purged

    def stop(self) -> None:
        """Start no more calls; the leases of unprocessed jobs expire."""
        self._stopped.set()

    def _free_slots(self) -> int:
        with self._lock:
            return BATCH_SIZE if len(self._queues) < self.max_hosts else 0

    def _lease(self, limit: int) -> Sequence[store.JobRow]:
        """Lease due jobs, also those whose owner did not renew its lease."""
        lease = self._leasing.begin(owner=self._owner)

        def take(tx: sa.Connection) -> Sequence[store.JobRow]:
            rows = store.lease(
                tx, owner=lease.owner, now=lease.start, until=lease.until, limit=limit
            )
            if rows:
                lease.taken(len(rows), min(row["next_try_at"] for row in rows))
            taken_over = [row for row in rows if row["owner"] not in (None, self._owner)]
            self_heal.increment(tx, CorrectiveAction.JOBS_TAKEN_OVER, len(taken_over), lease.start)
            for row in taken_over:
                LOG.info(
                    "Took over a job, because the lease of its owner %s has expired",
                    row["owner"],
                    job=row["uuid"],
                    host=row["host"],
                )
            return rows

        return self.uow.run(take)

    def _start(self, row: store.JobRow) -> threading.Thread | None:
        """Process a job in the thread of its host; without threads if ``max_hosts`` is 1.

        Return the thread if a new one was started; a running one takes the job from its queue.
        """
        # Only tests set this, because they need the order of the calls.
        if self.max_hosts == 1:
            self._process(row)
            return None
        host = row["host"]
        with self._lock:
            if (queue := self._queues.get(host)) is not None:
                queue.append(row)
                return None
            self._queues[host] = deque([row])
        # A daemon: a call that hangs must not hold the process at its end. The job is leased again.
        thread = threading.Thread(target=self._process_queue, args=(host,), name="job", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: the job is retried when its lease expires
            with self._lock:
                del self._queues[host]
            raise
        return thread

    def _process_queue(self, host: str) -> None:
        """Process the jobs of a host in order; if its agent is unreachable, defer the rest."""
        unreachable_reason: str | None = None
        while True:
            with self._lock:
                queue = self._queues[host]
                if not queue or self._stopped.is_set():
                    del self._queues[host]
                    return
                row = queue.popleft()
            # None also for a job that needs no agent.
            unreachable_reason = self._process(row, unreachable_reason) or unreachable_reason

    def _process(self, row: store.JobRow, unreachable_reason: str | None = None) -> str | None:
        """Query the agent about a job and record the answer.

        ``unreachable_reason`` is set if the agent did not answer before: it is not queried again.
        Return why the agent is unreachable, None if it answered.
        """
        fields = answers.job_fields(row)
        with (
            log_fields(**fields),
            tracing.remote_span(
                "job.dispatch", answers.open_trace(row), tracing.SpanKind.CONSUMER, **fields
            ),
        ):
            return self._process_leased(row, unreachable_reason)

    def _process_leased(self, row: store.JobRow, unreachable_reason: str | None) -> str | None:
        """Return why the agent is unreachable; None if it answered, or was not needed.

        An error is logged, not raised: the job is processed again when its lease has expired.
        """
        try:
            if jobs.DRAINS in row["arguments"]:
                self._drain(row)
                return None
            if unreachable_reason is None:
                answer = self._query_agent(row)
            else:
                answer = Answer(error=unreachable_reason)
            self._record(row, answer, self._owner)
        except Unavailable as exc:
            LOG.warning("Cannot process job now, will retry: %s", exc.message)
        except Exception:
            # One job must not end the thread, which has the other jobs of the host.
            LOG.exception("Unexpected error while processing a job")
        else:
            return answer.error if answer.status is None else None
        return None

    def _drain(self, row: store.JobRow) -> None:
        """Check whether the job of a device that is being drained can begin."""
        now, notices = self.uow.clock(), self.recorder.notifications
        result = self.uow.run(
            lambda tx: programming.advance_drain(tx, row, self._owner, now, notices)
        )
        if result.completed:
            LOG.info(
                "Draining of the device for another layout has ended", **answers.job_fields(row)
            )
            self.on_result(result)

    def _query_agent(self, row: store.JobRow) -> Answer:
        """Request the work from the agent; the answer is its status now."""
        options, kind = self.conf.conductor, JobKind(row["kind"])
        seconds = options.program_timeout if kind is JobKind.PROGRAM else options.prepare_timeout
        if row["deadline"] is not None and not is_retryable(kind, row["arguments"]):
            # Query a job without time left too: it may have succeeded.
            seconds = max(1.0, (row["deadline"] - self.uow.clock()).total_seconds())
        try:
            answer: Any = self.agents.job(
                row["host"], row["uuid"], row["kind"], row["arguments"], seconds
            )
            if not isinstance(answer, Mapping):
                return Answer(AgentJobStatus.FAILED, "malformed answer of the agent: not an object")
            status = answers.parse_state(answer.get("state"))
            error = answers.clean_error(answer.get("error"))
            return Answer(status, error, parse_activity(answer.get("activity")))
        except Unavailable as exc:
            # The stop may be the cause, and may have closed the database by now.
            if self._stopped.is_set():
                raise
            return Answer(error=answers.clean_error(exc.message))
        except CyborgError as exc:  # the agent has refused the job, or answered malformed values
            return Answer(AgentJobStatus.FAILED, answers.clean_error(exc.message))

    def _report_end(
        self,
        row: store.JobRow,
        result: JobResult,
        now: datetime,
        *,
        succeeded: bool,
        reason: str | None,
    ) -> None:
        """Log a job that has ended, and count the bind that it ends."""
        # Another conductor has ended the job, and has reported it.
        if not result.completed:
            return
        kind = JobKind(row["kind"])
        fields = answers.job_fields(row)
        if succeeded:
            LOG.info("Job (%s) succeeded", kind, **fields)
        else:
            LOG.warning("Job (%s) failed: %s", kind, reason, **fields)
        if result.closed_device is not None:
            LOG.warning(
                "Device is failing and not schedulable for %g s, because its last prepare "
                "jobs failed; repair the device and enable it to end this earlier",
                self.conf.conductor.device_cordon_time,
                device=result.closed_device,
                host=row["host"],
            )
        if kind is JobKind.PREPARE and result.binds:
            outcome = "bound" if succeeded else "prepare_failed"
            self.metrics.count(BINDS, outcome, amount=result.binds)
            seconds = (now - row["created_at"]).total_seconds()
            self.metrics.observe(BIND_SECONDS, seconds, "prepare")

    def _record(self, row: store.JobRow, answer: Answer, owner: str | None) -> None:
        """Record the answer of an agent about a job that ``owner``, a conductor, has leased."""
        now, kind = self.uow.clock(), JobKind(row["kind"])
        overdue = row["deadline"] is not None and now >= row["deadline"]
        decision = jobs.decide(
            kind, answer.status, overdue=overdue, retryable=is_retryable(kind, row["arguments"])
        )
        if decision in (jobs.JobDecision.FINISH, jobs.JobDecision.UNDO):
            self._end(row, answer, now, succeeded=decision is jobs.JobDecision.FINISH)
        else:
            retried = decision is jobs.JobDecision.RETRY
            self._reschedule(OpenJob(row, answer, retried=retried, overdue=overdue), owner, now)

    def _end(self, row: store.JobRow, answer: Answer, now: datetime, *, succeeded: bool) -> None:
        reason = answer.error or (None if succeeded else NOT_IN_TIME)
        # A job that its deadline ends is no evidence against the device.
        reported = answer.status is AgentJobStatus.FAILED

        def complete(tx: sa.Connection) -> JobResult:
            completion = Completion(tx, self.recorder, now)
            return completion.complete(row, succeeded, reason, reported=reported)

        result = self.uow.run(complete)
        self._report_end(row, result, now, succeeded=succeeded, reason=reason)
        self.on_result(result)

    def _reschedule(self, job: OpenJob, owner: str | None, now: datetime) -> None:
        """Set the next query of a job that stays open, and record the failure of an attempt."""
        row, delay = job.row, job.draw_delay()
        until = now + timedelta(seconds=delay)
        # At its deadline the job is decided again, even if its delay is longer.
        if row["deadline"] is not None and not job.overdue:
            until = min(until, row["deadline"])
        result = self.uow.run(lambda tx: self._write_open(tx, job, owner, now=now, until=until))
        for remark in result.remarks:
            LOG.warning("%s", remark.text, host=row["host"], **remark.fields)
        if result.completed:
            self.on_result(result)
        elif job.retried:
            LOG.warning(
                "Job (%s) failed, retrying in %.0f s: %s",
                job.kind,
                delay,
                job.answer.error,
                **answers.job_fields(row),
            )

    def _write_open(
        self,
        tx: sa.Connection,
        job: OpenJob,
        owner: str | None,
        *,
        now: datetime,
        until: datetime,
    ) -> JobResult:
        """Write a job that stays open, or abandon its cleaning; return what this has changed."""
        row, answer = job.row, job.answer
        completion = Completion(tx, self.recorder, now)
        if job.kind is JobKind.RELEASE and job.retried:
            handler = ReportHandler(self.conf, self.recorder.notifications)
            abandoned = cancellation.abandon_cleaning(tx, row, answer.error, now, handler)
            if abandoned.completed:
                return abandoned
        # Only in these cases ARQs change. They are locked before jobs, as in every transaction.
        waiting = arqs.lock_of_jobs(tx, [row["id"]]) if job.late or job.first_failure else []
        message = job.message
        if not store.reschedule(
            tx, row["id"], owner, until=until, error=message, activity=answer.activity
        ):
            return JobResult()  # another conductor has recorded an answer
        if job.kind is JobKind.RELEASE and answer.status is AgentJobStatus.FAILED:
            entries.record_cleaning_failed(tx, row, answer.error, now)
        if job.first_failure:
            completion.record_first_failure(row, waiting, str(message))
        if (
            job.failed
            and AFTER_REBOOT in row["arguments"]
            and row["attempts"] >= jobs.GIVE_UP_ATTEMPTS
        ):
            # The report shows whether the job is impossible: ``cancellation.give_up_impossible``.
            services.request_report(tx, row["host"])
        if job.late and completion.fail_unbinds(row, waiting, str(message)):
            text = f"ARQs are UnbindFailed until their handles are clean: {message}"
            remark = Remark(text, {"arq": [arq["uuid"] for arq in waiting]})
            return JobResult(remarks=(remark,))
        return JobResult()
