# SPDX-License-Identifier: Apache-2.0
"""Write jobs: host work that is enqueued in the transaction that needs it, and done later.

A job is open until its outcome is recorded. That is one UPDATE guarded by the open state, so only
the first of two concurrent outcomes is recorded. ``owner`` is the conductor that has leased the job
until ``lease_until``. ``next_try_at`` is never later than ``lease_until``; after ``next_try_at``
any conductor may lease the job.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypedDict
from uuid import uuid4

import sqlalchemy as sa

from cyborg import tracing
from cyborg.core.binding.states import ArqState
from cyborg.core.inventory.device_set import UNRESERVED
from cyborg.core.jobs.job import (
    AFTER_REBOOT,
    INVENTORY_KINDS,
    JOB_LIFE_CYCLE,
    RETRIED_KINDS,
    JobKind,
    JobState,
    WorkItem,
)
from cyborg.core.jobs.progress import Activity
from cyborg.db import bulk, joins
from cyborg.db.binding.claims import DIRTY_COLUMNS, DirtyHandleRow
from cyborg.db.rows import StoredRow, fetch_all, fetch_first, row_columns
from cyborg.db.schema import (
    arqs,
    attach_handles,
    attachments,
    deployables,
    devices,
    jobs,
    set_members,
)
from cyborg.db.schema import device_contexts as contexts


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
    trace_context: str | None
    activity: Any


@dataclass(frozen=True, slots=True)
class Restore:
    """Bound ARQs whose handles must be prepared again together, and the work for the agent.

    ``subject`` is the instance, the device context if the ARQs are under a lease, or the attachment
    if they are for the host: a uuid.
    """

    arq_ids: tuple[int, ...]
    instance: str | None
    subject: str
    items: tuple[WorkItem, ...]


class CleanedProviders(NamedTuple):
    """Uuids of the providers of handles to clean, and of device sets that may be offered then."""

    own: set[str]
    sets: set[str]


class BoundHandleRow(TypedDict):
    """A Bound ARQ with its profile group, and the addresses of its handle.

    ``context`` and ``attachment`` are uuids. An ARQ without an instance is under a lease, or
    attached to its host.
    """

    id: int
    instance_uuid: str | None
    context: str | None
    attachment: str | None
    group: dict[str, str]
    handle: str
    deployable: str
    device: str
    backend: str
    abilities: list[str]
    set_id: int | None


OPEN = jobs.c.state == JobState.OPEN
# In the order of the declaration of JobKind: what an instance waits for comes first.
_PRIORITY = sa.case({kind: number for number, kind in enumerate(JobKind)}, value=jobs.c.kind)
_partitions = jobs.alias("partitions")
# EXISTS (a partition job, open and not failed, of the deployable whose handle the ARQ of this job
# owns): jobs -> arqs -> attach_handles -> deployables -> jobs AS partitions.
_NEEDS_LAYOUT = (
    sa.exists()
    .where(
        arqs.c.job_id == jobs.c.id,
        attach_handles.c.arq_id == arqs.c.id,
        deployables.c.id == attach_handles.c.deployable_id,
        _partitions.c.id == deployables.c.job_id,
        _partitions.c.kind == JobKind.PARTITION,
        _partitions.c.state == JobState.OPEN,
        _partitions.c.error.is_(None),
    )
    .correlate(jobs)
)


def enqueue(
    tx: sa.Connection,
    *,
    kind: JobKind,
    host: str,
    subject: str,
    arguments: Mapping[str, Any],
    now: datetime,
    deadline: datetime | None,
    uuid: str | None = None,
) -> int:
    """Enqueue a job that is due immediately; return its row id.

    ``deadline`` is when the conductors time the job out, None never. Without ``uuid``, the job gets
    a random one.
    """
    return bulk.insert_row(
        tx,
        jobs,
        uuid=uuid or str(uuid4()),
        kind=kind,
        host=host,
        subject=subject,
        arguments=dict(arguments),
        deadline=deadline,
        next_try_at=now,
        trace_context=tracing.current_context(),
    )


def lock_bound(tx: sa.Connection, host: str) -> Sequence[int]:
    """Lock the Bound ARQs of a host's devices, in the order of their ids; return these ids."""
    query = sa.select(arqs.c.id).select_from(joins.OWNED_HANDLES)
    ids = tx.scalars(query.where(devices.c.host == host, arqs.c.state == ArqState.BOUND)).all()
    # Without joins, so that MariaDB too locks the rows in the order of the result.
    locked = sa.select(arqs.c.id).where(arqs.c.id.in_(ids), arqs.c.state == ArqState.BOUND)
    return tx.scalars(locked.order_by(arqs.c.id).with_for_update()).all() if ids else []


