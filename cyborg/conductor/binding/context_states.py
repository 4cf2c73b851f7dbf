# SPDX-License-Identifier: Apache-2.0
"""Keep the state of device contexts equal to what their ARQs imply, in the same transaction.

ARQs are locked before contexts. Concurrent transactions that change different ARQs of one context
wait for each other at the context, so that the last one sees the states of all ARQs.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from cyborg.conductor.binding.claims import Retry
from cyborg.conductor.notifications.notifications import ArqEventRecorder
from cyborg.core.binding.profile import is_for_host
from cyborg.core.contexts.refusals import ContextFailure, make_refusal
from cyborg.core.contexts.states import (
    CONTEXT_LIFE_CYCLE,
    LEASED,
    USABLE,
    ArqFacts,
    ContextState,
    derive_state,
)
from cyborg.core.errors import Conflict, NoHandle, Unavailable, WrongState
from cyborg.core.notification import Event
from cyborg.db.binding.write import ArqRow
from cyborg.db.contexts import write as store
from cyborg.db.outbox import write as outbox

_EVENTS: Mapping[ContextState, Event] = {
    ContextState.RESERVING: Event.CONTEXT_RESERVE_STARTED,
    ContextState.RESERVED: Event.CONTEXT_RESERVED,
    ContextState.BINDING: Event.CONTEXT_BIND_STARTED,
    ContextState.BOUND: Event.CONTEXT_BOUND,
    ContextState.ERROR: Event.CONTEXT_FAILED,
    ContextState.UNBINDING: Event.CONTEXT_UNBIND_STARTED,
    ContextState.CLEANING: Event.CONTEXT_UNBIND_STARTED,
    ContextState.UNBOUND: Event.CONTEXT_UNBOUND,
}


@dataclass(frozen=True, slots=True)
class ContextUser:
    """Who gets device contexts: an instance, or a host if it is None.

    ``projects`` has the new project of each ARQ whose project would change. ``owner_verified`` is
    False if the project of the instance is not known, ``owner_error`` why Placement did not answer.
    """

    instance: str | None
    projects: Mapping[int, str]
    owner_verified: bool
    owner_error: str | None


def claim_contexts(
    tx: sa.Connection,
    rows: Sequence[ArqRow],
    user: ContextUser,
    state: ContextState,
    host: str,
    *,
    check_host: bool,
) -> None:
    """Bind the contexts of locked ARQs to an instance or a host, before handles are claimed.

    Raise what ``lock_contexts`` raises, WrongState if a context is in use or in error, and, with
    ``check_host``, Retry if the agent of the host is down.
    """
    contexts = lock_contexts(tx, rows, user)
    if not contexts:
        return
    instance = user.instance
    changed = store.start_bind(tx, list(contexts), state, host, instance, check_host=check_host)
    if changed != len(contexts):
        # As they were before the UPDATE, which may have changed some of them.
        if used := [row for row in contexts.values() if row["state"] not in USABLE]:
            raise _wrong_state(used)
        raise Retry("the agent of the host of a device context is down")


def lock_contexts(
    tx: sa.Connection, rows: Sequence[ArqRow], user: ContextUser
) -> dict[int, store.ContextRow]:
    """Return the contexts of locked ARQs by row id, locked, if an instance may have them.

    If the project of the instance is not known, raise Unavailable if Placement did not answer,
    otherwise Conflict: it has no allocation. Raise Conflict also if ARQs of a context are missing
    in the call or the instance belongs to another project.
    """
    counts_in_call = _count_by_context(rows)
    if not counts_in_call:
        return {}
    for context_id, count in store.count_arqs(tx, counts_in_call).items():
        if counts_in_call[context_id] != count:
            uuid = ", ".join(row["uuid"] for row in store.lock(tx, [context_id]))
            raise Conflict(
                f"device context {uuid} has {count} ARQs and the call has "
                f"{counts_in_call[context_id]} of them: bind all in one call"
            )
    instance, projects = user.instance, user.projects
    if not user.owner_verified and user.owner_error is None:
        raise Conflict(
            f"Placement has no allocation of instance {instance}, so its project is unknown, and a "
            "device context can only be bound to an instance of its project: let Nova schedule the "
            "server, or give the project_id",
            instance=instance,
        )
    if not user.owner_verified:
        raise Unavailable(
            f"the project of instance {instance} is unknown, since Placement does not answer, and "
            "a device context can only be bound to an instance of its project: retry, or give the "
            "project_id"
        )
    contexts = {context["id"]: context for context in store.lock(tx, counts_in_call)}
    for row in rows:
        if row["context_id"] is None:
            continue
        context, project = contexts[row["context_id"]], projects.get(row["id"], row["project_id"])
        if project != context["project_id"]:
            raise Conflict(
                f"instance {instance} belongs to project {project}, and device context "
                f"{context['uuid']} to project {context['project_id']}",
                instance=instance,
            )
    return contexts


def record_claimed(tx: sa.Connection, rows: Sequence[ArqRow], recorder: ArqEventRecorder) -> None:
    """Record the notifications of contexts that ``claim_contexts`` has bound."""
    if recorder.notifications.enabled and (ids := _count_by_context(rows)):
        record_contexts(tx, store.lock(tx, ids), recorder)


class _StateChange(NamedTuple):
    """The new state of a context, and whether this ends its lease."""

    state: ContextState
    lease_ends: bool


def follow_arqs(
    tx: sa.Connection,
    rows: Sequence[ArqRow],
    recorder: ArqEventRecorder,
    now: datetime,
    failure: ContextFailure | None = None,
) -> None:
    """Set the states of the contexts of ARQs that this transaction has changed.

    ``failure`` is why a bind failed, or why a former handle is not clean. A context that becomes
    unbound does not expire before a new one would.
    """
    if not (ids := _count_by_context(rows)):
        return
    contexts = store.lock(tx, ids)
    states = _derive_states(tx, ids)
    # Contexts with the same change are written together.
    changes = defaultdict[_StateChange, list[store.ContextRow]](list)
    unchanged: list[int] = []
    for context in contexts:
        state = states[context["id"]]
        # A context that has the state already is in none of those that lead to it.
        if context["state"] in CONTEXT_LIFE_CYCLE.to(state).sources:
            lease_ends = context["state"] in LEASED and state not in LEASED
            changes[_StateChange(state, lease_ends)].append(context)
        else:
            unchanged.append(context["id"])
    if failure is not None:
        store.set_failure(tx, unchanged, failure)
    expires_at = expiry(now, recorder.conf.device_contexts.unbound_ttl)
    for change, changed in changes.items():
        state, values = change.state, _values_of(change, failure)
        store.set_state(tx, [context["id"] for context in changed], state, values)
        if state is ContextState.UNBOUND and expires_at is not None:
            _postpone_expiry(tx, changed, expires_at)
        updated: list[Any] = [{**context, "state": state, **values} for context in changed]
        # The state is the same after a failed bind: only the end of a lease distinguishes them.
        failed = change.lease_ends and state is ContextState.ERROR
        record_contexts(tx, updated, recorder, Event.CONTEXT_RESERVE_FAILED if failed else None)


def _derive_states(tx: sa.Connection, ids: Collection[int]) -> dict[int, ContextState]:
    """Return the states of contexts as they follow from their ARQs, by row id."""
    facts: dict[int, list[ArqFacts]] = {id_: [] for id_ in ids}
    for row in store.arq_states(tx, ids):
        has_user = row["instance_uuid"] is not None or is_for_host(row["group"])
        waits = row["job_id"] is not None
        arq = ArqFacts(row["state"], waits_for_job=waits, has_user=has_user)
        facts[row["context_id"]].append(arq)
    return {id_: derive_state(arqs) for id_, arqs in facts.items()}


def _postpone_expiry(
    tx: sa.Connection, contexts: Sequence[store.ContextRow], expires_at: datetime
) -> None:
    due = [
        context["id"]
        for context in contexts
        if context["expires_at"] is not None and context["expires_at"] < expires_at
    ]
    if due:
        store.postpone_expiry(tx, due, expires_at)


def expiry(now: datetime, seconds: float) -> datetime | None:
    """Return when a context that is created or used now expires; None if ``seconds`` is 0."""
    return now + timedelta(seconds=seconds) if seconds else None


def _values_of(change: _StateChange, failure: ContextFailure | None) -> dict[str, Any]:
    """Return the columns that change with the state, other than the state."""
    values: dict[str, Any] = {} if failure is None else {**store.failure_values(failure)}
    if change.state in (ContextState.CLEANING, ContextState.UNBOUND):
        values["instance_uuid"] = None
    if change.state is ContextState.UNBOUND:
        values["hostname"] = None
    if change.lease_ends:
        values["lease_expires_at"] = None
    return values


def record_contexts(
    tx: sa.Connection,
    contexts: Sequence[store.ContextRow],
    recorder: ArqEventRecorder,
    event: Event | None = None,
) -> None:
    """Record the notifications of contexts with a new state, by default that of the state."""
    messages: list[outbox.Message] = []
    for context in contexts:
        context_event = event or _EVENTS[ContextState(context["state"])]
        messages += recorder.notifications.build_messages(context_event, [context])
    outbox.add_all(tx, messages)


def _count_by_context(rows: Sequence[ArqRow]) -> Counter[int]:
    return Counter(context for row in rows if (context := row["context_id"]) is not None)


def _wrong_state(contexts: Collection[store.ContextRow]) -> WrongState:
    reasons = ", ".join(
        f"{row['uuid']} is {row['state']}"
        + (f" (instance {row['instance_uuid']})" if row["instance_uuid"] else "")
        for row in contexts
    )
    return WrongState(
        f"cannot bind: only a device context that owns no handles can be bound, and {reasons}",
        device_contexts=[row["uuid"] for row in contexts],
    )


def record_refusal(
    tx: sa.Connection, no_handle: NoHandle, epochs: Mapping[str, int], now: datetime
) -> None:
    """Keep why handles were refused with the device contexts that are still unbound.

    Call this in a transaction of its own, after the rollback of the refused one. ``epochs`` has the
    epoch, as it was before the call, of the contexts that the call named; others are those of the
    ARQs. A context that has been bound or leased since then is left as it is.
    """
    reasons = no_handle.details["reasons"]
    epochs_by_uuid = dict(epochs) or store.unbound_of_arqs(tx, list(reasons))
    if not epochs_by_uuid:
        return
    providers = {item["provider"] for rejected in reasons.values() for item in rejected}
    refusal = make_refusal(no_handle.message, reasons, store.hosts(tx, providers), now)
    for uuid, epoch in sorted(epochs_by_uuid.items()):
        store.set_refusal(tx, uuid, epoch, refusal)
