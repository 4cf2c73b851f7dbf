# SPDX-License-Identifier: Apache-2.0
"""Host work that has been promised: written with the state that waits for it, carried out later.

A job is open until its outcome is recorded, which is one UPDATE guarded by "still open", so that of
two who record an outcome one does. ``lease_until`` says until when its ``owner``, a conductor, sees
to it; ``next_try_at`` is never later, and whoever finds it passed may take the job over.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.job import JobKind, JobState
from cyborg.db.schema import attach_handles, deployables, devices, jobs, requests

OPEN = jobs.c.state == JobState.OPEN


def add(
    tx: sa.Connection,
    *,
    kind: JobKind,
    host: str,
    subject: str,
    arguments: Mapping[str, Any],
    now: datetime,
    deadline: datetime | None,
) -> int:
    """Promise a job, due at once, and return its row id."""
    made = tx.execute(
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
    if made is None:
        raise AssertionError("an INSERT of one row has a key")
    return int(made[0])


def lease(
    tx: sa.Connection, *, owner: str, now: datetime, until: datetime, limit: int
) -> Sequence[sa.RowMapping]:
    """Take up to ``limit`` jobs that are due, of each kind the longest due first.

    Returns their rows as they were before: ``owner`` names whoever had each last.
    """
    due = sa.and_(OPEN, jobs.c.kind.in_(sorted(JobKind)), jobs.c.next_try_at <= now)
    rows = (
        tx.execute(
            sa.select(jobs)
            .where(due)
            # By kind first: instances wait for a prepare, nobody for a release.
            .order_by(jobs.c.kind, jobs.c.next_try_at, jobs.c.id)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        .mappings()
        .all()
    )
    if rows:
        tx.execute(
            sa.update(jobs)
            .where(jobs.c.id.in_([row["id"] for row in rows]), due)
            .values(owner=owner, lease_until=until, next_try_at=until, attempts=jobs.c.attempts + 1)
        )
    return rows


def hurry(tx: sa.Connection, host: str, now: datetime) -> int:
    """Have a host's open jobs be due at once, whoever sees to them; return how many there are."""
    return tx.execute(
        sa.update(jobs).where(jobs.c.host == host, OPEN).values(next_try_at=now)
    ).rowcount


def wait(tx: sa.Connection, job_id: int, owner: str, *, until: datetime, error: str | None) -> int:
    """Look at a job again at ``until``, unless it has ended or passed to another conductor."""
    return tx.execute(
        sa.update(jobs)
        .where(jobs.c.id == job_id, jobs.c.owner == owner, OPEN)
        .values(lease_until=until, next_try_at=until, error=error)
    ).rowcount


def end(tx: sa.Connection, ids: Collection[int], state: JobState, error: str | None = None) -> int:
    """Record how jobs ended; return how many of them were open until now."""
    return tx.execute(
        sa.update(jobs)
        .where(jobs.c.id.in_(sorted(ids)), OPEN)
        .values(state=state, error=error, owner=None, lease_until=None)
    ).rowcount


def get(tx: sa.Connection, uuid: str) -> sa.RowMapping | None:
    """Return a job's row, or None."""
    return tx.execute(sa.select(jobs).where(jobs.c.uuid == uuid)).mappings().first()


def uuids(tx: sa.Connection, ids: Collection[int]) -> list[str]:
    """Return the uuids of jobs."""
    return list(tx.scalars(sa.select(jobs.c.uuid).where(jobs.c.id.in_(sorted(ids)))))


def attach_requests(tx: sa.Connection, ids: Collection[int], job_id: int) -> int:
    """Have requests that are BindStarted wait for a job; return how many do."""
    return tx.execute(
        sa.update(requests).where(requests.c.id.in_(sorted(ids))).values(job_id=job_id)
    ).rowcount


def attach_handles_of(tx: sa.Connection, ids: Collection[int], job_id: int) -> int:
    """Have dirty handles be cleaned by a job, unless one does already; return how many."""
    h = attach_handles.c
    return tx.execute(
        sa.update(attach_handles)
        .where(h.id.in_(sorted(ids)), h.request_id.is_(None), h.prepared)
        .values(job_id=job_id)
    ).rowcount


def cleaned(tx: sa.Connection, job_id: int) -> Sequence[str]:
    """Mark the handles that a job has cleaned as free; return their providers' uuids."""
    h = attach_handles.c
    providers = providers_of(tx, job_id)
    tx.execute(
        sa.update(attach_handles)
        .where(h.job_id == job_id, h.request_id.is_(None))
        .values(prepared=False, job_id=None)
    )
    return providers


def overdue(tx: sa.Connection, before: datetime, limit: int) -> Sequence[sa.RowMapping]:
    """Return id and uuid of open jobs whose deadline was before ``before``."""
    query = sa.select(jobs.c.id, jobs.c.uuid).where(OPEN, jobs.c.deadline < before).limit(limit)
    return tx.execute(query).mappings().all()


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


def dirty(
    tx: sa.Connection, limit: int, ids: Collection[int] | None = None
) -> Sequence[sa.RowMapping]:
    """Return dirty handles that no open job cleans; keys as ``claims.release`` has them.

    Of these row ids alone, if some are given.
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
            h.prepared,
            h.request_id.is_(None),
            sa.or_(h.job_id.is_(None), jobs.c.state != JobState.OPEN),
            sa.true() if ids is None else h.id.in_(sorted(ids)),
        )
        .order_by(h.id)
        .limit(limit)
    )
    return tx.execute(query).mappings().all()


def purge(tx: sa.Connection, before: datetime, limit: int) -> int:
    """Delete jobs that ended before ``before``; return how many."""
    old = (
        sa.select(jobs.c.id)
        .where(jobs.c.state != JobState.OPEN, jobs.c.next_try_at < before)
        .limit(limit)
    )
    ids = tx.scalars(old).all()
    if not ids:
        return 0
    # RESTRICT of requests.job_id keeps one that is still waited for; the sweep settles that first.
    held = sa.exists().where(requests.c.job_id == jobs.c.id)
    return tx.execute(sa.delete(jobs).where(jobs.c.id.in_(ids), sa.not_(held))).rowcount
