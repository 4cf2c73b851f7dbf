# SPDX-License-Identifier: Apache-2.0
"""Writing accelerator requests.

Every step takes the rows' locks first, in the order of their ids, and is then one guarded UPDATE or
DELETE: its guard is the list of states from which ``core.states`` allows the step, its row count
says whether it happened.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from cyborg.core.job import JobState
from cyborg.core.states import RequestState, Step, sources
from cyborg.db.schema import jobs, requests


def insert_all(tx: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add requests. Raises oslo.db's DBReferenceError when their profile is gone."""
    tx.execute(sa.insert(requests), [dict(row) for row in rows])


def lock(
    tx: sa.Connection, uuids: Collection[str], scope: str | None = None
) -> Sequence[sa.RowMapping]:
    """Return the requests of these uuids in the order of their ids, locked until the end.

    ``scope`` is the project whose requests exist for the caller, None for every project.
    """
    query = _LOCK if scope is None else _LOCK_SCOPED
    return tx.execute(query, {"uuids": sorted(uuids), "scope": scope}).mappings().all()


def lock_of_instance(
    tx: sa.Connection, instance: str, scope: str | None = None
) -> Sequence[sa.RowMapping]:
    """Return the requests of an instance in the order of their ids, locked until the end."""
    return _locked(tx, requests.c.instance_uuid == instance, scope)


def lock_of_jobs(tx: sa.Connection, ids: Collection[int]) -> Sequence[sa.RowMapping]:
    """Return the requests whose bind waits for these jobs, locked until the end."""
    return _locked(tx, requests.c.job_id.in_(ids), None)


def lock_stranded(tx: sa.Connection, limit: int) -> Sequence[sa.RowMapping]:
    """Return requests that are BindStarted and whom no open job serves, locked until the end."""
    open_ = sa.exists().where(jobs.c.id == requests.c.job_id, jobs.c.state == JobState.OPEN)
    ids = tx.scalars(
        sa.select(requests.c.id)
        .where(requests.c.state == RequestState.BIND_STARTED, sa.not_(open_))
        .limit(limit)
    ).all()
    # Looked at again under the lock: a bind may just have ended.
    mine = sa.and_(requests.c.id.in_(ids), requests.c.state == RequestState.BIND_STARTED)
    return _locked(tx, mine, None) if ids else []


def lock_to_bind(
    tx: sa.Connection, uuids: Collection[str], instance: str, scope: str | None = None
) -> Sequence[sa.RowMapping]:
    """Return the requests of these uuids as ``lock`` does, each row with one more key: ``others``.

    That is how many requests the instance has beside these. One that appears after this statement
    is met by the key of the instance's places.
    """
    query = _LOCK_TO_BIND if scope is None else _LOCK_TO_BIND_SCOPED
    values = {"uuids": sorted(uuids), "instance": instance, "scope": scope}
    return tx.execute(query, values).mappings().all()


def _locked(
    tx: sa.Connection, which: sa.ColumnElement[bool], scope: str | None
) -> Sequence[sa.RowMapping]:
    query = sa.select(requests).where(which).order_by(requests.c.id).with_for_update()
    if scope is not None:
        query = query.where(requests.c.project_id == scope)
    return tx.execute(query).mappings().all()


# Built once: SQLAlchemy takes longer to build such a statement than a database to answer it.
_UUIDS: sa.BindParameter[Any] = sa.bindparam("uuids", expanding=True)
_SCOPE = requests.c.project_id == sa.bindparam("scope", type_=sa.String)
_other = requests.alias("other")
_OTHERS = (
    sa.select(sa.func.count())
    .where(
        _other.c.instance_uuid == sa.bindparam("instance", type_=sa.String),
        _other.c.uuid.not_in(_UUIDS),
    )
    .scalar_subquery()
    .label("others")
)
_BY_UUID = requests.c.uuid.in_(_UUIDS)
_LOCK = sa.select(requests).where(_BY_UUID).order_by(requests.c.id).with_for_update()
_LOCK_SCOPED = _LOCK.where(_SCOPE)
_LOCK_TO_BIND = _LOCK.add_columns(_OTHERS)
_LOCK_TO_BIND_SCOPED = _LOCK_TO_BIND.where(_SCOPE)


