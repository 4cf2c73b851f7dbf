# SPDX-License-Identifier: Apache-2.0
"""Write accelerator requests (ARQs).

A state transition first locks the rows in the order of their ids, and then executes one guarded
UPDATE or DELETE. The guard is the list of states from which ``core.binding.states`` allows the
transition; the row count is the number of ARQs whose state changed.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.binding.accelerator import Label
from cyborg.core.binding.states import (
    ARQ_LIFE_CYCLE,
    OWNING_STATES,
    UNBOUND_STATES,
    ArqState,
    Step,
    source_states,
)
from cyborg.core.jobs.job import JobState
from cyborg.db import bulk
from cyborg.db.rows import equal, fetch_all
from cyborg.db.schema import arqs, attach_handles, jobs


class NewArqRow(TypedDict):
    """An ARQ to insert."""

    uuid: str
    state: str
    profile_id: int
    context_id: int | None
    device_profile_name: str
    device_profile_group_id: int
    resource_class: str
    group: dict[str, str]
    project_id: str | None
    created_at: datetime


class ArqRow(NewArqRow):
    """All columns of an ARQ."""

    id: int
    hostname: str | None
    device_rp_uuid: str | None
    instance_uuid: str | None
    instance_slot: int | None
    job_id: int | None
    owner_verified: bool
    orphan_since: datetime | None
    attachment_id: int | None
    hidden: bool
    attached_at: datetime | None
    attach_error: str | None
    attach_failed_at: datetime | None
    label_name: str | None
    label_description: str | None
    label_tags: list[str] | None
    updated_at: datetime | None


class ArqToBindRow(ArqRow):
    """An ARQ to bind, and the number of other ARQs of the instance.

    ARQs that an attachment hides from Nova are not among them; ``hidden_slot`` is their last slot.
    """

    other_arqs: int
    hidden_slot: int | None


def insert_all(
    tx: sa.Connection, rows: Sequence[NewArqRow], attachment_id: int | None = None
) -> None:
    """Insert ARQs. Raise oslo.db's DBReferenceError if their profile no longer exists.

    The ARQs of an attachment are hidden from Nova at first.
    """
    hidden = {} if attachment_id is None else {"attachment_id": attachment_id, "hidden": True}
    bulk.insert(tx, arqs, [{**row, **hidden} for row in rows])


# Statements of each boot and deletion of a server, built once: SQLAlchemy needs more time to build
# such a statement, and to find it in its cache of compiled statements, than a database to run it.
# The names of parameters of an UPDATE start with new_ or old_: those of columns are reserved.
#
# SELECT arqs.*[, (SELECT count(*) ... other ARQs of :instance), (SELECT max(slot) ... hidden ones)]
#   FROM arqs WHERE uuid IN (:uuids) [AND project_id = :scope]      -- or instance_uuid = :instance
#  ORDER BY id FOR UPDATE                     -- all callers lock in this order: no deadlock
_UUIDS: sa.BindParameter[Any] = sa.bindparam("uuids", expanding=True)
_INSTANCE: sa.BindParameter[Any] = sa.bindparam("instance", type_=sa.String)
_SCOPE = arqs.c.project_id == sa.bindparam("scope", type_=sa.String)
_other = arqs.alias("other")
_OTHER_COUNT = (
    sa.select(sa.func.count())
    .where(
        _other.c.instance_uuid == _INSTANCE,
        _other.c.uuid.not_in(_UUIDS),
        sa.not_(sa.and_(_other.c.hidden, _other.c.attachment_id.is_not(None))),
    )
    .scalar_subquery()
    .label("other_arqs")
)
_HIDDEN_SLOT = (
    sa.select(sa.func.max(_other.c.instance_slot))
    .where(
        _other.c.instance_uuid == _INSTANCE,
        _other.c.hidden,
        _other.c.attachment_id.is_not(None),
    )
    .scalar_subquery()
    .label("hidden_slot")
)
_ALL = sa.select(arqs).order_by(arqs.c.id).with_for_update()
_LOCK = _ALL.where(arqs.c.uuid.in_(_UUIDS))
_LOCK_SCOPED = _LOCK.where(_SCOPE)
_LOCK_TO_BIND = _LOCK.add_columns(_OTHER_COUNT, _HIDDEN_SLOT)
_LOCK_TO_BIND_SCOPED = _LOCK_TO_BIND.where(_SCOPE)
_LOCK_OF_INSTANCE = _ALL.where(arqs.c.instance_uuid == _INSTANCE)
_LOCK_OF_INSTANCE_SCOPED = _LOCK_OF_INSTANCE.where(_SCOPE)


def lock(
    tx: sa.Connection, uuids: Collection[str], project_scope: str | None = None
) -> list[ArqRow]:
    """Return the ARQs with these uuids in the order of their ids, locked.

    ``project_scope`` is the only project whose ARQs the caller may see, None for all projects.
    """
    query = _LOCK if project_scope is None else _LOCK_SCOPED
    return fetch_all(ArqRow, tx.execute(query, {"uuids": sorted(uuids), "scope": project_scope}))


def lock_of_instance(
    tx: sa.Connection, instance: str, project_scope: str | None = None
) -> list[ArqRow]:
    """Return the ARQs of an instance in the order of their ids, locked."""
    scoped = project_scope is not None
    query = _LOCK_OF_INSTANCE_SCOPED if scoped else _LOCK_OF_INSTANCE
    return fetch_all(ArqRow, tx.execute(query, {"instance": instance, "scope": project_scope}))


def lock_of_contexts(tx: sa.Connection, ids: Collection[int]) -> list[ArqRow]:
    """Return the ARQs of these device contexts in the order of their ids, locked."""
    return _locked(tx, arqs.c.context_id.in_(sorted(ids)))


def lock_of_jobs(tx: sa.Connection, ids: Collection[int]) -> list[ArqRow]:
    """Return the ARQs that wait for these jobs, in the order of their ids, locked."""
    return _locked(tx, arqs.c.job_id.in_(ids))


def lock_stranded(tx: sa.Connection, limit: int) -> list[ArqRow]:
    """Return up to ``limit`` BindStarted ARQs without an open job, locked."""
    open_ = sa.exists().where(jobs.c.id == arqs.c.job_id, jobs.c.state == JobState.OPEN)
    ids = tx.scalars(
        sa.select(arqs.c.id)
        .where(arqs.c.state == ArqState.BIND_STARTED, sa.not_(open_))
        .limit(limit)
    ).all()
    # Checked again under the lock: a bind may have just ended.
    condition = sa.and_(arqs.c.id.in_(ids), arqs.c.state == ArqState.BIND_STARTED)
    return _locked(tx, condition) if ids else []


def lock_to_bind(
    tx: sa.Connection,
    uuids: Collection[str],
    instance: str | None,
    project_scope: str | None = None,
) -> list[ArqToBindRow]:
    """Return the ARQs with these uuids as ``lock`` does, with two extra keys.

    ``other_arqs`` is the number of ARQs of the instance that are neither among these ARQs nor
    hidden by an attachment; ``hidden_slot`` is the last slot of the hidden ones. An ARQ that is
    bound after this statement is detected by the unique key of the instance's slots.
    """
    scoped = project_scope is not None
    query = _LOCK_TO_BIND_SCOPED if scoped else _LOCK_TO_BIND
    values = {"uuids": sorted(uuids), "instance": instance, "scope": project_scope}
    return fetch_all(ArqToBindRow, tx.execute(query, values))


def _locked(tx: sa.Connection, condition: sa.ColumnElement[bool]) -> list[ArqRow]:
    query = sa.select(arqs).where(condition).order_by(arqs.c.id).with_for_update()
    return fetch_all(ArqRow, tx.execute(query))


def other_arqs_of_instance(
    tx: sa.Connection, instance: str, uuids: Collection[str]
) -> list[ArqRow]:
    """Return up to 3 ARQs of the instance that are not in ``uuids`` nor hidden by an attachment."""
    query = sa.select(arqs).where(
        arqs.c.instance_uuid == instance,
        arqs.c.uuid.not_in(uuids),
        sa.not_(sa.and_(arqs.c.hidden, arqs.c.attachment_id.is_not(None))),
    )
    # Three are enough: they are only named in the text of an error.
    return fetch_all(ArqRow, tx.execute(query.limit(3)))


def last_slot(tx: sa.Connection, instance: str) -> int:
    """Return the last slot that the ARQs of an instance use, -1 if there is none."""
    query = sa.select(sa.func.max(arqs.c.instance_slot)).where(arqs.c.instance_uuid == instance)
    last = tx.scalar(query)
    return -1 if last is None else int(last)


def _new(name: str) -> sa.BindParameter[Any]:
    return sa.bindparam(f"new_{name}", type_=arqs.c[name].type)


# UPDATE arqs SET state = :new_state, hostname = ..., instance_uuid = ..., instance_slot = ...,
#        project_id = coalesce(:new_project_id, project_id), orphan_since = NULL, job_id = NULL
#  WHERE id = :old_id AND state IN (the states from which a bind may start)
# One ARQ, as in most calls: a CASE for each of several ARQs is another text each time.
_BIND_ONE = (
    sa.update(arqs)
    .where(
        arqs.c.id == sa.bindparam("old_id", type_=sa.BigInteger),
        # The same guard as for several ARQs.
        arqs.c.state.in_(sorted(source_states(Step.START))),
    )
    .values(
        {
            **{
                name: _new(name)
                for name in (
                    *("state", "hostname", "instance_uuid", "instance_slot"),
                    *("device_rp_uuid", "owner_verified"),
                )
            },
            # None keeps the project.
            "project_id": sa.func.coalesce(_new("project_id"), arqs.c.project_id),
            "orphan_since": None,
            "job_id": None,
        }
    )
)


def bind(
    tx: sa.Connection,
    *,
    providers: Mapping[int, str],
    projects: Mapping[int, str],
    hostname: str,
    instance: str | None,
    first_slot: int,
    state: ArqState,
    owner_verified: bool,
) -> int:
    """Bind ARQs, each to its provider; return how many were changed.

    ``state`` is Bound, or BindStarted if host work follows. ``providers`` maps ARQ ids to provider
    uuids; ``projects`` maps ARQ ids to the new projects, for ARQs whose project changes with the
    bind. The ARQs use the instance's slots from ``first_slot`` on. Raise oslo.db's DBDuplicateEntry
    if another bind for the instance uses one of these slots. Under a lease and for a host,
    ``instance`` is None and no slot is used.
    """
    ids = sorted(providers)
    if len(ids) == 1:
        parameters = {
            "old_id": ids[0],
            "new_state": state,
            "new_hostname": hostname,
            "new_instance_uuid": instance,
            "new_instance_slot": None if instance is None else first_slot,
            "new_device_rp_uuid": providers[ids[0]],
            "new_owner_verified": owner_verified,
            "new_project_id": projects.get(ids[0]),
        }
        return tx.execute(_BIND_ONE, parameters).rowcount
    values: dict[str, Any] = {
        "hostname": hostname,
        "owner_verified": owner_verified,
        "orphan_since": None,
        "instance_uuid": instance,
        # A bind does not wait for the cleaning of the handle of an earlier bind.
        "job_id": None,
        "device_rp_uuid": _case_by_id(providers),
        "instance_slot": None if instance is None else _slots(ids, first_slot),
    }
    if projects:
        values["project_id"] = _case_by_id(projects, otherwise=arqs.c.project_id)
    # Not from BindStarted, which may become Bound as well: such an ARQ already owns a handle.
    start = ARQ_LIFE_CYCLE.to(state, among=source_states(Step.START))
    return bulk.change_state(tx, arqs, start, arqs.c.id.in_(ids), **values)


def assign_instance(
    tx: sa.Connection,
    ids: Collection[int],
    *,
    instance: str,
    first_slot: int,
    owner_verified: bool,
) -> int:
    """Bind ARQs that own handles under a lease to an instance; return how many were changed.

    Raise oslo.db's DBDuplicateEntry as ``bind`` does.
    """
    values = {
        "instance_uuid": instance,
        "instance_slot": _slots(sorted(ids), first_slot),
        "owner_verified": owner_verified,
    }
    leased = arqs.c.state.in_(sorted(OWNING_STATES)), arqs.c.instance_uuid.is_(None)
    return tx.execute(
        sa.update(arqs).where(arqs.c.id.in_(sorted(ids)), *leased).values(**values)
    ).rowcount


def replace_uuids(tx: sa.Connection, uuids: Mapping[int, str]) -> None:
    """Give ARQs new uuids, by row id, so that a call with a former uuid finds no ARQ.

    Only records of past events refer to an ARQ by its uuid.
    """
    tx.execute(
        sa.update(arqs)
        .where(arqs.c.id.in_(sorted(uuids)))
        .values(uuid=_case_by_id(uuids), updated_at=arqs.c.updated_at)
    )


def finish_bind(tx: sa.Connection, ids: Collection[int]) -> int:
    """Mark ARQs Bound after their host work; return how many were changed."""
    return _transition(tx, Step.FINISH_BIND, ids, job_id=None)


def fail_bind(tx: sa.Connection, ids: Collection[int]) -> int:
    """Mark ARQs BindFailed, keep their instance; return how many were changed."""
    return _transition(tx, Step.FAIL_BIND, ids, job_id=None) if ids else 0


def clear_job(tx: sa.Connection, ids: Collection[int]) -> None:
    """Clear the restore job that Bound ARQs wait for. The caller must hold locks on the ARQs."""
    tx.execute(
        sa.update(arqs)
        .where(arqs.c.id.in_(ids), arqs.c.state == ArqState.BOUND)
        # The orphan collector uses updated_at as the time of the bind.
        .values(job_id=None, updated_at=arqs.c.updated_at)
    )


def record_delivery(
    tx: sa.Connection, ids: Collection[int], now: datetime | None, *, error: str | None
) -> None:
    """Record whether running guests have the devices of ARQs, which the caller has locked.

    ``error`` is why they lack them; the time of the first failure stays. Without an error they have
    them since ``now``. Both are None for guests that do not run.
    """
    bulk.update_where(
        tx,
        arqs.c.id,
        ids,
        attached_at=now if error is None else None,
        attach_error=error,
        attach_failed_at=None if error is None else sa.func.coalesce(arqs.c.attach_failed_at, now),
        # The orphan collector uses updated_at as the time of the bind.
        updated_at=arqs.c.updated_at,
    )


def unbind(tx: sa.Connection, ids: Collection[int], jobs_by_arq: Mapping[int, int]) -> int:
    """Mark ARQs Unbound, clear their host and instance; return how many were changed.

    The ARQs of a device context no longer belong to an attachment afterwards, since another user
    may bind them next. ``jobs_by_arq`` maps row ids of ARQs to the row ids of the jobs that clean
    their former handles.
    """
    return _transition(
        tx,
        Step.UNBIND,
        ids,
        hostname=None,
        device_rp_uuid=None,
        instance_uuid=None,
        instance_slot=None,
        job_id=_case_by_id(jobs_by_arq) if jobs_by_arq else None,
        orphan_since=None,
        attached_at=None,
        attach_error=None,
        attach_failed_at=None,
        # Without an instance there is no project to verify.
        owner_verified=True,
        attachment_id=sa.case((arqs.c.context_id.is_(None), arqs.c.attachment_id)),
        hidden=sa.and_(arqs.c.context_id.is_(None), arqs.c.hidden),
    )


def fail_unbind(tx: sa.Connection, ids: Collection[int], job_id: int) -> int:
    """Change Unbound ARQs that wait for this release job to UnbindFailed; return their number."""
    return _transition(tx, Step.FAIL_UNBIND, ids, arqs.c.job_id == job_id) if ids else 0


def finish_unbind(tx: sa.Connection, ids: Collection[int]) -> int:
    """Clear the release job that unbound ARQs wait for, and change UnbindFailed to Unbound.

    The caller must hold locks on the ARQs. Return how many were UnbindFailed.
    """
    if not ids:
        return 0
    changed = _transition(tx, Step.FINISH_UNBIND, ids, job_id=None)
    tx.execute(
        sa.update(arqs)
        .where(arqs.c.id.in_(ids), arqs.c.state == ArqState.UNBOUND)
        # An unbound ARQ expires after a time without a change: the end of its job is none.
        .values(job_id=None, updated_at=arqs.c.updated_at)
    )
    return changed


def replace_release_jobs(tx: sa.Connection, handles: Collection[int], job_id: int) -> int:
    """Make the unbound ARQs that wait for the cleaning of these handles wait for a new job.

    Return the number of ARQs. Call this before ``jobs.write.assign_cleaning``, which replaces the
    old job of the handles.
    """
    h = attach_handles.c
    old = sa.select(h.job_id).where(h.id.in_(sorted(handles)), h.job_id.is_not(None))
    old_jobs = tx.scalars(old.distinct()).all()
    if not old_jobs:
        return 0
    return tx.execute(
        sa.update(arqs)
        .where(arqs.c.job_id.in_(old_jobs), arqs.c.state.in_(sorted(UNBOUND_STATES)))
        # An unbound ARQ expires after a time without a change: another job is none.
        .values(job_id=job_id, updated_at=arqs.c.updated_at)
    ).rowcount


def lock_released(tx: sa.Connection, limit: int) -> list[ArqRow]:
    """Return up to ``limit`` unbound ARQs that wait for a job that has ended, locked."""
    states = arqs.c.state.in_(sorted(UNBOUND_STATES))
    ids = tx.scalars(
        sa.select(arqs.c.id)
        .join(jobs, jobs.c.id == arqs.c.job_id)
        .where(states, jobs.c.state != JobState.OPEN)
        .limit(limit)
    ).all()
    return _locked(tx, sa.and_(arqs.c.id.in_(ids), states)) if ids else []


_DELETE = sa.delete(arqs).where(
    arqs.c.id.in_(sa.bindparam("ids", expanding=True)),
    arqs.c.state.in_(sorted(source_states(Step.DELETE))),
)


def delete(tx: sa.Connection, ids: Collection[int]) -> int:
    """Delete ARQs that own no handle; return how many were deleted."""
    return tx.execute(_DELETE, {"ids": sorted(ids)}).rowcount


def providers_of(rows: Collection[ArqRow]) -> list[str]:
    """Return the uuids of the providers of ARQs."""
    return sorted({row["device_rp_uuid"] for row in rows if row["device_rp_uuid"] is not None})


def write_label(tx: sa.Connection, handle: str, label: Label, project_scope: str | None) -> bool:
    """Set the label of the ARQ that owns the handle with this uuid; return whether it was set.

    ``project_scope`` is the only project whose ARQs the caller may see, None for all projects.
    ``updated_at`` does not change: the orphan collector uses it as the time of the bind.
    """
    owner = sa.select(attach_handles.c.arq_id).where(attach_handles.c.uuid == handle)
    # The owner of the moment of the UPDATE, so that no other statement is needed before it.
    guard = equal({arqs.c.id: owner.scalar_subquery(), arqs.c.project_id: project_scope})
    values = {f"label_{name}": value for name, value in label.items()}
    change = sa.update(arqs).where(*guard)
    return bool(tx.execute(change.values(**values, updated_at=arqs.c.updated_at)).rowcount)


def _transition(
    tx: sa.Connection,
    step: Step,
    ids: Collection[int],
    *conditions: sa.ColumnElement[bool],
    **values: Any,
) -> int:
    transition = ARQ_LIFE_CYCLE.transition(step)
    return bulk.change_state(tx, arqs, transition, arqs.c.id.in_(ids), *conditions, **values)


def _slots(ids: Sequence[int], first: int) -> Any:
    return _case_by_id({id_: first + n for n, id_ in enumerate(ids)})


def _case_by_id(values: Mapping[int, Any], otherwise: Any = None) -> Any:
    # One UPDATE with a CASE instead of one UPDATE per row, so that the cost of a bind does not grow
    # with the number of ARQs.
    return sa.case(values, value=arqs.c.id, else_=otherwise)
