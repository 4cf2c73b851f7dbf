# SPDX-License-Identifier: Apache-2.0
"""Record the failures of jobs on their devices, within the transaction that ends the job.

``core.jobs.failures`` has the rules. Release jobs are left out: they are retried until they
succeed, and the open jobs themselves have the errors.
"""

from datetime import datetime, timedelta

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.core.jobs.failures import (
    Failure,
    WorkHistory,
    add_failure,
    add_success,
    build_failure,
    counts,
    find_failed_item,
)
from cyborg.core.jobs.job import JobKind, WorkItem
from cyborg.db.devices import write as devices
from cyborg.db.jobs.write import JobRow
from cyborg.db.providers import write as providers

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
    found = find_failed_item(kind, items, error)
    if found is None:
        return None
    item, text = found
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
            providers.mark_stale_of_device(tx, row["uuid"], now)
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
    return providers.mark_stale_of_devices(tx, opened, now) if opened else 0


def open_devices(tx: sa.Connection, now: datetime) -> int:
    """End the failing condition of devices after its time; return how many providers changed."""
    opened = devices.open_due(tx, now, OPEN_LIMIT)
    return providers.mark_stale_of_devices(tx, opened, now) if opened else 0


def _items(job: JobRow) -> list[WorkItem]:
    return [WorkItem.from_dict(item) for item in job["arguments"]["items"]]


def _history(row: devices.HistoryRow) -> WorkHistory:
    failures = tuple(map(Failure.from_dict, row["job_failures"] or ()))
    return WorkHistory(failures, row["failed_prepares"], row["failing"])


def _write(
    tx: sa.Connection, row: devices.HistoryRow, new: WorkHistory, retry_at: datetime | None
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