def others_of_instance(
    tx: sa.Connection, instance: str, uuids: Collection[str]
) -> Sequence[sa.RowMapping]:
    """Return uuid and state of a few requests of the instance that are not among ``uuids``."""
    query = sa.select(requests.c.uuid, requests.c.state).where(
        requests.c.instance_uuid == instance, requests.c.uuid.not_in(uuids)
    )
    return tx.execute(query.limit(3)).mappings().all()


def bind(
    tx: sa.Connection,
    *,
    providers: Mapping[int, str],
    projects: Mapping[int, str],
    hostname: str,
    instance: str,
    first_slot: int,
    state: RequestState,
    owner_known: bool,
) -> int:
    """Give requests to the provider of each, and return how many were in a state for it.

    ``state`` is Bound, or BindStarted when host work follows. ``providers`` maps request ids to
    provider uuids; ``projects`` names the project of those whose owner changes with the bind. The
    requests take the instance's places from ``first_slot`` on. Raises oslo.db's DBDuplicateEntry
    when another bind for the instance has taken one of them.
    """
    ids = sorted(providers)
    values: dict[str, Any] = {
        "state": state,
        "hostname": hostname,
        "owner_known": owner_known,
        "orphan_since": None,
        "instance_uuid": instance,
        "device_rp_uuid": _each(providers),
        "instance_slot": _each({id_: first_slot + n for n, id_ in enumerate(ids)}),
    }
    if projects:
        values["project_id"] = _each(projects, otherwise=requests.c.project_id)
    # The claim of a handle is part of this step, so that its guard is that of START: a request that
    # is BindStarted owns a handle already.
    return _step(tx, Step.START, ids, values)


def finish_bind(tx: sa.Connection, ids: Collection[int]) -> int:
    """Mark requests Bound whose host work is done; return how many were in a state for it."""
    values = {"state": RequestState.BOUND, "job_id": None}
    return _step(tx, Step.BIND, ids, values, requests.c.state == RequestState.BIND_STARTED)


def fail_bind(tx: sa.Connection, ids: Collection[int]) -> int:
    """Mark requests BindFailed, still of their instance; return how many were in a state for it."""
    if not ids:
        return 0
    return _step(tx, Step.FAIL_BIND, ids, {"state": RequestState.BIND_FAILED, "job_id": None})


def unbind(tx: sa.Connection, ids: Collection[int]) -> int:
    """Mark requests Unbound, of no host and no instance; return how many were in a state for it."""
    values: dict[str, Any] = {
        "state": RequestState.UNBOUND,
        "hostname": None,
        "device_rp_uuid": None,
        "instance_uuid": None,
        "instance_slot": None,
        "job_id": None,
        "orphan_since": None,
        "owner_known": True,
    }
    return _step(tx, Step.UNBIND, ids, values)


def delete(tx: sa.Connection, ids: Collection[int]) -> int:
    """Delete requests that hold no handle; return how many were in a state for it."""
    return tx.execute(
        sa.delete(requests).where(
            requests.c.id.in_(ids), requests.c.state.in_(sources(Step.DELETE))
        )
    ).rowcount


def _step(
    tx: sa.Connection,
    step: Step,
    ids: Collection[int],
    values: Mapping[str, Any],
    *more: sa.ColumnElement[bool],
) -> int:
    allowed = sources(step)
    return tx.execute(
        sa.update(requests)
        .where(requests.c.id.in_(ids), requests.c.state.in_(allowed), *more)
        .values(**values)
    ).rowcount


def _each(values: Mapping[int, Any], otherwise: Any = None) -> Any:
    # One statement with a CASE, not one UPDATE for each row: a bind of sixteen costs what one does.
    return sa.case(values, value=requests.c.id, else_=otherwise)
