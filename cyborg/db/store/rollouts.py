# SPDX-License-Identifier: Apache-2.0
"""Jobs that are about a driver on many hosts, and how far each backend on each host is.

No two that are open are about one driver: ``jobs.exclusive`` is unique and is given up at the end.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.job import JobState
from cyborg.core.rollout import Kind, StepState
from cyborg.db.schema import attach_handles, deployables, devices, jobs, requests, services
from cyborg.db.schema import job_steps as steps
from cyborg.db.store import bulk
from cyborg.db.store.services import AGENT

_LEASED = tuple(jobs.c[name] for name in ("id", "uuid", "kind", "subject", "arguments"))
OPEN = sa.and_(jobs.c.state == JobState.OPEN, jobs.c.kind.in_(sorted(Kind)))


@dataclass(frozen=True, slots=True)
class NewStep:
    """A step as it is promised; ``before`` is what to go back to, as plain values."""

    host: str
    backend: str
    state: StepState
    before: Mapping[str, Any] | None


def exclusive(driver: str) -> str:
    """Return what no two open jobs may both be about."""
    return f"driver:{driver}"[:255]


def open_one(tx: sa.Connection, driver: str) -> sa.RowMapping | None:
    """Return the job that is open for a driver, or None."""
    query = sa.select(jobs).where(jobs.c.exclusive == exclusive(driver))
    return tx.execute(query).mappings().first()


def add(
    tx: sa.Connection, kind: Kind, driver: str, arguments: Mapping[str, Any], now: datetime
) -> tuple[int, str]:
    """Promise a job, due at once; return its row id and uuid.

    Until the end nobody else begins one for the driver. Raises oslo.db's DBDuplicateEntry when
    another is open for it.
    """
    uuid = str(uuid4())
    made = tx.execute(
        sa.insert(jobs).values(
            uuid=uuid,
            kind=kind,
            host="",
            subject=driver,
            arguments=dict(arguments),
            next_try_at=now,
            exclusive=exclusive(driver),
        )
    ).inserted_primary_key
    if made is None:
        raise AssertionError("an INSERT of one row has a key")
    return int(made[0]), uuid


def promise(
    tx: sa.Connection, job_id: int, arguments: Mapping[str, Any], begun: Iterable[NewStep]
) -> None:
    """Say what a job that was just added is to do."""
    mine = sa.update(jobs).where(jobs.c.id == job_id)
    tx.execute(mine.values(arguments=dict(arguments)))
    bulk.insert(tx, steps, [{"job_id": job_id, **asdict(step)} for step in begun])


def lease(
    tx: sa.Connection, *, owner: str, now: datetime, until: datetime, limit: int
) -> Sequence[sa.RowMapping]:
    """Take up to ``limit`` of these jobs that are due; return id, uuid, kind, subject, arguments.

    What another conductor has not looked at again by ``next_try_at`` is anyone's.
    """
    due = sa.and_(OPEN, jobs.c.next_try_at <= now)
    query = sa.select(*_LEASED).where(due).order_by(jobs.c.next_try_at, jobs.c.id).limit(limit)
    rows = tx.execute(query.with_for_update(skip_locked=True)).mappings().all()
    if rows:
        tx.execute(
            sa.update(jobs)
            .where(jobs.c.id.in_([row["id"] for row in rows]), due)
            .values(owner=owner, lease_until=until, next_try_at=until, attempts=jobs.c.attempts + 1)
        )
    return rows


def hold(tx: sa.Connection, job_id: int, owner: str) -> sa.RowMapping | None:
    """Lock a job until the end; return it as ``lease`` does, None unless open and this owner's."""
    query = sa.select(*_LEASED).where(jobs.c.id == job_id, jobs.c.owner == owner, OPEN)
    return tx.execute(query.with_for_update()).mappings().first()


def lock(tx: sa.Connection, uuid: str) -> sa.RowMapping | None:
    """Return a job's row of whatever kind, locked until the end, or None."""
    query = sa.select(jobs).where(jobs.c.uuid == uuid).with_for_update()
    return tx.execute(query).mappings().first()


def again(tx: sa.Connection, job_id: int, until: datetime) -> None:
    """Look at a job again at ``until``. The caller holds it."""
    tx.execute(
        sa.update(jobs)
        .where(jobs.c.id == job_id)
        .values(next_try_at=until, lease_until=until, owner=None)
    )


def hurry(tx: sa.Connection, ids: Collection[int], now: datetime) -> None:
    """Have jobs be due at once."""
    tx.execute(sa.update(jobs).where(jobs.c.id.in_(sorted(ids)), OPEN).values(next_try_at=now))


def ask(tx: sa.Connection, job_id: int, arguments: Mapping[str, Any], now: datetime) -> None:
    """Change what a job was asked, and have it be due. The caller holds it."""
    mine = sa.update(jobs).where(jobs.c.id == job_id)
    tx.execute(mine.values(arguments=dict(arguments), next_try_at=now))


