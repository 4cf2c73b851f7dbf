# SPDX-License-Identifier: Apache-2.0
"""Write the states of device contexts: each change is one UPDATE with the allowed old states."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.contexts.refusals import ContextFailure
from cyborg.core.contexts.states import (
    CONTEXT_LIFE_CYCLE,
    LEASED,
    USABLE,
    ContextState,
)
from cyborg.core.hosts import AGENT
from cyborg.db.life_cycle import change_state
from cyborg.db.rows import fetch_all
from cyborg.db.schema import arqs, services
from cyborg.db.schema import device_contexts as contexts

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
    query = sa.select(arqs.c.context_id, sa.func.count()).where(arqs.c.context_id.in_(sorted(ids)))
    return {row[0]: row[1] for row in tx.execute(query.group_by(arqs.c.context_id))}


def arq_states(tx: sa.Connection, ids: Collection[int]) -> list[ArqStateRow]:
    """Return the states of the ARQs of contexts, which the caller must have locked."""
    query = sa.select(*(arqs.c[name] for name in ArqStateRow.__annotations__))
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
    return change_state(
        tx,
        contexts,
        CONTEXT_LIFE_CYCLE.to(state, among=USABLE),
        contexts.c.id.in_(sorted(ids)),
        _agent_is_up(hostname) if check_host else sa.true(),
        hostname=hostname,
        instance_uuid=instance,
        # In SQL, not from a value that was read: two binds never get the same epoch.
        epoch=contexts.c.epoch + 1,
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
    changed = change_state(
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
    changed = change_state(
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
    return change_state(tx, contexts, transition, contexts.c.id.in_(sorted(ids)), **values)


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
    """Return the columns of a failure."""
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
