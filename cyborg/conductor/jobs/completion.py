# SPDX-License-Identifier: Apache-2.0
"""Completion of jobs: end a job and apply its result in one transaction.

Locks are taken in the order of every other transaction: requests, handles, then the job. If two
transactions record a result, the second finds the job ended and changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from cyborg.conductor.arqs import release
from cyborg.conductor.notifications.arq_events import ArqEventRecorder
from cyborg.core.jobs.job import JobKind, JobState
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.write import arqs as store
from cyborg.db.write import jobs, programming, self_heal, services
from cyborg.db.write import providers as publishing

NO_PREPARE_JOB = "no open job prepares its device"
SWEEP_LIMIT = 256  # objects of each kind that one sweep repairs
OVERDUE_MARGIN = timedelta(minutes=5)  # past its deadline, until an unreadable job is failed


@dataclass(frozen=True, slots=True)
class JobResult:
    """Numbers of objects that the end of jobs has changed."""

    count: int = 0  # jobs or objects that were completed
    jobs: int = 0  # new jobs
    events: int = 0  # new messages in the outbox
    providers: int = 0  # providers to publish


def complete_job(
    tx: sa.Connection,
    row: jobs.JobRow,
    succeeded: bool,
    error: str | None,
    now: datetime,
    *,
    recorder: ArqEventRecorder,
) -> JobResult:
    """End a job and apply its result; do nothing if the job has already ended."""
    kind = JobKind(row["kind"])
    # The lock of the requests comes first, as in every transaction that touches requests.
    waiting = store.lock_of_jobs(tx, [row["id"]])
    state = JobState.DONE if succeeded else JobState.FAILED
    if not jobs.end(tx, [row["id"]], state, error):
        return JobResult()
    if not succeeded:
        self_heal.increment(tx, CorrectiveAction.JOBS_UNDONE, 1, now)
    match kind:
        case JobKind.PREPARE if succeeded:
            return _finish_binds(tx, waiting, recorder)
        case JobKind.PREPARE:
            return _fail_binds(tx, waiting, [row["uuid"]], now, recorder, error)
        case JobKind.RELEASE:
            return _finish_cleaning(tx, row, now)
        case JobKind.PROGRAM:
            image: Any = row["arguments"].get("image")
            providers = programming.end(tx, row["id"], image if succeeded else None)
            publishing.mark_stale_existing(tx, providers, now)
            recorder.notifications.record_program_finished(
                tx, row["subject"], image, succeeded=succeeded, error=error
            )
            # Reports during the programming did not change the device: request a new one.
            services.request_report(tx, row["host"])
            return JobResult(1, providers=len(providers))


def mark_uncleanable(tx: sa.Connection, job_id: int, now: datetime) -> None:
    """Reserve, in Placement, the handles of a release job whose first attempt failed."""
    publishing.mark_stale_existing(tx, jobs.providers_of(tx, job_id), now)


def sweep(tx: sa.Connection, now: datetime, *, recorder: ArqEventRecorder) -> JobResult:
    """Repair objects without an open job: requests in BindStarted, dirty handles.

    The code never leaves such objects; a database that was restored or edited by hand can have
    them.
    """
    late = jobs.overdue(tx, now - OVERDUE_MARGIN, SWEEP_LIMIT)
    jobs.end(tx, [row["id"] for row in late], JobState.FAILED, "not completed in time")
    stranded = store.lock_stranded(tx, SWEEP_LIMIT)
    failed = (
        _fail_binds(tx, stranded, [row["uuid"] for row in late], now, recorder, NO_PREPARE_JOB)
        if stranded
        else JobResult()
    )
    dirty = jobs.unassigned_dirty(tx, SWEEP_LIMIT)
    created = release.enqueue_cleaning(tx, dirty, now=now)
    freed = programming.detach_ended_jobs(tx)
    self_heal.increment(tx, CorrectiveAction.STUCK_BINDS_FAILED, len(stranded), now)
    return JobResult(
        failed.count + len(dirty) + freed, failed.jobs + created, failed.events, failed.providers
    )


def _finish_binds(
    tx: sa.Connection, rows: Sequence[store.ArqRow], recorder: ArqEventRecorder
) -> JobResult:
    store.finish_bind(tx, [row["id"] for row in rows])
    recorder.record_bound(tx, rows)
    return JobResult(1, events=len(rows))


def _fail_binds(
    tx: sa.Connection,
    rows: Sequence[store.ArqRow],
    cancels: Sequence[str],
    now: datetime,
    recorder: ArqEventRecorder,
    error: str | None,
) -> JobResult:
    created = release.fail_binds(tx, rows, now=now, cancelled_jobs=cancels)
    recorder.record_bind_failed(tx, rows, error)
    return JobResult(max(1, len(rows)), jobs=created, events=len(rows))


def _finish_cleaning(tx: sa.Connection, row: jobs.JobRow, now: datetime) -> JobResult:
    providers = jobs.mark_cleaned(tx, row["id"])
    # The providers were reserved in Placement only if the first try failed (mark_uncleanable).
    if row["error"] is not None and providers:
        self_heal.increment(
            tx, CorrectiveAction.HANDLES_CLEANED, len(row["arguments"]["items"]), now
        )
        publishing.mark_stale_existing(tx, providers, now)
        return JobResult(1, providers=len(providers))
    return JobResult(1)
