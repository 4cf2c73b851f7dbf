# SPDX-License-Identifier: Apache-2.0
"""Write the findings of the orphan collector about ARQs.

These writes do not change ``updated_at``, which remains the time of the bind: the settle time of
the orphan collector starts at this time.
"""

from collections.abc import Collection
from datetime import datetime

import sqlalchemy as sa

from cyborg.core.binding.states import ArqState
from cyborg.core.orphans.orphans import BoundArqRow
from cyborg.db.binding.write import ArqRow
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import arqs

# The states of ARQs without a handle and without an instance.
EXPIRING = (ArqState.INITIAL, ArqState.UNBOUND)

_LAST_CHANGE = sa.func.coalesce(arqs.c.updated_at, arqs.c.created_at)
# An ARQ without an instance is under a lease, which has an end of its own, or attached to its host.
_BOUND = sa.and_(arqs.c.state == ArqState.BOUND, arqs.c.instance_uuid.is_not(None))
# The ARQs of a device context live as long as the context, which has a time of its own.
_WITHOUT_CONTEXT = arqs.c.context_id.is_(None)
# Few columns: a scan reads all bound ARQs of a cloud.
_COLUMNS = row_columns(BoundArqRow, arqs)


def next_bound(tx: sa.Connection, provider: str, after: int, limit: int) -> list[BoundArqRow]:
    """Return the next bound ARQs after a provider and ARQ id, ordered by provider and ARQ id.

    Start a scan with "" and 0.
    """
    r = arqs.c
    query = (
        sa.select(*_COLUMNS)
        .where(_BOUND)
        # Without the first term a database scans the index of providers from its start.
        .where(
            r.device_rp_uuid >= provider,
            sa.or_(r.device_rp_uuid > provider, r.id > after),
        )
        .order_by(r.device_rp_uuid, r.id)
        .limit(limit)
    )
    return fetch_all(BoundArqRow, tx.execute(query))


def bound_at_provider(tx: sa.Connection, provider: str, limit: int) -> list[BoundArqRow]:
    """Return up to ``limit`` bound ARQs of one provider.

    Suspected orphans come first, then the latest binds, because a new orphan is the likely reason
    for a missing handle.
    """
    r = arqs.c
    query = (
        sa.select(*_COLUMNS)
        .where(r.device_rp_uuid == provider, _BOUND)
        .order_by(r.orphan_since.is_(None), r.id.desc())
        .limit(limit)
    )
    return fetch_all(BoundArqRow, tx.execute(query))


def bound_of_instances(tx: sa.Connection, instances: Collection[str]) -> list[BoundArqRow]:
    """Return the bound ARQs of some instances, ordered by provider and ARQ id."""
    query = (
        sa.select(*_COLUMNS)
        .where(arqs.c.instance_uuid.in_(sorted(instances)), _BOUND)
        .order_by(arqs.c.device_rp_uuid, arqs.c.id)
    )
    return fetch_all(BoundArqRow, tx.execute(query))


def mark_suspected(
    tx: sa.Connection, ids: Collection[int], now: datetime, bound_before: datetime
) -> int:
    """Mark bound ARQs as suspected orphans since ``now``; return how many are newly marked.

    Skip an ARQ that was bound after ``bound_before``: it is a new bind.
    """
    if not ids:
        return 0
    return tx.execute(
        sa.update(arqs)
        .where(
            arqs.c.id.in_(sorted(ids)),
            _BOUND,
            arqs.c.orphan_since.is_(None),
            bound_before >= _LAST_CHANGE,
        )
        .values(orphan_since=now, updated_at=arqs.c.updated_at)
    ).rowcount


def clear_suspicion(tx: sa.Connection, ids: Collection[int]) -> int:
    """Clear the suspicion of ARQs; return how many were suspected."""
    if not ids:
        return 0
    return tx.execute(
        sa.update(arqs)
        .where(arqs.c.id.in_(sorted(ids)), arqs.c.orphan_since.is_not(None))
        .values(orphan_since=None, updated_at=arqs.c.updated_at)
    ).rowcount


