# SPDX-License-Identifier: Apache-2.0
"""Write rollout jobs, which change a driver on many hosts, and the state of each of their steps.

A driver has at most one open job: ``jobs.mutex_key`` is unique and is cleared when a job ends.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import product
from typing import Any, NamedTuple, TypedDict
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.drivers.rollout import AWAITING_OUTCOME, Kind, StepKey, StepState
from cyborg.core.hosts import AGENT
from cyborg.core.jobs.job import JobState
from cyborg.db import bulk, joins
from cyborg.db.jobs import read
from cyborg.db.jobs.write import JobRow
from cyborg.db.rows import fetch_all, fetch_first, row_columns
from cyborg.db.schema import arqs, attach_handles, devices, jobs, services
from cyborg.db.schema import job_steps as steps


class _StoredStepRow(read.StepRow):
    """A step of a job; ``previous`` is the desired state for a rollback, as plain values."""

    id: int
    previous: dict[str, Any] | None


class StepRow(_StoredStepRow):
    """A step with its deadline.

    ``service_id`` is the row id of the host's agent, None if the agent was deleted. ``down`` is
    whether the agent is marked down or was deleted.
    """

    generation: int | None
    deadline: datetime | None
    service_id: int | None
    down: bool


class StepCountRow(TypedDict):
    """The number of steps of a job in a state, and of those with an error."""

    state: str
    steps: int
    errors: int


class PendingStepRow(_StoredStepRow):
    """A step that waits for the outcome of its host's agent, with its job."""

    job_id: int
    kind: str
    generation: int


class HolderRow(TypedDict):
    """An ARQ that owns a handle of a backend."""

    uuid: str
    instance_uuid: str | None
    host: str
    backend: str


_STEP = [
    steps.c[name] for name in ("id", "host", "backend", "state", "error", "generation", "previous")
]
# The jobs of host work are in the same table: the kind tells them apart.
OPEN = sa.and_(jobs.c.state == JobState.OPEN, jobs.c.kind.in_(sorted(Kind)))


@dataclass(frozen=True, slots=True)
class NewStep:
    """New step of a job; ``previous`` is the desired state for a rollback, as plain values."""

    host: str
    backend: str
    state: StepState
    previous: Mapping[str, Any] | None


class NewJob(NamedTuple):
    """A job that the transaction has inserted, without steps yet."""

    id: int
    uuid: str


def mutex_key(driver: str) -> str:
    """Return the key that only one open job may have."""
    return f"driver:{driver}"[:255]


def find_open(tx: sa.Connection, driver: str) -> JobRow | None:
    """Return the open job of a driver, or None."""
    query = sa.select(jobs).where(jobs.c.mutex_key == mutex_key(driver))
    return fetch_first(JobRow, tx.execute(query))


def enqueue(
    tx: sa.Connection, kind: Kind, driver: str, arguments: Mapping[str, Any], now: datetime
) -> NewJob:
    """Enqueue a job that is due immediately.

    Raise oslo.db's DBDuplicateEntry if the driver already has an open job.
    """
    uuid = str(uuid4())
    # Only one open job may have the key: the unique column decides between two operators.
    id_ = bulk.insert_row(
        tx,
        jobs,
        uuid=uuid,
        kind=kind,
        # On many hosts: the column is not null, and no host has this name.
        host="",
        subject=driver,
        arguments=dict(arguments),
        next_try_at=now,
        mutex_key=mutex_key(driver),
    )
    return NewJob(id_, uuid)


def set_steps(
    tx: sa.Connection, job_id: int, arguments: Mapping[str, Any], new_steps: Iterable[NewStep]
) -> None:
    """Write the arguments and steps of a new job."""
    query = sa.update(jobs).where(jobs.c.id == job_id)
    tx.execute(query.values(arguments=dict(arguments)))
    bulk.insert(tx, steps, [{"job_id": job_id, **asdict(step)} for step in new_steps])


def lease(
    tx: sa.Connection, *, owner: str, now: datetime, until: datetime, limit: int
) -> list[JobRow]:
    """Lease up to ``limit`` due jobs and return them.

    After ``next_try_at`` any conductor may lease a job that another conductor has leased.
    """
    # As jobs.lease, but by the due time alone: rollouts of different drivers are equal.
    due = sa.and_(OPEN, jobs.c.next_try_at <= now)
    query = sa.select(jobs).where(due).order_by(jobs.c.next_try_at, jobs.c.id).limit(limit)
    rows = fetch_all(JobRow, tx.execute(query.with_for_update(skip_locked=True)))
    if rows:
        tx.execute(
            sa.update(jobs)
            .where(jobs.c.id.in_([row["id"] for row in rows]), due)
            .values(owner=owner, lease_until=until, next_try_at=until, attempts=jobs.c.attempts + 1)
        )
    return rows


