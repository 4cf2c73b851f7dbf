# SPDX-License-Identifier: Apache-2.0
"""Write jobs: host work that is enqueued in the transaction that needs it, and done later.

A job is open until its outcome is recorded. That is one UPDATE guarded by the open state, so only
the first of two concurrent outcomes is recorded. ``owner`` is the conductor that has leased the job
until ``lease_until``. ``next_try_at`` is never later than ``lease_until``; after ``next_try_at``
any conductor may lease the job.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.jobs.job import JobKind, JobState
from cyborg.db.rows import StoredRow, fetch_all, fetch_first
from cyborg.db.schema import arqs, attach_handles, deployables, devices, jobs
from cyborg.db.write.handle_claims import DirtyHandleRow


class JobRow(StoredRow):
    """All columns of a job."""

    uuid: str
    kind: str
    host: str
    subject: str
    arguments: dict[str, Any]
    result: Any
    deadline: datetime | None
    mutex_key: str | None
    state: str
    attempts: int
    next_try_at: datetime
    owner: str | None
    lease_until: datetime | None
    error: str | None


class OverdueRow(TypedDict):
    """A job past its deadline."""

    id: int
    uuid: str


OPEN = jobs.c.state == JobState.OPEN


def enqueue(
    tx: sa.Connection,
    *,
    kind: JobKind,
    host: str,
    subject: str,
    arguments: Mapping[str, Any],
    now: datetime,
    deadline: datetime | None,
) -> int:
    """Enqueue a job that is due immediately; return its row id."""
    key = tx.execute(
        sa.insert(jobs).values(
            uuid=str(uuid4()),
            kind=kind,
            host=host,
            subject=subject,
            arguments=dict(arguments),
            deadline=deadline,
            next_try_at=now,
        )
    ).inserted_primary_key
    if key is None:
        raise AssertionError("an INSERT of one row must return its primary key")
    return int(key[0])


def lease(
    tx: sa.Connection, *, owner: str, now: datetime, until: datetime, limit: int
) -> list[JobRow]:
    """Lease up to ``limit`` due jobs, ordered by kind and, within a kind, by due time.

    Return their previous rows, in which ``owner`` is the last owner.
    """
    due = sa.and_(OPEN, jobs.c.kind.in_(sorted(JobKind)), jobs.c.next_try_at <= now)
    query = (
        sa.select(jobs)
        .where(due)
        # By kind first: an instance waits for a prepare, but nothing waits for a release.
        .order_by(jobs.c.kind, jobs.c.next_try_at, jobs.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    rows = fetch_all(JobRow, tx.execute(query))
    if rows:
        tx.execute(
            sa.update(jobs)
            .where(jobs.c.id.in_([row["id"] for row in rows]), due)
            .values(owner=owner, lease_until=until, next_try_at=until, attempts=jobs.c.attempts + 1)
        )
    return rows


def expedite(tx: sa.Connection, host: str, now: datetime) -> int:
    """Make a host's open jobs due immediately, whatever their owner; return their number."""
    return tx.execute(
        sa.update(jobs).where(jobs.c.host == host, OPEN).values(next_try_at=now)
    ).rowcount


def reschedule(
    tx: sa.Connection, job_id: int, owner: str, *, until: datetime, error: str | None
) -> int:
    """Set the next try of a job to ``until``, unless it has ended or has another owner."""
    return tx.execute(
        sa.update(jobs)
        .where(jobs.c.id == job_id, jobs.c.owner == owner, OPEN)
        .values(lease_until=until, next_try_at=until, error=error)
    ).rowcount


def end(tx: sa.Connection, ids: Collection[int], state: JobState, error: str | None = None) -> int:
    """Record the outcome of jobs; return how many of them were open."""
    return tx.execute(
        sa.update(jobs)
        .where(jobs.c.id.in_(sorted(ids)), OPEN)
        .values(state=state, error=error, owner=None, lease_until=None)
    ).rowcount


def fail_host_jobs(tx: sa.Connection, host: str, error: str) -> int:
    """Fail a host's open prepare and release jobs; return their number."""
    kinds = (JobKind.PREPARE, JobKind.RELEASE)
    return tx.execute(
        sa.update(jobs)
        .where(jobs.c.host == host, jobs.c.kind.in_(kinds), OPEN)
        .values(state=JobState.FAILED, error=error, owner=None, lease_until=None)
    ).rowcount