def assign_project(tx: sa.Connection, ids: Collection[int], instance: str, project: str) -> int:
    """Assign ARQs of an instance to its verified project; return how many have changed.

    The ARQs of a device context belong to the project of the context.
    """
    return tx.execute(
        sa.update(arqs)
        .where(
            arqs.c.id.in_(sorted(ids)),
            arqs.c.instance_uuid == instance,
            sa.not_(arqs.c.owner_verified),
            _WITHOUT_CONTEXT,
        )
        .values(project_id=project, owner_verified=True, updated_at=arqs.c.updated_at)
    ).rowcount


def delete_expired(
    tx: sa.Connection, cutoff: datetime, limit: int, projects: Collection[str] | None = None
) -> int:
    """Delete up to ``limit`` ARQs without an instance, unchanged since ``cutoff``.

    With ``projects``, only those of these projects that belong to no attachment. Return the number
    of deleted ARQs.
    """
    old = sa.and_(arqs.c.state.in_(EXPIRING), _unchanged_since(cutoff), _WITHOUT_CONTEXT)
    # ``projects`` are those of which Nova builds no server: that says nothing about an attachment,
    # which deletes its own ARQs. Without them the cutoff is that of ``unbound_ttl``, which is long
    # enough to delete also what an attachment has left behind.
    if projects is not None:
        old = sa.and_(old, arqs.c.project_id.in_(sorted(projects)), arqs.c.attachment_id.is_(None))
    query = sa.select(arqs.c.id).where(old).order_by(arqs.c.created_at, arqs.c.id).limit(limit)
    ids = tx.scalars(query).all()
    if not ids:
        return 0
    # The state is checked again: a concurrent bind may have changed it.
    return tx.execute(sa.delete(arqs).where(arqs.c.id.in_(ids), old)).rowcount


def projects_of_expired(tx: sa.Connection, cutoff: datetime, after: str, limit: int) -> list[str]:
    """Return up to ``limit`` projects that have ARQs of ``delete_expired``, ordered by id.

    Start with the first project after the id ``after``.
    """
    query = (
        sa.select(arqs.c.project_id)
        .where(
            arqs.c.state.in_(EXPIRING),
            _unchanged_since(cutoff),
            _WITHOUT_CONTEXT,
            arqs.c.project_id > after,
            arqs.c.attachment_id.is_(None),
        )
        .group_by(arqs.c.project_id)
        .order_by(arqs.c.project_id)
        .limit(limit)
    )
    return [str(project) for project in tx.scalars(query)]


def failed_binds(tx: sa.Connection, cutoff: datetime, limit: int) -> list[ArqRow]:
    """Return up to ``limit`` BindFailed ARQs unchanged since ``cutoff``."""
    query = (
        sa.select(arqs)
        .where(_failed_before(cutoff))
        .order_by(arqs.c.created_at, arqs.c.id)
        .limit(limit)
    )
    return fetch_all(ArqRow, tx.execute(query))


def delete_failed(tx: sa.Connection, ids: Collection[int], cutoff: datetime) -> int:
    """Delete the BindFailed ARQs among ``ids`` that are unchanged since ``cutoff``.

    The ARQs of device contexts stay. Return the number of deleted ARQs.
    """
    if not ids:
        return 0
    selected = arqs.c.id.in_(sorted(ids))
    failed = (selected, _failed_before(cutoff), _WITHOUT_CONTEXT)
    return tx.execute(sa.delete(arqs).where(*failed)).rowcount


def reset_failed_age(
    tx: sa.Connection, ids: Collection[int], cutoff: datetime, now: datetime
) -> int:
    """Count the age of BindFailed ARQs from ``now``; return the number of these ARQs."""
    if not ids:
        return 0
    selected = arqs.c.id.in_(sorted(ids))
    return tx.execute(
        sa.update(arqs).where(selected, _failed_before(cutoff)).values(updated_at=now)
    ).rowcount


def _failed_before(cutoff: datetime) -> sa.ColumnElement[bool]:
    return sa.and_(arqs.c.state == ArqState.BIND_FAILED, _unchanged_since(cutoff))


def _unchanged_since(cutoff: datetime) -> sa.ColumnElement[bool]:
    # The first term follows from the second, and an index on the time of creation serves it.
    return sa.and_(cutoff > arqs.c.created_at, cutoff > _LAST_CHANGE)
