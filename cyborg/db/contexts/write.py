# SPDX-License-Identifier: Apache-2.0
"""Write device contexts; each change of a state is one UPDATE with the allowed old states.

Their hidden profiles are deleted with them.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.contexts.refusals import ContextFailure
from cyborg.core.contexts.states import (
    CONTEXT_LIFE_CYCLE,
    DELETABLE,
    EDITABLE,
    LEASED,
    USABLE,
    ContextState,
)
from cyborg.core.hosts import AGENT
from cyborg.db import bulk
from cyborg.db.binding.write import ArqRow, lock_of_contexts
from cyborg.db.contexts import read
from cyborg.db.rows import equal, fetch_all, fetch_first, row_columns
from cyborg.db.schema import arqs, attachments, deployables, device_profiles, devices, services
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
    # Up to a maximum: the cost of a limit does not grow with what the project has.
    counts = [
        sa.select(sa.func.count())
        .select_from(
            sa.select(table.c.id).where(table.c.project_id == project).limit(limit).subquery()
        )
        .scalar_subquery()
        .label(key)
        for key, table, limit in (("contexts", contexts, max_contexts), ("arqs", arqs, max_arqs))
    ]
    usage = fetch_first(ProjectUsageRow, tx.execute(sa.select(*counts)))
    # A SELECT without FROM has one row in any case: the other value is for the type.
    return usage or {"contexts": 0, "arqs": 0}


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
    is_visible = equal({contexts.c.uuid: uuid, contexts.c.project_id: project_scope})
    return fetch_first(ContextRow, tx.execute(sa.select(contexts).where(*is_visible)))


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
    number, group_type = arqs.c.device_profile_group_id, arqs.c.group.type
    copies = {n: sa.literal(dict(group), group_type) for n, group in enumerate(groups)}
    new_group = sa.case(copies, value=number)
    # CASE has no branch for other numbers, and would set their group to NULL.
    where = (arqs.c.context_id == id_, number < len(groups))
    change = sa.update(arqs).where(*where)
    tx.execute(change.values(group=new_group, updated_at=arqs.c.updated_at))


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
    return {row.rp_uuid: row.host for row in tx.execute(query)}


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
    # The ARQs of a successor have the hidden profile of the context, but no context.
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


_NO_FAILURE: Mapping[str, None] = {"error": None, "failure": None}


class ArqStateRow(TypedDict):
    """The state of an ARQ of a context."""

    context_id: int
    state: str
    job_id: int | None
    instance_uuid: str | None
    group: dict[str, str]


def count_arqs(tx: sa.Connection, ids: Collection[int]) -> dict[int, int]:
    """Return the number of ARQs by context. It never changes while the context exists."""
    query = sa.select(arqs.c.context_id, sa.func.count().label("number"))
    query = query.where(arqs.c.context_id.in_(sorted(ids))).group_by(arqs.c.context_id)
    return {row.context_id: row.number for row in tx.execute(query)}


def arq_states(tx: sa.Connection, ids: Collection[int]) -> list[ArqStateRow]:
    """Return the states of the ARQs of contexts, which the caller must have locked."""
    query = sa.select(*row_columns(ArqStateRow, arqs))
    rows = tx.execute(query.where(arqs.c.context_id.in_(sorted(ids))).order_by(arqs.c.id))
    return fetch_all(ArqStateRow, rows)


def group_providers(tx: sa.Connection, id_: int) -> dict[int, str]:
    """Return the provider of each group of a context, by number; skip groups without a provider."""
    query = sa.select(arqs.c.device_profile_group_id, arqs.c.device_rp_uuid)
    query = query.where(arqs.c.context_id == id_, arqs.c.device_rp_uuid.is_not(None))
    return {number: str(provider) for number, provider in tx.execute(query)}


def start_bind(
    tx: sa.Connection,
    ids: Collection[int],
    state: ContextState,
    hostname: str,
    instance: str | None,
    *,
    check_host: bool = False,
) -> int:
    """Bind contexts without a lease to an instance or a host; return how many were changed.

    With ``check_host``, none is bound if the agent of the host is down. ``instance`` is None for a
    host. ``state`` is bound, or binding if host work follows. The epoch rises, as with a lease.
    """
    return bulk.change_state(
        tx,
        contexts,
        CONTEXT_LIFE_CYCLE.to(state, among=USABLE),
        contexts.c.id.in_(sorted(ids)),
        _agent_is_up(hostname) if check_host else sa.true(),
        hostname=hostname,
        instance_uuid=instance,
        # In SQL, not from a value that was read: two binds never get the same epoch.
        epoch=contexts.c.epoch + 1,
        # Once bound, it does not expire any more, unless its user sets a time after the unbind.
        expires_at=None,
        **_NO_FAILURE,
    )


def start_lease(
    tx: sa.Connection,
    id_: int,
    state: ContextState,
    hostname: str,
    epoch: int,
    expires_at: datetime,
) -> bool:
    """Start the lease ``epoch`` of a context.

    Return False if the context has changed, or if the agent of the host is down. ``state`` is
    reserved, or reserving if host work follows. ``expires_at`` is the end of the lease; the time at
    which the unbound context expires does not change.
    """
    changed = bulk.change_state(
        tx,
        contexts,
        CONTEXT_LIFE_CYCLE.to(state, among=USABLE),
        contexts.c.id == id_,
        contexts.c.epoch == epoch - 1,
        _agent_is_up(hostname),
        hostname=hostname,
        instance_uuid=None,
        epoch=epoch,
        lease_expires_at=expires_at,
        **_NO_FAILURE,
    )
    return bool(changed)


def renew_lease(
    tx: sa.Connection, id_: int, epoch: int, expires_at: datetime, now: datetime
) -> bool:
    """Set the end of a lease; return False if it has another epoch or has ended."""
    guard = (
        contexts.c.id == id_,
        contexts.c.state.in_(sorted(LEASED)),
        contexts.c.epoch == epoch,
        contexts.c.lease_expires_at > now,
    )
    # The time is in the guard: a lease that has ended may not have been swept yet.
    change = sa.update(contexts).where(*guard).values(lease_expires_at=expires_at)
    return bool(tx.execute(change).rowcount)


def consume_lease(
    tx: sa.Connection,
    id_: int,
    state: ContextState,
    instance: str,
    epoch: int | None,
    now: datetime,
) -> bool:
    """Bind a context with a lease to an instance; return False if it has no such lease.

    ``state`` is bound, or binding while the host prepares the devices. ``epoch`` is None for a
    caller that does not know it.
    """
    changed = bulk.change_state(
        tx,
        contexts,
        CONTEXT_LIFE_CYCLE.to(state, among=LEASED),
        contexts.c.id == id_,
        contexts.c.lease_expires_at > now,
        sa.true() if epoch is None else contexts.c.epoch == epoch,
        instance_uuid=instance,
        expires_at=None,
        lease_expires_at=None,
        **_NO_FAILURE,
    )
    return bool(changed)


def expired_leases(tx: sa.Connection, now: datetime, after: int, limit: int) -> list[int]:
    """Return up to ``limit`` row ids, above ``after``, of contexts whose lease has ended."""
    # Without locks: ARQs are locked before contexts, and only these ids tell which ARQs.
    query = sa.select(contexts.c.id).where(*_lease_ended(now), contexts.c.id > after)
    return list(tx.scalars(query.order_by(contexts.c.id).limit(limit)))


def lock_expired_leases(tx: sa.Connection, ids: Collection[int], now: datetime) -> list[int]:
    """Return those of the contexts whose lease has still ended, locked."""
    query = sa.select(contexts.c.id).where(contexts.c.id.in_(sorted(ids)), *_lease_ended(now))
    return list(tx.scalars(query.order_by(contexts.c.id).with_for_update()))


def set_state(
    tx: sa.Connection, ids: Collection[int], state: ContextState, values: dict[str, Any]
) -> int:
    """Change contexts to a state from the states that lead to it; return how many were changed."""
    transition = CONTEXT_LIFE_CYCLE.to(state)
    return bulk.change_state(tx, contexts, transition, contexts.c.id.in_(sorted(ids)), **values)


def set_failure(tx: sa.Connection, ids: Collection[int], failure: ContextFailure) -> None:
    """Record a failure that does not change the state of the contexts."""
    if ids:
        guard = contexts.c.id.in_(sorted(ids))
        tx.execute(sa.update(contexts).where(guard).values(**failure_values(failure)))


class FailureValues(TypedDict):
    """The columns of a failure of a context: its text, and ``ContextFailure.to_dict``."""

    error: str
    failure: dict[str, Any]


def failure_values(failure: ContextFailure) -> FailureValues:
    """Return the columns of a failure of a context."""
    return {"error": failure.text, "failure": failure.to_dict()}


def unbound_of_arqs(tx: sa.Connection, arq_uuids: Collection[str]) -> dict[str, int]:
    """Return the epochs of the unbound contexts that have these ARQs, by uuid, without a lock."""
    query = (
        sa.select(contexts.c.uuid, contexts.c.epoch)
        .join(arqs, arqs.c.context_id == contexts.c.id)
        .where(arqs.c.uuid.in_(sorted(arq_uuids)), contexts.c.state == ContextState.UNBOUND)
    )
    return {row.uuid: row.epoch for row in tx.execute(query)}


def set_refusal(tx: sa.Connection, uuid: str, epoch: int, failure: ContextFailure) -> bool:
    """Record why a context was refused; return False if it has been used since ``epoch``."""
    guard = (
        contexts.c.uuid == uuid,
        # Each use has an epoch of its own: without it, an old reason could follow a later bind.
        contexts.c.epoch == epoch,
        contexts.c.state == ContextState.UNBOUND,
    )
    change = sa.update(contexts).where(*guard).values(**failure_values(failure))
    return bool(tx.execute(change).rowcount)


def _agent_is_up(hostname: str) -> sa.ColumnElement[bool]:
    """Return the condition that the agent of a host is not marked down.

    It is part of the change of the context, which comes before that of the handles: a report locks
    its agent before handles too.
    """
    return sa.not_(
        sa.exists(
            sa.select(services.c.id).where(
                services.c.host == hostname,
                services.c.binary == AGENT,
                services.c.down_since.is_not(None),
            )
        )
    )


def _lease_ended(now: datetime) -> tuple[sa.ColumnElement[bool], ...]:
    return contexts.c.state.in_(sorted(LEASED)), contexts.c.lease_expires_at <= now