def lock_leased(tx: sa.Connection, job_id: int, owner: str) -> JobRow | None:
    """Lock an open job that ``owner`` has leased; return it as ``lease`` does, else None."""
    query = sa.select(jobs).where(jobs.c.id == job_id, jobs.c.owner == owner, OPEN)
    return fetch_first(JobRow, tx.execute(query.with_for_update()))


def reschedule(tx: sa.Connection, job_id: int, until: datetime) -> None:
    """Set the next try of a job to ``until``. The caller must hold a lock on the job."""
    tx.execute(
        sa.update(jobs)
        .where(jobs.c.id == job_id)
        .values(next_try_at=until, lease_until=until, owner=None)
    )


def expedite(tx: sa.Connection, ids: Collection[int], now: datetime) -> None:
    """Make jobs due immediately; a job that has ended is kept from now on for its retention."""
    tx.execute(sa.update(jobs).where(jobs.c.id.in_(sorted(ids))).values(next_try_at=now))


def update_arguments(
    tx: sa.Connection, job_id: int, arguments: Mapping[str, Any], now: datetime
) -> None:
    """Change the arguments of a job and make it due. The caller must hold a lock on the job."""
    query = sa.update(jobs).where(jobs.c.id == job_id)
    tx.execute(query.values(arguments=dict(arguments), next_try_at=now))


def end(tx: sa.Connection, job_id: int, state: JobState, error: str | None) -> None:
    """Record the outcome of a job, so that its driver can have another job.

    A job that has ended already gets this outcome instead. The caller must hold a lock on the job.
    """
    values = {"state": state, "error": error, "owner": None, "lease_until": None}
    tx.execute(sa.update(jobs).where(jobs.c.id == job_id).values(mutex_key=None, **values))


def steps_of_job(tx: sa.Connection, job_id: int) -> list[StepRow]:
    """Return a job's steps in the order of execution."""
    query = (
        sa.select(
            *_STEP,
            steps.c.deadline,
            services.c.id.label("service_id"),
            sa.or_(services.c.down_since.is_not(None), services.c.id.is_(None)).label("down"),
        )
        .outerjoin(services, sa.and_(services.c.host == steps.c.host, services.c.binary == AGENT))
        .where(steps.c.job_id == job_id)
        .order_by(steps.c.host, steps.c.backend)
    )
    return fetch_all(StepRow, tx.execute(query))


def count_steps(tx: sa.Connection, job_id: int) -> list[StepCountRow]:
    """Return the number of steps of a job by state."""
    numbers = sa.func.count().label("steps"), sa.func.count(steps.c.error).label("errors")
    query = sa.select(steps.c.state, *numbers).where(steps.c.job_id == job_id)
    return fetch_all(StepCountRow, tx.execute(query.group_by(steps.c.state)))


def find_errors(tx: sa.Connection, job_id: int, limit: int) -> list[read.StepRow]:
    """Return up to ``limit`` steps of a job with errors, in the order of execution."""
    query = sa.select(*row_columns(read.StepRow, steps))
    query = query.where(steps.c.job_id == job_id, steps.c.error.is_not(None))
    query = query.order_by(steps.c.host, steps.c.backend).limit(limit)
    return fetch_all(read.StepRow, tx.execute(query))


def lock_waiting(tx: sa.Connection, host: str) -> list[int]:
    """Lock the jobs with steps that wait for the outcome of a host's agent; return their row ids.

    Ended jobs are among them: a job ends without the outcomes of agents that are down. Call this
    before locking the agent's row and the steps: all callers use this order.
    """
    ids = tx.scalars(
        sa.select(steps.c.job_id)
        .distinct()
        .where(steps.c.host == host, steps.c.state.in_(sorted(AWAITING_OUTCOME)))
    ).all()
    if not ids:
        return []
    query = sa.select(jobs.c.id).where(jobs.c.id.in_(sorted(ids))).order_by(jobs.c.id)
    return list(tx.scalars(query.with_for_update()))


def pending_steps(tx: sa.Connection, host: str, ids: Collection[int]) -> list[PendingStepRow]:
    """Return the steps of jobs that wait for the outcome of a host's agent.

    The caller must hold locks on the jobs.
    """
    query = (
        sa.select(*_STEP, steps.c.job_id, jobs.c.kind)
        .join(jobs, jobs.c.id == steps.c.job_id)
        .where(
            jobs.c.id.in_(sorted(ids)),
            steps.c.host == host,
            steps.c.state.in_(sorted(AWAITING_OUTCOME)),
        )
        .order_by(steps.c.id)
    )
    return fetch_all(PendingStepRow, tx.execute(query))


def ended_jobs(tx: sa.Connection, ids: Collection[int]) -> list[JobRow]:
    """Return those of these jobs that have ended, in the order of their row ids."""
    query = sa.select(jobs).where(jobs.c.id.in_(sorted(ids)), jobs.c.state != JobState.OPEN)
    return fetch_all(JobRow, tx.execute(query.order_by(jobs.c.id)))


