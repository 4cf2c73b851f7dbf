# SPDX-License-Identifier: Apache-2.0
"""Draining of a device for another layout, within the transaction of the caller.

The device is cordoned until its partition job can begin (``db.write.desired_backends``): its bound
handles stay, reports and restores change it as usual, and no handle of it is claimed. The job is
open meanwhile, so that any conductor continues it.

Locks are taken in one order: the agent of the host, deployables, handles, the job.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import sqlalchemy as sa

from cyborg.conductor.jobs.completion import JobResult
from cyborg.conductor.jobs.layout_change import close_device, find_obstacle, lock_target, mark_stale
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.errors import CyborgError, Invalid, NotFound, WrongState
from cyborg.core.jobs.job import DRAINS, JobState
from cyborg.db.backends import desired as desired_backends
from cyborg.db.deployables import programming as store
from cyborg.db.devices import write as devices
from cyborg.db.jobs import write as jobs
from cyborg.threads.failures import JITTER, compute_delay

MAX_DELAY = 60.0  # seconds between two checks


def advance_drain(
    tx: sa.Connection,
    job: jobs.JobRow,
    owner: str,
    now: datetime,
    notifications: NotificationBuilder,
) -> JobResult:
    """Start the job if nothing uses its device any more; else schedule another check.

    After the deadline, or if the layout is not possible any more, end the job and uncordon the
    device. Do nothing if the conductor ``owner`` no longer has the job.
    """
    uuid, arguments = job["subject"], job["arguments"]
    waits: CyborgError | None = None
    rows: Sequence[store.PartitionRow] = ()
    try:
        rows = lock_target(tx, uuid, job["host"], arguments["layout"])
    except (NotFound, WrongState, Invalid) as exc:
        waits = exc
    if not rows:
        device = devices.by_uuid(tx, uuid)
        # Without layouts, the kernel driver of the device may not be bound yet.
        if waits is not None and (device is None or device["layouts"]):
            return _fail(tx, job, owner, waits.message, now, notifications)
    elif any(row["job_id"] is not None for row in rows):
        waits = WrongState(f"another job changes device {uuid}")
    else:
        waits = find_obstacle(tx, uuid, rows)
    if waits is None:
        arguments = {name: value for name, value in arguments.items() if name != DRAINS}
        # The layout may have changed since the request.
        arguments["previous_layout"] = rows[0]["layout"]
        if not jobs.end_drain(tx, job["id"], owner, arguments, now):
            return JobResult()
        close_device(tx, uuid, rows, job["id"])
        desired_backends.sync_cordon(tx, [job["host"]], now)
        return JobResult(1, jobs=1, providers=mark_stale(tx, rows, now))
    if job["deadline"] is not None and now >= job["deadline"]:
        return _fail(tx, job, owner, f"not drained in time: {waits.message}", now, notifications)
    jitter = JITTER.uniform(0.0, 0.5)
    until = now + timedelta(seconds=compute_delay(job["attempts"], MAX_DELAY, jitter))
    if job["deadline"] is not None:
        until = min(until, job["deadline"])
    jobs.reschedule(tx, job["id"], owner, until=until, error=waits.message, activity=None)
    return JobResult()


def _fail(
    tx: sa.Connection,
    job: jobs.JobRow,
    owner: str,
    error: str,
    now: datetime,
    notifications: NotificationBuilder,
) -> JobResult:
    if jobs.reschedule(tx, job["id"], owner, until=now, error=error, activity=None):
        notifications.record_layout_finished(tx, job["subject"], job["arguments"]["layout"], error)
        return end_drain(tx, job, JobState.FAILED, error, now)
    return JobResult()


def end_drain(
    tx: sa.Connection, job: jobs.JobRow, state: JobState, error: str, now: datetime
) -> JobResult:
    """End a job whose device drains, and uncordon the device. The caller has locked the job."""
    jobs.end(tx, [job["id"]], state, error)
    desired_backends.sync_cordon(tx, [job["host"]], now)
    rows = store.lock_device(tx, job["subject"])
    return JobResult(1, providers=mark_stale(tx, rows, now))
