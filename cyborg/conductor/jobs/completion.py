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
from oslo_config import cfg

from cyborg.conductor.binding import release
from cyborg.conductor.binding.context_states import follow_arqs
from cyborg.conductor.custody import entries
from cyborg.conductor.notifications.notifications import ArqEventRecorder
from cyborg.core.binding.states import ArqState
from cyborg.core.contexts.refusals import (
    CLEAN_FAILED,
    PREPARE_FAILED,
    ContextFailure,
    make_job_failure,
)
from cyborg.core.jobs.job import AFTER_REBOOT, CANCELLED, GUEST_KINDS, JobKind, JobState, WorkItem
from cyborg.core.jobs.progress import (
    Failure,
    WorkHistory,
    add_failure,
    add_success,
    build_failure,
    counts,
    find_failed_item,
)
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.binding import write as store
from cyborg.db.deployables import programming
from cyborg.db.devices import write as devices
from cyborg.db.jobs import write as jobs
from cyborg.db.jobs.write import JobRow
from cyborg.db.providers import write as publishing
from cyborg.db.services import write as services
from cyborg.db.totals import write as self_heal

NOT_IN_TIME = "not completed in time"
NO_JOB_REASON = "no reason given"
NO_PREPARE_JOB = "no open job prepares its device"
SWEEP_LIMIT = 256  # objects of each kind that one sweep repairs
OVERDUE_MARGIN = timedelta(minutes=5)  # past its deadline, until an unreadable job is failed
OPEN_LIMIT = 256  # devices that one sweep opens


def record_failure(
    tx: sa.Connection,
    job: JobRow,
    error: str,
    now: datetime,
    conf: cfg.ConfigOpts,
    *,
    reported: bool,
) -> str | None:
    """Record a failed job; return the uuid of its device if the device becomes failing.

    ``reported`` is whether the agent has reported the failure. If the agent did not answer, the
    failure does not count against the device.
    """
    kind, items = JobKind(job["kind"]), _items(job)
    failed_item = find_failed_item(kind, items, error)
    if failed_item is None:
        return None
    item, text = failed_item
    failure = build_failure(kind, job["uuid"], item, text, now)
    close_after = conf.conductor.device_cordon_after
    for row in devices.lock_history(tx, job["host"], {item.device}):
        old = _history(row)
        # An error that names no item is one of the agent, such as a full disk.
        counted = reported and text != error and counts(item)
        new = add_failure(old, failure, counted=counted, close_after=close_after)
        retry_at = row["retry_at"]
        if new.failing and not old.failing:
            retry_at = now + timedelta(seconds=conf.conductor.device_cordon_time)
            publishing.mark_stale_of_devices(tx, [row["uuid"]], now)
        _write(tx, row, new, retry_at)
        return row["uuid"] if new.failing and not old.failing else None
    return None


def record_success(tx: sa.Connection, job: JobRow, now: datetime) -> int:
    """Clear the failures of the devices of a job; return the number of changed providers."""
    kind, addresses = JobKind(job["kind"]), {item.device for item in _items(job)}
    # A job seldom follows a failure: this one query takes no lock.
    if not (failed := devices.addresses_with_failures(tx, job["host"], addresses)):
        return 0
    opened: list[str] = []
    for row in devices.lock_history(tx, job["host"], failed):
        if row["failing"]:
            opened.append(row["uuid"])
        _write(tx, row, add_success(_history(row), kind), None)
    return publishing.mark_stale_of_devices(tx, opened, now) if opened else 0


def open_devices(tx: sa.Connection, now: datetime) -> int:
    """End the failing condition of devices after its time; return how many providers changed."""
    opened = devices.open_due(tx, now, OPEN_LIMIT)
    return publishing.mark_stale_of_devices(tx, opened, now) if opened else 0


def _items(job: JobRow) -> list[WorkItem]:
    return [WorkItem.from_dict(item) for item in job["arguments"]["items"]]


def _history(row: devices.DeviceRow) -> WorkHistory:
    failures = tuple(map(Failure.from_dict, row["job_failures"] or ()))
    return WorkHistory(failures, row["failed_prepares"], row["failing"])


