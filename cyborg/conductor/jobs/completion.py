# SPDX-License-Identifier: Apache-2.0
"""Completion of jobs: end a job and apply its result in one transaction.

Locks are taken in the same order as in every other transaction: ARQs, handles, then the job. If two
transactions record a result, the second finds that the job has ended, and changes nothing.

A failure is also recorded on the device of the job, by the rules of ``core.jobs.progress``. Release
jobs are left out: they are retried until they succeed, and the open jobs themselves have the
errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from cyborg.conductor.binding import release
from cyborg.conductor.binding.context_states import follow_arqs
from cyborg.conductor.custody import entries
from cyborg.conductor.notifications.notifications import ArqEventRecorder
from cyborg.core.binding.states import ArqState
from cyborg.core.contexts import refusals
from cyborg.core.jobs import progress
from cyborg.core.jobs.job import AFTER_REBOOT, CANCELLED, GUEST_KINDS, JobKind, JobState, WorkItem
from cyborg.core.log import Remark
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.binding import write as store
from cyborg.db.deployables import programming
from cyborg.db.devices import write as devices
from cyborg.db.jobs import write as jobs
from cyborg.db.providers import write as publishing
from cyborg.db.rows import DeviceRow
from cyborg.db.services import write as services
from cyborg.db.totals import write as self_heal

NOT_IN_TIME = "not completed in time"
NO_JOB_REASON = "no reason given"
NO_PREPARE_JOB = "no open job prepares its device"
# Objects of each kind that one sweep repairs.
SWEEP_LIMIT = 256
# Time past its deadline after which an unreadable job is failed. The dispatcher ends jobs at their
# deadline and must win: its result has the reason.
OVERDUE_MARGIN = timedelta(minutes=5)
# Devices that one sweep opens. Both limits keep the transaction of a sweep short; the next sweep
# does the rest.
OPEN_LIMIT = 256


@dataclass(frozen=True, slots=True)
class JobResult:
    """Numbers of objects that the end or a failure of jobs has changed."""

    completed: int = 0  # jobs or objects
    jobs: int = 0  # new jobs
    events: int = 0  # new messages in the outbox
    providers: int = 0  # providers to publish
    closed_device: str | None = None  # its uuid; it was closed, because its prepare jobs fail
    binds: int = 0  # binds that succeeded or failed; a job succeeds or fails with its bind
    remarks: Sequence[Remark] = ()  # texts to log


@dataclass(frozen=True, slots=True)
class Completion:
    """Writer of the results of jobs at a time, within one transaction."""

    tx: sa.Connection
    recorder: ArqEventRecorder
    now: datetime

    def complete(
        self, row: jobs.JobRow, succeeded: bool, error: str | None, *, reported: bool = True
    ) -> JobResult:
        """End a job and apply its result; do nothing if the job has already ended.

        ``reported`` is whether the agent has reported the result.
        """
        # The lock of the requests comes first, as in every transaction that touches requests.
        waiting = store.lock_of_jobs(self.tx, [row["id"]])
        state = JobState.DONE if succeeded else JobState.FAILED
        # It was cancelled while the agent worked on it, so it ends with the answer of the agent.
        if state is JobState.FAILED and CANCELLED in row["arguments"]:
            state = JobState.CANCELLED
        # The agent's call and the answer to a query may arrive at two conductors: one of them ends
        # the job.
        if not jobs.end(self.tx, [row["id"]], state, error):
            return JobResult()
        if not succeeded:
            self_heal.increment(self.tx, CorrectiveAction.JOBS_UNDONE, 1, self.now)
        result = self._apply_result(row, waiting, succeeded, error)
        if row["kind"] == JobKind.RELEASE or row["kind"] in GUEST_KINDS:
            return result  # what a guest does with a device is no evidence about the device
        if succeeded:
            return replace(result, providers=result.providers + self._record_success(row))
        device = self._record_failure(row, error or NO_JOB_REASON, reported=reported)
        if device is None:
            return result
        # One or more: the number only decides whether the publisher is woken.
        return replace(result, providers=1, closed_device=device)

    def _apply_result(
        self,
        row: jobs.JobRow,
        waiting: Sequence[store.ArqRow],
        succeeded: bool,
        error: str | None,
    ) -> JobResult:
        """Write what the end of a job means for its ARQs or its device.

        Jobs to release and to restore are retried until they succeed: no other end of them gets
        here.
        """
        failure = None if succeeded else error or NO_JOB_REASON
        match JobKind(row["kind"]):
            case JobKind.PREPARE if succeeded:
                entries.record_prepared(self.tx, waiting, row, self.now)
                return self._finish_binds(waiting)
            case JobKind.PREPARE:
                # The agent cancels the job: it may still run after its deadline.
                return self._fail_binds(waiting, [row["uuid"]], error, job=row)
            case JobKind.RELEASE:
                return self._finish_cleaning(row, waiting)
            case JobKind.PARTITION:
                self._record_partitioned(row, failure)
                # Reports during the job did not change the device. The next one has the new layout;
                # the device stays closed until then.
                services.request_report(self.tx, row["host"])
                if succeeded and not row["arguments"].get(AFTER_REBOOT):
                    layout = row["arguments"]["layout"]
                    programming.set_desired_layout(self.tx, row["subject"], layout)
                return JobResult(completed=1, jobs=1)  # restores that waited for it
            case JobKind.RESTORE:
                entries.record_prepared(self.tx, waiting, row, self.now)
                return self._finish_restore(row, waiting)
            case JobKind.PLUG | JobKind.UNPLUG:
                return JobResult(completed=1)  # the work on the attachment reads the job
            case JobKind.PROGRAM:
                image: Any = row["arguments"].get("image")
                providers = programming.end(self.tx, row["id"], image if succeeded else None)
                publishing.mark_stale_existing(self.tx, providers, self.now)
                self._record_programmed(row, failure)
                # Reports during the programming did not change the device: request a new one.
                services.request_report(self.tx, row["host"])
                return JobResult(completed=1, providers=len(providers))

    def record_first_failure(
        self, row: jobs.JobRow, waiting: Sequence[store.ArqRow], error: str
    ) -> None:
        """Record the consequence of a first failed attempt of a job that is retried.

        A failed release job makes its dirty handles reserved in Placement; a failed restore job
        makes the whole device reserved. Listeners are notified of a failed restore job, because its
        ARQ stays bound, but the next boot of the instance may fail. Listeners are also notified if
        a layout or an image cannot be applied again after a reboot; the device is unschedulable
        already. ``waiting`` are the locked ARQs of the job.
        """
        if row["kind"] == JobKind.RELEASE:
            providers = jobs.providers_of(self.tx, row["id"])
            publishing.mark_stale_existing(self.tx, providers.own | providers.sets, self.now)
        elif row["kind"] == JobKind.RESTORE:
            publishing.mark_stale_existing(self.tx, store.providers_of(waiting), self.now)
            self.recorder.record_restore_failed(self.tx, waiting, error)
        elif AFTER_REBOOT in row["arguments"] and row["kind"] == JobKind.PARTITION:
            self._record_partitioned(row, error)
        elif AFTER_REBOOT in row["arguments"]:
            self._record_programmed(row, error)

    def fail_unbinds(self, row: jobs.JobRow, waiting: Sequence[store.ArqRow], error: str) -> int:
        """Change the Unbound ARQs of an overdue release job to UnbindFailed; return their number.

        ``waiting`` are the locked ARQs of the job. ARQs in UnbindFailed stay unchanged.
        """
        failed = [arq for arq in waiting if arq["state"] == ArqState.UNBOUND]
        count = store.fail_unbind(self.tx, [arq["id"] for arq in failed], row["id"])
        self.recorder.record_unbind_failed(self.tx, failed, row["host"], error)
        failure = _make_failure(refusals.CLEAN_FAILED, error, row, self.now)
        follow_arqs(self.tx, failed, self.recorder, self.now, failure)
        return count

    def sweep(self) -> JobResult:
        """Repair objects that wait for a job that has ended or does not exist.

        They are ARQs in BindStarted, dirty handles, and unbound ARQs whose former handle was
        cleaned. Only a database that was restored or edited by hand can have such objects. Also end
        jobs that are past their deadline.
        """
        tx, now = self.tx, self.now
        # A dispatcher ends a job at its deadline. Only a job that no dispatcher can read gets here.
        late_jobs = jobs.overdue(tx, now - OVERDUE_MARGIN, SWEEP_LIMIT)  # uuid by row id
        jobs.end(tx, late_jobs, JobState.FAILED, NOT_IN_TIME)
        stranded = store.lock_stranded(tx, SWEEP_LIMIT)
        failed = JobResult()
        if stranded:
            failed = self._fail_binds(stranded, list(late_jobs.values()), NO_PREPARE_JOB)
        dirty = jobs.unassigned_dirty(tx, SWEEP_LIMIT)
        timeout = self.recorder.conf.conductor.release_timeout
        cleaning = release.enqueue_cleaning(tx, dirty, now=now, timeout=timeout, repeated=True)
        # ARQs that got no job above: their handles were removed, so there is nothing left to clean.
        released = store.lock_released(tx, SWEEP_LIMIT)
        self._finish_unbinds(released)
        # The row of an ended job is purged after a day: its deployable would stay closed.
        freed = publishing.mark_stale_existing(tx, programming.detach_ended_jobs(tx), now)
        opened = open_devices(tx, now)
        self_heal.increment(tx, CorrectiveAction.STUCK_BINDS_FAILED, len(stranded), now)
        return JobResult(
            failed.completed + len(dirty) + len(released) + freed,
            jobs=failed.jobs + len(set(cleaning.values())),
            events=failed.events,
            providers=failed.providers + freed + opened,
            binds=failed.binds,
        )

    def _record_failure(self, job: jobs.JobRow, error: str, *, reported: bool) -> str | None:
        """Record a failed job; return the uuid of its device if the device becomes failing.

        ``reported`` is whether the agent has reported the failure. If the agent did not answer, the
        failure does not count against the device.
        """
        kind, options = JobKind(job["kind"]), self.recorder.conf.conductor
        failed = progress.find_failed_item(kind, _items(job), error)
        if failed is None:
            return None
        item = failed.item
        failure = progress.build_failure(kind, job["uuid"], item, failed.error, self.now)
        # One row at most: a host has one device of an address.
        row = next(iter(devices.lock_history(self.tx, job["host"], {item.device})), None)
        if row is None:
            return None
        old = _history(row)
        # An error that names no item may have another cause than this device.
        counted = reported and failed.is_named and progress.is_evidence(item)
        new = progress.add_failure(
            old, failure, counted=counted, close_after=options.device_cordon_after
        )
        # The condition of the device does not change, so its providers are not published.
        if old.failing or not new.failing:
            _write_history(self.tx, row, new, row["retry_at"])
            return None
        publishing.mark_stale_of_devices(self.tx, [row["uuid"]], self.now)
        _write_history(self.tx, row, new, self.now + timedelta(seconds=options.device_cordon_time))
        return row["uuid"]

    def _record_success(self, job: jobs.JobRow) -> int:
        """Clear the failures of the devices of a job; return the number of changed providers."""
        kind, addresses = JobKind(job["kind"]), {item.device for item in _items(job)}
        # A job seldom follows a failure: this one query takes no lock.
        if not (failed := devices.addresses_with_failures(self.tx, job["host"], addresses)):
            return 0
        opened: list[str] = []
        for row in devices.lock_history(self.tx, job["host"], failed):
            if row["failing"]:
                opened.append(row["uuid"])
            _write_history(self.tx, row, progress.add_success(_history(row), kind), retry_at=None)
        return publishing.mark_stale_of_devices(self.tx, opened, self.now) if opened else 0

    def _record_partitioned(self, row: jobs.JobRow, error: str | None) -> None:
        """Record the result of a partition job; ``error`` is None if it succeeded."""
        entries.record_partitioned(self.tx, row, error, self.now)
        self.recorder.notifications.record_layout_finished(
            self.tx, row["subject"], row["arguments"]["layout"], error
        )

    def _record_programmed(self, row: jobs.JobRow, error: str | None) -> None:
        """Record the result of a program job; ``error`` is None if it succeeded."""
        image: Any = row["arguments"].get("image")
        entries.record_programmed(self.tx, row, image, error, self.now)
        self.recorder.notifications.record_program_finished(
            self.tx, row["subject"], image, succeeded=error is None, error=error
        )

    def _finish_binds(self, rows: Sequence[store.ArqRow]) -> JobResult:
        # All ARQs of the bind at once: Nova counts the events and would go on with a part of them.
        store.finish_bind(self.tx, [row["id"] for row in rows])
        self.recorder.record_bound(self.tx, rows)
        follow_arqs(self.tx, rows, self.recorder, self.now)
        return JobResult(completed=1, events=len(rows), binds=_count_binds(rows))

    def _fail_binds(
        self,
        rows: Sequence[store.ArqRow],
        cancels: Sequence[str],
        error: str | None,
        job: jobs.JobRow | None = None,
    ) -> JobResult:
        """Fail the binds of ARQs and enqueue the cleaning of their handles.

        ``cancels`` are the uuids of the jobs that the agents must cancel before the cleaning.
        """
        timeout = self.recorder.conf.conductor.release_timeout
        undone = release.fail_binds(
            self.tx, rows, now=self.now, timeout=timeout, cancelled_jobs=cancels, error=error
        )
        self.recorder.record_bind_failed(self.tx, rows, error)
        reason = error or NO_JOB_REASON
        failure = _make_failure(refusals.PREPARE_FAILED, reason, job, self.now)
        follow_arqs(self.tx, rows, self.recorder, self.now, failure)
        binds = _count_binds(rows)
        return JobResult(
            completed=max(1, len(rows)),  # a job of which no ARQ is left has ended, too
            jobs=undone.jobs,
            events=len(rows),
            providers=undone.providers,
            binds=binds,
        )

    def _finish_restore(self, job: jobs.JobRow, rows: Sequence[store.ArqRow]) -> JobResult:
        store.clear_job(self.tx, [row["id"] for row in rows])
        self_heal.increment(self.tx, CorrectiveAction.HANDLES_RESTORED, len(rows), self.now)
        self.recorder.record_restored(self.tx, rows)
        # The device was cordoned only if an attempt failed.
        providers = store.providers_of(rows) if job["error"] is not None else []
        publishing.mark_stale_existing(self.tx, providers, self.now)
        return JobResult(completed=1, events=len(rows), providers=len(providers))

    def _finish_unbinds(self, rows: Sequence[store.ArqRow]) -> None:
        """Record that the former handles of locked ARQs are clean: UnbindFailed becomes Unbound."""
        failed = [row for row in rows if row["state"] == ArqState.UNBIND_FAILED]
        store.finish_unbind(self.tx, [row["id"] for row in rows])
        self.recorder.record_unbound(self.tx, failed)
        follow_arqs(self.tx, rows, self.recorder, self.now)

    def _finish_cleaning(self, row: jobs.JobRow, waiting: Sequence[store.ArqRow]) -> JobResult:
        """Record that the handles of a job are clean, and end the unbinds that waited for this."""
        entries.record_cleaned(self.tx, row, self.now)
        self._finish_unbinds(waiting)
        providers = jobs.mark_cleaned(self.tx, row["id"])
        # The end of a cleaning may change which sets are offered.
        stale = providers.sets
        # The other providers were reserved in Placement only if the first try failed.
        if row["error"] is not None and providers.own:
            stale = providers.own | providers.sets
            cleaned = len(row["arguments"]["items"])
            self_heal.increment(self.tx, CorrectiveAction.HANDLES_CLEANED, cleaned, self.now)
        publishing.mark_stale_existing(self.tx, stale, self.now)
        return JobResult(completed=1, providers=len(stale))


def open_devices(tx: sa.Connection, now: datetime) -> int:
    """End the failing condition of devices after its time; return how many providers changed."""
    opened = devices.open_due(tx, now, OPEN_LIMIT)
    return publishing.mark_stale_of_devices(tx, opened, now) if opened else 0


def _items(job: jobs.JobRow) -> list[WorkItem]:
    return [WorkItem.from_dict(item) for item in job["arguments"]["items"]]


def _history(row: DeviceRow) -> progress.WorkHistory:
    failures = tuple(map(progress.Failure.from_dict, row["job_failures"] or ()))
    return progress.WorkHistory(failures, row["failed_prepares"], row["failing"])


def _write_history(
    tx: sa.Connection, row: DeviceRow, new: progress.WorkHistory, retry_at: datetime | None
) -> None:
    failures = [failure.to_dict() for failure in new.failures] or None
    devices.write_history(
        tx,
        row["id"],
        job_failures=failures,
        failed_prepares=new.failed_prepares,
        failing=new.failing,
        retry_at=retry_at,
    )


def _count_binds(rows: Sequence[store.ArqRow]) -> int:
    """Return the number of binds of ARQs that were in BindStarted.

    The ARQs of a bind have the same instance and prepare job. The job alone is not enough: the rows
    of old jobs are purged.
    """
    return len({(row["instance_uuid"], row["job_id"]) for row in rows})


def _make_failure(
    code: str, error: str, job: jobs.JobRow | None, now: datetime
) -> refusals.ContextFailure:
    """Return the failure of a job for the device contexts of its ARQs.

    ``job`` is None for ARQs that waited for no open job.
    """
    if job is None:
        return refusals.make_job_failure(code, error, now)
    items: list[dict[str, Any]] = job["arguments"].get("items", [])
    # Hidden from the owner of the context, except for the values that the owner has requested.
    names = {str(item.get(name)) for item in items for name in ("device", "deployable", "handle")}
    requested = {str(value) for item in items for value in item.get("accel", {}).values()}
    return refusals.make_job_failure(
        code, error, now, hostname=job["host"], job=job["uuid"], names=names, requested=requested
    )