def get(tx: sa.Connection, uuid: str) -> JobRow | None:
    """Return a job's row, or None."""
    return fetch_first(JobRow, tx.execute(sa.select(jobs).where(jobs.c.uuid == uuid)))


def uuids(tx: sa.Connection, ids: Collection[int]) -> list[str]:
    """Return the uuids of jobs."""
    return list(tx.scalars(sa.select(jobs.c.uuid).where(jobs.c.id.in_(sorted(ids)))))


def assign_arqs(tx: sa.Connection, ids: Collection[int], job_id: int) -> int:
    """Let BindStarted ARQs wait for a job; return their number."""
    return tx.execute(
        sa.update(arqs).where(arqs.c.id.in_(sorted(ids))).values(job_id=job_id)
    ).rowcount


def assign_cleaning(tx: sa.Connection, ids: Collection[int], job_id: int) -> int:
    """Assign the cleaning of dirty handles without an owner to a job; return their number."""
    h = attach_handles.c
    return tx.execute(
        sa.update(attach_handles)
        .where(h.id.in_(sorted(ids)), h.arq_id.is_(None), h.needs_cleaning)
        .values(job_id=job_id)
    ).rowcount


def mark_cleaned(tx: sa.Connection, job_id: int) -> Sequence[str]:
    """Mark the handles of a cleaning job as clean; return their providers' uuids."""
    h = attach_handles.c
    providers = providers_of(tx, job_id)
    tx.execute(
        sa.update(attach_handles)
        .where(h.job_id == job_id, h.arq_id.is_(None))
        .values(needs_cleaning=False, job_id=None)
    )
    return providers


def overdue(tx: sa.Connection, cutoff: datetime, limit: int) -> list[OverdueRow]:
    """Return up to ``limit`` open jobs with a deadline before ``cutoff``."""
    query = sa.select(jobs.c.id, jobs.c.uuid).where(OPEN, jobs.c.deadline < cutoff).limit(limit)
    return fetch_all(OverdueRow, tx.execute(query))


def providers_of(tx: sa.Connection, job_id: int) -> Sequence[str]:
    """Return the uuids of the providers whose handles a job cleans."""
    h = attach_handles.c
    query = (
        sa.select(deployables.c.rp_uuid)
        .distinct()
        .join(attach_handles, h.deployable_id == deployables.c.id)
        .where(h.job_id == job_id)
    )
    return tx.scalars(query).all()


def unassigned_dirty(
    tx: sa.Connection, limit: int, ids: Collection[int] | None = None
) -> list[DirtyHandleRow]:
    """Return dirty handles without an open cleaning job.

    ``ids`` limits the result to these row ids.
    """
    h = attach_handles.c
    query = (
        sa.select(
            h.id,
            h.address,
            deployables.c.address.label("deployable"),
            devices.c.address.label("device"),
            devices.c.backend,
            devices.c.host,
        )
        .join(deployables, deployables.c.id == h.deployable_id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(jobs, jobs.c.id == h.job_id)
        .where(
            h.needs_cleaning,
            h.arq_id.is_(None),
            sa.or_(h.job_id.is_(None), jobs.c.state != JobState.OPEN),
            sa.true() if ids is None else h.id.in_(sorted(ids)),
        )
        .order_by(h.id)
        .limit(limit)
    )
    return fetch_all(DirtyHandleRow, tx.execute(query))


def purge(tx: sa.Connection, cutoff: datetime, limit: int) -> int:
    """Delete up to ``limit`` jobs that ended before ``cutoff``; return their number."""
    old = (
        sa.select(jobs.c.id)
        .where(jobs.c.state != JobState.OPEN, jobs.c.next_try_at < cutoff)
        .limit(limit)
    )
    ids = tx.scalars(old).all()
    if not ids:
        return 0
    # arqs.job_id has RESTRICT: a job for which an ARQ still waits is left to a later purge.
    in_use = sa.exists().where(arqs.c.job_id == jobs.c.id)
    return tx.execute(sa.delete(jobs).where(jobs.c.id.in_(ids), sa.not_(in_use))).rowcount
