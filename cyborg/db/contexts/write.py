# SPDX-License-Identifier: Apache-2.0
"""Write device contexts: create, change, delete; their hidden profiles are deleted with them."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.contexts.states import DELETABLE, EDITABLE, ContextState
from cyborg.db import bulk
from cyborg.db.binding.write import ArqRow, lock_of_contexts
from cyborg.db.contexts import read
from cyborg.db.rows import fetch_all, fetch_first
from cyborg.db.schema import arqs, attachments, deployables, device_profiles, devices
from cyborg.db.schema import device_contexts as contexts

NewContextRow = read.NewContextRow
ContextRow = read.ContextRow


class ProjectUsageRow(TypedDict):
    """The number of contexts and of ARQs of a project, each counted up to a maximum."""

    contexts: int
    arqs: int


class SuccessorWorkRow(TypedDict):
    """The state and the step of the work on a successor, None without this work."""

    state: str | None
    step: str | None


def project_usage(
    tx: sa.Connection, project: str, max_contexts: int, max_arqs: int
) -> ProjectUsageRow:
    """Return the number of contexts and of ARQs of a project; a maximum of 0 counts nothing."""
    counts = [
        sa.select(sa.func.count())
        .select_from(
            sa.select(table.c.id).where(table.c.project_id == project).limit(limit).subquery()
        )
        .scalar_subquery()
        .label(table.name if table is arqs else "contexts")
        for table, limit in ((contexts, max_contexts), (arqs, max_arqs))
    ]
    found = fetch_first(ProjectUsageRow, tx.execute(sa.select(*counts)))
    return found or {"contexts": 0, "arqs": 0}


def insert(tx: sa.Connection, row: NewContextRow) -> int:
    """Insert a context and return its row id."""
    return bulk.insert_row(tx, contexts, **row)


def insert_hidden_profile(
    tx: sa.Connection,
    context_id: int,
    *,
    uuid: str,
    name: str,
    groups: Sequence[Mapping[str, str]],
    created_at: datetime,
) -> int:
    """Insert the hidden profile of a context and return its row id."""
    values = {"uuid": uuid, "name": name, "groups": list(groups), "created_at": created_at}
    return bulk.insert_row(tx, device_profiles, context_id=context_id, **values)


def find(tx: sa.Connection, uuid: str, project_scope: str | None = None) -> ContextRow | None:
    """Return a context without a lock, or None.

    ``project_scope`` is the only project whose contexts the caller may see, None for all projects.
    """
    query = sa.select(contexts).where(contexts.c.uuid == uuid)
    if project_scope is not None:
        query = query.where(contexts.c.project_id == project_scope)
    return fetch_first(ContextRow, tx.execute(query))


def lock(tx: sa.Connection, ids: Collection[int]) -> list[ContextRow]:
    """Return contexts in the order of their ids, locked. ARQs are locked before contexts."""
    query = sa.select(contexts).where(contexts.c.id.in_(sorted(ids))).order_by(contexts.c.id)
    return fetch_all(ContextRow, tx.execute(query.with_for_update()))


def lock_with_arqs(
    tx: sa.Connection, ids: Collection[int]
) -> tuple[list[ContextRow], list[ArqRow]]:
    """Return contexts and their ARQs in the order of their ids, locked."""
    # ARQs before contexts, as a bind, which starts from the ARQs of a call: else a deadlock.
    lock_of_contexts(tx, ids)
    locked = lock(tx, ids)
    # Read again: another transaction may have replaced the ARQs while this one waited for them.
    return locked, lock_of_contexts(tx, ids)


def postpone_expiry(tx: sa.Connection, ids: Collection[int], expires_at: datetime) -> None:
    """Set the time at which contexts expire, unless they never expire or expire later."""
    # NULL, for a context that never expires, is not less than a time.
    guard = (contexts.c.id.in_(sorted(ids)), contexts.c.expires_at < expires_at)
    tx.execute(
        sa.update(contexts)
        .where(*guard)
        .values(expires_at=expires_at, updated_at=contexts.c.updated_at)
    )


def update(tx: sa.Connection, id_: int, values: Mapping[str, Any]) -> bool:
    """Change an unbound context; return False if it is in another state."""
    # The state is in the guard: a bind between the read of the caller and this UPDATE wins.
    guard = (contexts.c.id == id_, contexts.c.state.in_(sorted(EDITABLE)))
    return bool(tx.execute(sa.update(contexts).where(*guard).values(**values)).rowcount)


def set_arq_groups(tx: sa.Connection, id_: int, groups: Sequence[Mapping[str, str]]) -> None:
    """Replace the group copies of the ARQs of a context, by the number of the group."""
    number, kind = arqs.c.device_profile_group_id, arqs.c.group.type
    copies = {n: sa.literal(dict(group), kind) for n, group in enumerate(groups)}
    group = sa.case(copies, value=number)
    where = (arqs.c.context_id == id_, number < len(groups))
    tx.execute(sa.update(arqs).where(*where).values(group=group, updated_at=arqs.c.updated_at))


def delete(
    tx: sa.Connection, ids: Collection[int], states: Collection[ContextState] = DELETABLE
) -> int:
    """Delete contexts in these states, and their hidden profiles; return how many were deleted.

    The caller has deleted their ARQs.
    """
    guard = (contexts.c.id.in_(sorted(ids)), contexts.c.state.in_(sorted(states)))
    return tx.execute(sa.delete(contexts).where(*guard)).rowcount


def hosts(tx: sa.Connection, providers: Collection[str]) -> dict[str, str]:
    """Return the hosts of providers, by provider uuid; skip providers without a deployable."""
    query = (
        sa.select(deployables.c.rp_uuid, devices.c.host)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(deployables.c.rp_uuid.in_(sorted(providers)))
    )
    return {row[0]: row[1] for row in tx.execute(query)}


# ARQs with the hidden profile of a context that are not those of the context.
_HAS_SUCCESSOR = (
    sa.exists()
    .where(
        device_profiles.c.context_id == contexts.c.id,
        arqs.c.profile_id == device_profiles.c.id,
        arqs.c.context_id.is_(None),
    )
    .correlate(contexts)
)


def expired(tx: sa.Connection, now: datetime, limit: int) -> list[int]:
    """Return the row ids of up to ``limit`` unbound contexts that have expired."""
    query = sa.select(contexts.c.id).where(_is_expired(now)).order_by(contexts.c.expires_at)
    return list(tx.scalars(query.limit(limit)))


def lock_expired(tx: sa.Connection, ids: Collection[int], now: datetime) -> list[ContextRow]:
    """Return those of the contexts that are still expired, locked."""
    query = sa.select(contexts).where(contexts.c.id.in_(sorted(ids)), _is_expired(now))
    return fetch_all(ContextRow, tx.execute(query.order_by(contexts.c.id).with_for_update()))


def _is_expired(now: datetime) -> sa.ColumnElement[bool]:
    unbound = contexts.c.state == ContextState.UNBOUND
    return sa.and_(unbound, contexts.c.expires_at < now, sa.not_(_HAS_SUCCESSOR))


def find_successor(tx: sa.Connection, id_: int) -> SuccessorWorkRow | None:
    """Return the work on the oldest successor of a context; None if no successor has ARQs."""
    query = (
        sa.select(attachments.c.state, attachments.c.step)
        .select_from(arqs)
        .join(device_profiles, device_profiles.c.id == arqs.c.profile_id)
        .outerjoin(attachments, attachments.c.id == arqs.c.attachment_id)
        .where(device_profiles.c.context_id == id_, arqs.c.context_id.is_(None))
        .order_by(arqs.c.id)
        .limit(1)
    )
    return fetch_first(SuccessorWorkRow, tx.execute(query))