def lock_bound_without_job(tx: sa.Connection, host: str) -> list[BoundHandleRow]:
    """Return the Bound ARQs of a host's devices that wait for no open job, locked."""
    if not (ids := lock_bound(tx, host)):
        return []
    # Under the locks: a statement that waits for a lock would still see the jobs from before.
    open_ = sa.exists().where(jobs.c.id == arqs.c.job_id, jobs.c.state == JobState.OPEN)
    context = sa.select(contexts.c.uuid).where(contexts.c.id == arqs.c.context_id).scalar_subquery()
    attachment = (
        sa.select(attachments.c.uuid)
        .where(attachments.c.id == arqs.c.attachment_id)
        .scalar_subquery()
    )
    query = (
        sa.select(
            *row_columns(
                BoundHandleRow,
                arqs,
                devices,
                context=context,
                attachment=attachment,
                handle=attach_handles.c.address,
                set_id=attach_handles.c.set_id,
                **joins.ADDRESSES,
            )
        )
        .select_from(joins.OWNED_HANDLES)
        .where(arqs.c.id.in_(ids), sa.not_(open_))
        .order_by(arqs.c.id)
    )
    return fetch_all(BoundHandleRow, tx.execute(query))


def find_set_restores(tx: sa.Connection, host: str) -> list[int]:
    """Return the row ids of a host's open restore jobs that prepare no handle, but sets alone."""
    query = sa.select(jobs.c.id, jobs.c.arguments).where(
        OPEN, jobs.c.kind == JobKind.RESTORE, jobs.c.host == host
    )
    return [
        row.id
        for row in tx.execute(query)
        if not any(item["handle"] for item in row.arguments["items"])
    ]


def enqueue_restores(
    tx: sa.Connection,
    host: str,
    restores: Collection[Restore],
    now: datetime,
    cancels: Sequence[str] = (),
) -> None:
    """Enqueue restore jobs, due immediately; the Bound ARQs wait for them.

    ``cancels`` are the uuids of jobs that the agent must not begin any more.

    The caller must hold locks on the ARQs, and have seen under them that they wait for no open job.
    """
    restores_by_uuid = {str(uuid4()): restore for restore in restores}
    bulk.insert(
        tx,
        jobs,
        [
            {
                "uuid": uuid,
                "kind": JobKind.RESTORE,
                "host": host,
                "subject": restore.subject,
                "arguments": {
                    "items": [item.to_dict() for item in restore.items],
                    "instance": restore.instance,
                }
                | ({"cancels": list(cancels)} if cancels else {}),
                "next_try_at": now,
            }
            for uuid, restore in restores_by_uuid.items()
        ],
    )
    query = sa.select(jobs.c.uuid, jobs.c.id).where(jobs.c.uuid.in_(sorted(restores_by_uuid)))
    ids = {row.uuid: row.id for row in tx.execute(query)}
    job_by_arq = {
        arq_id: ids[uuid]
        for uuid, restore in restores_by_uuid.items()
        for arq_id in restore.arq_ids
    }
    # The handle may have been claimed when the driver did not prepare devices.
    tx.execute(
        sa.update(attach_handles)
        .where(attach_handles.c.arq_id.in_(job_by_arq))
        .values(needs_cleaning=True)
    )
    tx.execute(
        sa.update(arqs)
        .where(arqs.c.id.in_(job_by_arq), arqs.c.state == ArqState.BOUND)
        .values(
            # One UPDATE, whatever the number of ARQs.
            job_id=sa.case(job_by_arq, value=arqs.c.id),
            # The orphan collector uses updated_at as the time of the bind.
            updated_at=arqs.c.updated_at,
        )
    )