def _write(
    tx: sa.Connection, row: devices.DeviceRow, new: WorkHistory, retry_at: datetime | None
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


@dataclass(frozen=True, slots=True)
class JobResult:
    """Numbers of objects that the end of jobs has changed."""

    count: int = 0  # jobs or objects that were completed
    jobs: int = 0  # new jobs
    events: int = 0  # new messages in the outbox
    providers: int = 0  # providers to publish
    closed: str | None = None  # the device that was closed, because its prepare jobs fail
    binds: int = 0  # binds that succeeded or failed; a job succeeds or fails with its bind


def complete_job(
    tx: sa.Connection,
    row: jobs.JobRow,
    succeeded: bool,
    error: str | None,
    now: datetime,
    *,
    recorder: ArqEventRecorder,
    reported: bool = True,
) -> JobResult:
    """End a job and apply its result; do nothing if the job has already ended.

    ``reported`` is whether the agent has reported the result.
    """
    # The lock of the requests comes first, as in every transaction that touches requests.
    waiting = store.lock_of_jobs(tx, [row["id"]])
    state = JobState.DONE if succeeded else JobState.FAILED
    if state is JobState.FAILED and CANCELLED in row["arguments"]:
        state = JobState.CANCELLED
    # The agent's call and the answer to a query may arrive at two conductors: one of them ends the
    # job.
    if not jobs.end(tx, [row["id"]], state, error):
        return JobResult()
    if not succeeded:
        self_heal.increment(tx, CorrectiveAction.JOBS_UNDONE, 1, now)
    result = _apply_result(tx, row, waiting, succeeded, error, now, recorder)
    if row["kind"] == JobKind.RELEASE or row["kind"] in GUEST_KINDS:
        return result  # what a guest does with a device is no evidence about the device
    if succeeded:
        changed = record_success(tx, row, now)
        return replace(result, providers=result.providers + changed)
    reason, conf = error or NO_JOB_REASON, recorder.conf
    closed = record_failure(tx, row, reason, now, conf, reported=reported)
    return result if closed is None else replace(result, providers=1, closed=closed)


def _apply_result(
    tx: sa.Connection,
    row: jobs.JobRow,
    waiting: Sequence[store.ArqRow],
    succeeded: bool,
    error: str | None,
    now: datetime,
    recorder: ArqEventRecorder,
) -> JobResult:
    match JobKind(row["kind"]):
        case JobKind.PREPARE if succeeded:
            entries.record_prepared(tx, waiting, row, now)
            return _finish_binds(tx, waiting, now, recorder)
        case JobKind.PREPARE:
            return _fail_binds(tx, waiting, [row["uuid"]], now, recorder, error, job=row)
        case JobKind.RELEASE:
            return _finish_cleaning(tx, row, waiting, now, recorder)
        case JobKind.PARTITION:
            _record_partitioned(
                tx, row, None if succeeded else error or NO_JOB_REASON, now, recorder
            )
            # Reports during the job did not change the device. The next one has the new layout; the
            # device stays closed until then.
            services.request_report(tx, row["host"])
            if succeeded and not row["arguments"].get(AFTER_REBOOT):
                programming.set_desired_layout(tx, row["subject"], row["arguments"]["layout"])
            return JobResult(1, jobs=1)  # restores that waited for it
        case JobKind.RESTORE:
            entries.record_prepared(tx, waiting, row, now)
            return _finish_restore(tx, row, waiting, now, recorder)
        case JobKind.PLUG | JobKind.UNPLUG:
            return JobResult(1)  # the work on the attachment reads the job
        case JobKind.PROGRAM:
            image: Any = row["arguments"].get("image")
            providers = programming.end(tx, row["id"], image if succeeded else None)
            publishing.mark_stale_existing(tx, providers, now)
            failure = None if succeeded else error or NO_JOB_REASON
            _record_programmed(tx, row, failure, now, recorder)
            # Reports during the programming did not change the device: request a new one.
            services.request_report(tx, row["host"])
            return JobResult(1, providers=len(providers))


def record_first_failure(
    tx: sa.Connection,
    row: jobs.JobRow,
    waiting: Sequence[store.ArqRow],
    error: str,
    now: datetime,
    *,
    recorder: ArqEventRecorder,
) -> None:
    """Record the consequence of a first failed attempt of a job that is retried.

    A failed release job makes its dirty handles reserved in Placement; a failed restore job makes
    the whole device reserved. Listeners are notified of a failed restore job, because its ARQ stays
    bound, but the next boot of the instance may fail. Listeners are also notified if a layout or an
    image cannot be applied again after a reboot; the device is unschedulable already. ``waiting``
    are the locked ARQs of the job.
    """
    if row["kind"] == JobKind.RELEASE:
        publishing.mark_stale_existing(tx, jobs.providers_of(tx, row["id"]), now)
    elif row["kind"] == JobKind.RESTORE:
        publishing.mark_stale_existing(tx, store.providers_of(waiting), now)
        recorder.record_restore_failed(tx, waiting, error)
    elif AFTER_REBOOT in row["arguments"]:
        partitions = row["kind"] == JobKind.PARTITION
        record = _record_partitioned if partitions else _record_programmed
        record(tx, row, error, now, recorder)


def fail_unbinds(
    tx: sa.Connection,
    row: jobs.JobRow,
    waiting: Sequence[store.ArqRow],
    error: str,
    now: datetime,
    *,
    recorder: ArqEventRecorder,
) -> int:
    """Change the Unbound ARQs of an overdue release job to UnbindFailed; return their number.

    ``waiting`` are the locked ARQs of the job. ARQs in UnbindFailed stay unchanged.
    """
    failed = [arq for arq in waiting if arq["state"] == ArqState.UNBOUND]
    count = store.fail_unbind(tx, [arq["id"] for arq in failed], row["id"])
    recorder.record_unbind_failed(tx, failed, row["host"], error)
    failure = _make_failure(CLEAN_FAILED, error, row, now)
    follow_arqs(tx, failed, recorder, now, failure)
    return count


def sweep(tx: sa.Connection, now: datetime, *, recorder: ArqEventRecorder) -> JobResult:
    """Repair objects that wait for a job that has ended or does not exist.

    They are ARQs in BindStarted, dirty handles, and unbound ARQs whose former handle was cleaned.
    Only a database that was restored or edited by hand can have such objects. Also end jobs that
    are past their deadline.
    """
    # A dispatcher ends a job at its deadline. Only a job that no dispatcher can read gets here.
    late = jobs.overdue(tx, now - OVERDUE_MARGIN, SWEEP_LIMIT)
    jobs.end(tx, late, JobState.FAILED, "not completed in time")
    stranded = store.lock_stranded(tx, SWEEP_LIMIT)
    failed = (
        _fail_binds(tx, stranded, list(late.values()), now, recorder, NO_PREPARE_JOB)
        if stranded
        else JobResult()
    )
    dirty = jobs.unassigned_dirty(tx, SWEEP_LIMIT)
    timeout = recorder.conf.conductor.release_timeout
    cleaning = release.enqueue_cleaning(tx, dirty, now=now, timeout=timeout, repeated=True)
    # The handles of the others were removed: there is nothing left to clean.
    released = store.lock_released(tx, SWEEP_LIMIT)
    _finish_unbinds(tx, released, now, recorder)
    # The row of an ended job is purged after a day: its deployable would stay closed.
    freed = programming.detach_ended_jobs(tx)
    opened = open_devices(tx, now)
    self_heal.increment(tx, CorrectiveAction.STUCK_BINDS_FAILED, len(stranded), now)
    return JobResult(
        failed.count + len(dirty) + len(released) + freed,
        failed.jobs + len(set(cleaning.values())),
        failed.events,
        failed.providers + opened,
        binds=failed.binds,
    )


def _record_partitioned(
    tx: sa.Connection,
    row: jobs.JobRow,
    error: str | None,
    now: datetime,
    recorder: ArqEventRecorder,
) -> None:
    """Record the result of a partition job; ``error`` is None if it succeeded."""
    entries.record_partitioned(tx, row, error, now)
    recorder.notifications.record_layout_finished(
        tx, row["subject"], row["arguments"]["layout"], error
    )


def _record_programmed(
    tx: sa.Connection,
    row: jobs.JobRow,
    error: str | None,
    now: datetime,
    recorder: ArqEventRecorder,
) -> None:
    """Record the result of a program job; ``error`` is None if it succeeded."""
    image: Any = row["arguments"].get("image")
    entries.record_programmed(tx, row, image, error, now)
    recorder.notifications.record_program_finished(
        tx, row["subject"], image, succeeded=error is None, error=error
    )


def _finish_binds(
    tx: sa.Connection, rows: Sequence[store.ArqRow], now: datetime, recorder: ArqEventRecorder
) -> JobResult:
    # All ARQs of the bind at once: Nova counts the events and would go on with a part of them.
    store.finish_bind(tx, [row["id"] for row in rows])
    recorder.record_bound(tx, rows)
    follow_arqs(tx, rows, recorder, now)
    return JobResult(1, events=len(rows), binds=_count_binds(rows))


def _fail_binds(
    tx: sa.Connection,
    rows: Sequence[store.ArqRow],
    cancels: Sequence[str],
    now: datetime,
    recorder: ArqEventRecorder,
    error: str | None,
    job: jobs.JobRow | None = None,
) -> JobResult:
    timeout = recorder.conf.conductor.release_timeout
    created = release.fail_binds(
        tx, rows, now=now, timeout=timeout, cancelled_jobs=cancels, error=error
    )
    recorder.record_bind_failed(tx, rows, error)
    failure = _make_failure(PREPARE_FAILED, error or NO_JOB_REASON, job, now)
    follow_arqs(tx, rows, recorder, now, failure)
    return JobResult(max(1, len(rows)), jobs=created, events=len(rows), binds=_count_binds(rows))


def _count_binds(rows: Sequence[store.ArqRow]) -> int:
    """Return the number of binds of ARQs that were in BindStarted.

    The ARQs of a bind have the same instance and prepare job. The job alone is not enough: the rows
    of old jobs are purged.
    """
    return len({(row["instance_uuid"], row["job_id"]) for row in rows})


def _make_failure(code: str, error: str, job: jobs.JobRow | None, now: datetime) -> ContextFailure:
    """Return the failure of a job for the device contexts of its ARQs."""
    if job is None:
        return make_job_failure(code, error, None, None, now)
    items: list[dict[str, Any]] = job["arguments"].get("items", [])
    names = {str(item.get(name)) for item in items for name in ("device", "deployable", "handle")}
    requested = {str(value) for item in items for value in item.get("accel", {}).values()}
    return make_job_failure(
        code, error, job["host"], job["uuid"], now, names=names, requested=requested
    )


def _finish_restore(
    tx: sa.Connection,
    job: jobs.JobRow,
    rows: Sequence[store.ArqRow],
    now: datetime,
    recorder: ArqEventRecorder,
) -> JobResult:
    store.clear_job(tx, [row["id"] for row in rows])
    self_heal.increment(tx, CorrectiveAction.HANDLES_RESTORED, len(rows), now)
    recorder.record_restored(tx, rows)
    # The device was cordoned only if an attempt failed.
    if job["error"] is None:
        return JobResult(1, events=len(rows))
    providers = store.providers_of(rows)
    publishing.mark_stale_existing(tx, providers, now)
    return JobResult(1, events=len(rows), providers=len(providers))


def _finish_unbinds(
    tx: sa.Connection, rows: Sequence[store.ArqRow], now: datetime, recorder: ArqEventRecorder
) -> None:
    """Record that the former handles of locked ARQs are clean: UnbindFailed becomes Unbound."""
    failed = [row for row in rows if row["state"] == ArqState.UNBIND_FAILED]
    store.finish_unbind(tx, [row["id"] for row in rows])
    recorder.record_unbound(tx, failed)
    follow_arqs(tx, rows, recorder, now)


def _finish_cleaning(
    tx: sa.Connection,
    row: jobs.JobRow,
    waiting: Sequence[store.ArqRow],
    now: datetime,
    recorder: ArqEventRecorder,
) -> JobResult:
    entries.record_cleaned(tx, row, now)
    _finish_unbinds(tx, waiting, now, recorder)
    providers = jobs.mark_cleaned(tx, row["id"])
    # The providers were reserved in Placement only if the first try failed (mark_uncleanable).
    if row["error"] is not None and providers:
        self_heal.increment(
            tx, CorrectiveAction.HANDLES_CLEANED, len(row["arguments"]["items"]), now
        )
        publishing.mark_stale_existing(tx, providers, now)
        return JobResult(1, providers=len(providers))
    return JobResult(1)