def skip_pending_agent(tx: sa.Connection, hosts: Collection[str]) -> None:
    """Set the steps that wait for the return of the agents of hosts to SKIPPED.

    Call this when the agents are deleted: the generations of the next agent of a host begin again,
    so that its outcomes must not match these steps. The locks of the agents' rows, which the caller
    has deleted, take the place of those of the jobs: all writers of these steps take them first.
    """
    # A SELECT first: on MariaDB an UPDATE locks all rows that it scans.
    pending = _pending_agent(steps.c.host.in_(sorted(hosts)))
    ids = tx.scalars(sa.select(steps.c.id).where(pending)).all() if hosts else ()
    guard = sa.and_(steps.c.id.in_(sorted(ids)), pending)
    if ids:
        tx.execute(sa.update(steps).where(guard).values(state=StepState.SKIPPED))


def count_handles_in_use(tx: sa.Connection, backends: Collection[StepKey]) -> dict[StepKey, int]:
    """Return the number of owned or dirty handles of backends.

    Those of a source of device sets are the members that were claimed through its sets.
    """
    counts: dict[StepKey, int] = {}
    for chunk, source in product(
        bulk.chunks(sorted({host for host, _ in backends})), (joins.HANDLES, joins.MEMBERS)
    ):
        query = (
            sa.select(devices.c.host, devices.c.backend, sa.func.count().label("n"))
            .select_from(source)
            .where(devices.c.host.in_(chunk), _IN_USE)
            .group_by(devices.c.host, devices.c.backend)
        )
        # A source has members only, any other backend handles only: no key comes twice.
        counts |= {StepKey(row.host, row.backend): row.n for row in tx.execute(query)}
    return {key: count for key, count in counts.items() if key in set(backends)}


def holders(tx: sa.Connection, keys: Collection[StepKey], limit: int) -> list[HolderRow]:
    """Return up to ``limit`` ARQs that own handles of backends, or sets of a source."""
    all_holders: list[HolderRow] = []
    pairs = sorted(keys)
    # A pair has two parameters.
    size = bulk.MAX_PARAMETERS // 2
    for start, source in product(range(0, len(pairs), size), (joins.HANDLES, joins.MEMBERS)):
        query = (
            sa.select(*row_columns(HolderRow, arqs, host=devices.c.host, backend=devices.c.backend))
            .select_from(source.join(arqs, arqs.c.id == attach_handles.c.arq_id))
            .where(sa.tuple_(devices.c.host, devices.c.backend).in_(pairs[start : start + size]))
            .order_by(devices.c.host, arqs.c.id)
            .limit(limit - len(all_holders))
        )
        all_holders += fetch_all(HolderRow, tx.execute(query))
        if len(all_holders) == limit:
            break
    return all_holders


def update_step(tx: sa.Connection, step_id: int, state: StepState, **values: Any) -> None:
    """Write the state of a step. The caller must hold a lock on its job or on the step."""
    tx.execute(sa.update(steps).where(steps.c.id == step_id).values(state=str(state), **values))


def finish_step(tx: sa.Connection, step_id: int, generation: int, state: StepState) -> None:
    """Write the final state of a step that has this generation; else change nothing."""
    same = sa.and_(steps.c.id == step_id, steps.c.generation == generation)
    tx.execute(sa.update(steps).where(same).values(state=str(state), error=None, deadline=None))


def follow_revert(
    tx: sa.Connection, host: str, backend: str, generation: int, new_generation: int
) -> None:
    """Give the step that wrote a desired state, which a rollback has restored, its new generation.

    ``generation`` is that of the step. Only a step that waits for the return of the host's agent is
    changed. The caller must hold a lock on the agent's row.
    """
    pending = _pending_agent(
        steps.c.host == host, steps.c.backend == backend, steps.c.generation == generation
    )
    # A SELECT first: on MariaDB an UPDATE locks all rows that it scans.
    for id_ in tx.scalars(sa.select(steps.c.id).where(pending)).all():
        same = sa.and_(steps.c.id == id_, pending)
        tx.execute(sa.update(steps).where(same).values(generation=new_generation))


def update_steps(tx: sa.Connection, changed: Mapping[int, StepState]) -> None:
    """Write the states of steps, by row id. The caller must hold a lock on their job."""
    for state in sorted(set(changed.values())):
        ids = [id_ for id_, new in changed.items() if new == state]
        bulk.update_where(tx, steps.c.id, ids, state=str(state))


def _pending_agent(*conditions: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    return sa.and_(steps.c.state == str(StepState.PENDING_AGENT), *conditions)


_IN_USE = sa.or_(attach_handles.c.arq_id.is_not(None), attach_handles.c.needs_cleaning)