def lease(
    tx: sa.Connection, *, owner: str, now: datetime, until: datetime, limit: int
) -> list[JobRow]:
    """Lease up to ``limit`` due jobs, in the order of ``JobKind`` and, within a kind, by due time.

    A restore waits until the job that applies the layout of its device again has succeeded or
    failed, since the handle does not exist without the layout. Return the previous rows, in which
    ``owner`` is the last owner.
    """
    # Not the jobs of rollouts, which are in the same table.
    due = sa.and_(OPEN, jobs.c.kind.in_(sorted(JobKind)), jobs.c.next_try_at <= now)
    query = (
        sa.select(jobs)
        .where(due, sa.or_(jobs.c.kind != JobKind.RESTORE, sa.not_(_NEEDS_LAYOUT)))
        # By kind first: an instance waits for a restore, but nothing waits for a release.
        .order_by(_PRIORITY, jobs.c.next_try_at, jobs.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    # SKIP LOCKED above: each of several conductors leases other jobs, and waits for none.
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
    tx: sa.Connection,
    job_id: int,
    owner: str | None,
    *,
    until: datetime,
    error: str | None,
    activity: Activity | None,
) -> int:
    """Set the next try of a job to ``until``, unless it has ended or has another owner.

    ``activity`` is stored in the same UPDATE. Return the number of changed jobs.
    """
    activity_body = None if activity is None else activity.to_dict()
    return tx.execute(
        sa.update(jobs)
        .where(jobs.c.id == job_id, jobs.c.owner == owner, OPEN)
        .values(lease_until=until, next_try_at=until, error=error, activity=activity_body)
    ).rowcount


def end_drain(
    tx: sa.Connection, job_id: int, owner: str | None, arguments: Mapping[str, Any], now: datetime
) -> int:
    """Let a job whose device has drained run now, unless it has ended or has another owner.

    ``arguments`` replace those of the job, which say that the device drains. Return the number of
    changed jobs.
    """
    return tx.execute(
        sa.update(jobs)
        .where(jobs.c.id == job_id, jobs.c.owner == owner, OPEN)
        .values(
            arguments=dict(arguments),
            deadline=None,
            attempts=0,
            error=None,
            owner=None,
            lease_until=None,
            next_try_at=now,
        )
    ).rowcount


def end(tx: sa.Connection, ids: Collection[int], state: JobState, error: str | None = None) -> int:
    """Record the outcome of jobs; return how many of them were open."""
    return _end(tx, jobs.c.id.in_(sorted(ids)), state=state, error=error)


def fail_host_jobs(tx: sa.Connection, host: str, error: str) -> int:
    """Fail a host's open jobs on devices and handles; return their number."""
    # Not the jobs of rollouts, which are in the same table.
    of_host = (jobs.c.host == host, jobs.c.kind.in_(sorted(JobKind)))
    return _end(tx, *of_host, state=JobState.FAILED, error=error)


def _end(
    tx: sa.Connection, *conditions: sa.ColumnElement[bool], state: JobState, error: str | None
) -> int:
    transition = JOB_LIFE_CYCLE.to(state)
    values = {"error": error, "owner": None, "lease_until": None}
    return bulk.change_state(tx, jobs, transition, *conditions, **values)


def get(tx: sa.Connection, uuid: str) -> JobRow | None:
    """Return a job's row, or None."""
    return fetch_first(JobRow, tx.execute(sa.select(jobs).where(jobs.c.uuid == uuid)))


def lock(tx: sa.Connection, uuid: str) -> JobRow | None:
    """Return a job's row, locked, or None."""
    query = sa.select(jobs).where(jobs.c.uuid == uuid).with_for_update()
    return fetch_first(JobRow, tx.execute(query))


def failed_changes(tx: sa.Connection, host: str) -> list[JobRow]:
    """Return the open jobs of a host, locked, that have failed to apply what a reboot removed."""
    failed = sa.and_(OPEN, jobs.c.error.is_not(None))
    query = sa.select(jobs).where(failed, jobs.c.host == host, jobs.c.kind.in_(INVENTORY_KINDS))
    # Read without locks, so that only the few jobs after a reboot are locked: a report locks its
    # agent first, a completion its job first, so that each lock here may be a deadlock.
    rows = fetch_all(JobRow, tx.execute(query))
    ids = [row["id"] for row in rows if AFTER_REBOOT in row["arguments"]]
    if not ids:
        return []
    locked = sa.select(jobs).where(jobs.c.id.in_(ids), failed).with_for_update()
    return fetch_all(JobRow, tx.execute(locked))


def get_by_id(tx: sa.Connection, id_: int) -> JobRow | None:
    """Return a job's row by its row id, or None."""
    return fetch_first(JobRow, tx.execute(sa.select(jobs).where(jobs.c.id == id_)))


def failing_restores(tx: sa.Connection, ids: Collection[int]) -> Sequence[int]:
    """Return the ids of the open restore jobs among ``ids`` that have failed at least once."""
    failing = sa.and_(OPEN, jobs.c.kind == JobKind.RESTORE, jobs.c.error.is_not(None))
    return tx.scalars(sa.select(jobs.c.id).where(jobs.c.id.in_(sorted(ids)), failing)).all()


def uuids(tx: sa.Connection, ids: Collection[int]) -> list[str]:
    """Return the uuids of jobs."""
    return list(tx.scalars(sa.select(jobs.c.uuid).where(jobs.c.id.in_(sorted(ids)))))


def assign_arqs(tx: sa.Connection, ids: Collection[int], job_id: int) -> int:
    """Make BindStarted ARQs wait for a job; return their number."""
    return tx.execute(
        sa.update(arqs).where(arqs.c.id.in_(sorted(ids))).values(job_id=job_id)
    ).rowcount


def assign_cleaning(tx: sa.Connection, ids: Collection[int], job_id: int) -> int:
    """Assign a cleaning job to dirty handles without an owner; return the number of handles."""
    h = attach_handles.c
    return tx.execute(
        sa.update(attach_handles)
        .where(h.id.in_(sorted(ids)), h.arq_id.is_(None), h.needs_cleaning)
        .values(job_id=job_id)
    ).rowcount


def mark_cleaned(tx: sa.Connection, job_id: int) -> CleanedProviders:
    """Mark the handles of a cleaning job as clean; return the providers that they belong to."""
    h = attach_handles.c
    # Before the UPDATE, after which no handle refers to the job.
    providers = providers_of(tx, job_id)
    tx.execute(
        sa.update(attach_handles)
        .where(h.job_id == job_id, h.arq_id.is_(None))
        .values(needs_cleaning=False, job_id=None, set_id=None)
    )
    return providers


def overdue(tx: sa.Connection, cutoff: datetime, limit: int) -> dict[int, str]:
    """Return the uuids of up to ``limit`` open jobs with a deadline before ``cutoff``, by row id.

    Jobs that are retried even after their deadline are left out, and partition jobs, whose deadline
    ends the draining of a device.
    """
    times_out = jobs.c.kind.not_in(sorted(RETRIED_KINDS | {JobKind.PARTITION}))
    query = sa.select(jobs.c.id, jobs.c.uuid).where(OPEN, times_out, jobs.c.deadline < cutoff)
    return {row.id: row.uuid for row in tx.execute(query.limit(limit))}


def providers_of(tx: sa.Connection, job_id: int) -> CleanedProviders:
    """Return the uuids of the providers whose handles a job cleans."""
    h, d = attach_handles.c, deployables.c
    of_job = h.job_id == job_id
    # The second column is whether the provider is that of a device set.
    own = sa.select(d.rp_uuid, sa.false()).join(attach_handles, h.deployable_id == d.id)
    claimed = sa.select(d.rp_uuid, sa.true()).join(attach_handles, h.set_id == d.id)
    all_sets = sa.select(d.rp_uuid, sa.true()).join(
        set_members, set_members.c.deployable_id == d.id
    )
    all_sets = all_sets.join(attach_handles, h.id == set_members.c.handle_id)
    # A handle that was claimed alone, before it was a member, closes each of its sets: all of them.
    # Of another handle only the sets that Placement does not have reserved as a whole.
    affected = sa.or_(h.set_id.is_(None), d.offer.in_(sorted(UNRESERVED)))
    query = own.where(of_job).union(claimed.where(of_job), all_sets.where(of_job, affected))
    providers = CleanedProviders(set(), set())
    for uuid, is_set in tx.execute(query):
        (providers.sets if is_set else providers.own).add(uuid)
    return providers


def unassigned_dirty(
    tx: sa.Connection, limit: int, ids: Collection[int] | None = None
) -> list[DirtyHandleRow]:
    """Return dirty handles without an open cleaning job.

    ``ids`` limits the result to these row ids.
    """
    h = attach_handles.c
    query = (
        sa.select(*DIRTY_COLUMNS)
        .select_from(joins.HANDLES)
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