def end(tx: sa.Connection, job_id: int, state: JobState, error: str | None) -> None:
    """Record how a job ended: another may be about its driver now. The caller holds it."""
    values = {"state": state, "error": error, "owner": None, "lease_until": None}
    tx.execute(sa.update(jobs).where(jobs.c.id == job_id).values(exclusive=None, **values))


def of_job(tx: sa.Connection, job_id: int) -> Sequence[sa.RowMapping]:
    """Return a job's steps in the order of their turns.

    Keys: id, host, backend, state, revision, before, deadline, error, service_id (of the agent) and
    down (whether it is held for down; an agent that is not known is).
    """
    query = (
        sa.select(
            *(steps.c[name] for name in ("id", "host", "backend", "state", "revision", "before")),
            steps.c.deadline,
            steps.c.error,
            services.c.id.label("service_id"),
            sa.or_(services.c.down_since.is_not(None), services.c.id.is_(None)).label("down"),
        )
        .outerjoin(services, sa.and_(services.c.host == steps.c.host, services.c.binary == AGENT))
        .where(steps.c.job_id == job_id)
        .order_by(steps.c.host, steps.c.backend)
    )
    return tx.execute(query).mappings().all()


def lock_waiting(tx: sa.Connection, host: str) -> list[int]:
    """Lock the open jobs that wait for a host's agent; return their row ids.

    Before the agent's row and the steps, as everybody locks them.
    """
    ids = tx.scalars(
        sa.select(steps.c.job_id)
        .distinct()
        .where(steps.c.host == host, steps.c.state == str(StepState.ROLLING))
    ).all()
    if not ids:
        return []
    mine = sa.select(jobs.c.id).where(jobs.c.id.in_(sorted(ids)), OPEN).order_by(jobs.c.id)
    return list(tx.scalars(mine.with_for_update()))


def waited_for(tx: sa.Connection, host: str, ids: Collection[int]) -> Sequence[sa.RowMapping]:
    """Return the steps of jobs that wait for a host's agent. The caller holds the jobs.

    Keys: id, job_id, kind, backend, revision, before.
    """
    query = (
        sa.select(
            *(steps.c[name] for name in ("id", "job_id", "backend", "revision", "before")),
            jobs.c.kind,
        )
        .join(jobs, jobs.c.id == steps.c.job_id)
        .where(
            jobs.c.id.in_(sorted(ids)),
            steps.c.host == host,
            steps.c.state == str(StepState.ROLLING),
        )
        .order_by(steps.c.id)
    )
    return tx.execute(query).mappings().all()


def held(tx: sa.Connection, which: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return how many handles of backends are owned or still to be cleaned, by host and backend."""
    found: dict[tuple[str, str], int] = {}
    for some in bulk.chunks(sorted({host for host, _ in which})):
        query = (
            sa.select(devices.c.host, devices.c.backend, sa.func.count().label("n"))
            .select_from(_HANDLES)
            .where(devices.c.host.in_(some), _IN_USE)
            .group_by(devices.c.host, devices.c.backend)
        )
        found |= {(row.host, row.backend): row.n for row in tx.execute(query)}
    return {key: count for key, count in found.items() if key in set(which)}


def holders(
    tx: sa.Connection, which: Collection[tuple[str, str]], limit: int
) -> Sequence[sa.RowMapping]:
    """Return some of the requests that hold handles of backends: uuid, instance_uuid, host."""
    found: list[sa.RowMapping] = []
    backends = sorted({backend for _, backend in which})
    for some in bulk.chunks(sorted({host for host, _ in which})):
        query = (
            sa.select(requests.c.uuid, requests.c.instance_uuid, devices.c.host, devices.c.backend)
            .select_from(_HANDLES.join(requests, requests.c.id == attach_handles.c.request_id))
            .where(devices.c.host.in_(some), devices.c.backend.in_(backends))
            .order_by(devices.c.host, requests.c.id)
            .limit(limit)
        )
        found += tx.execute(query).mappings().all()
    return [row for row in found if (row["host"], row["backend"]) in set(which)][:limit]


def change(tx: sa.Connection, step_id: int, state: StepState, **values: Any) -> None:
    """Write how far a step is. The caller holds its job, or the step."""
    tx.execute(sa.update(steps).where(steps.c.id == step_id).values(state=str(state), **values))


def change_all(tx: sa.Connection, changed: Mapping[int, StepState]) -> None:
    """Write how far steps are, by row id. The caller holds their job."""
    for state in sorted(set(changed.values())):
        for some in bulk.chunks([id_ for id_, its in changed.items() if its == state]):
            tx.execute(sa.update(steps).where(steps.c.id.in_(some)).values(state=str(state)))


_HANDLES = attach_handles.join(
    deployables, deployables.c.id == attach_handles.c.deployable_id
).join(devices, devices.c.id == deployables.c.device_id)
_IN_USE = sa.or_(attach_handles.c.request_id.is_not(None), attach_handles.c.prepared)
