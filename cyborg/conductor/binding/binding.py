# SPDX-License-Identifier: Apache-2.0
"""Bind all ARQs of one call to one instance, or to their host, within one transaction.

Two concurrent calls for one instance cannot both succeed. The first UPDATE of a call reserves slots
of the instance, numbered from 0. A slot is unique in the schema, so the second call waits for the
first and then fails on the unique key. A call that starts later finds the ARQs of the first call.
In both cases the error is Conflict, even if handles are free.

If one of the devices must be prepared on its host, all the ARQs become BindStarted and wait for one
job; then all are Bound or all are BindFailed. Errors that do not come from host work are raised by
``bind``.

The ARQs of a device context with a lease own their handles already: the bind gives them the
instance.
"""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.conductor.binding import leases
from cyborg.conductor.binding.claim_plan import BindContext, BindResult, claim_planned, make_plan
from cyborg.conductor.binding.claims import Retry, check_available
from cyborg.conductor.binding.context_states import claim_contexts, lock_contexts
from cyborg.conductor.binding.limits import check_bind
from cyborg.core.binding.arqs import BindRequest, arqs_not_found
from cyborg.core.binding.states import ArqState, Step, source_states
from cyborg.core.errors import Conflict, WrongState
from cyborg.db.binding import write as store
from cyborg.db.jobs import write as jobs

SLOTS_TAKEN = "a concurrent bind for the instance has taken the next slots"


def bind(
    tx: sa.Connection,
    bind_requests: Sequence[BindRequest],
    scope: str | None,
    context: BindContext,
    *,
    wait: bool,
    append: bool = False,
    subject: str | None = None,
) -> BindResult:
    """Bind all the ARQs or raise.

    Requests without an instance, of an attachment to a host, use no slot. ``subject`` is that of
    the job on the host, by default the instance.

    With ``append``, the ARQs get slots after those of the other ARQs of the instance; without it,
    such other ARQs are a conflict, except those that an attachment hides from Nova. Without
    ``wait``, skip handles that other transactions have locked, and raise Retry if too few
    remain. With ``wait``, wait for these locks, and raise NoHandle if too few are free. Raise
    NotFound, WrongState, Conflict, OverLimit, NoHandle, Retry, Unavailable, and
    ProjectsMissing of ``limits``.
    """
    requests_by_uuid = {item.request: item for item in bind_requests}
    instance = bind_requests[0].instance_uuid
    rows = store.lock_to_bind(tx, sorted(requests_by_uuid), instance, scope)
    if missing := sorted(set(requests_by_uuid) - {row["uuid"] for row in rows}):
        raise arqs_not_found(missing)
    todo = [
        row
        for row in rows
        if not _is_bound_as_requested(row, requests_by_uuid[row["uuid"]], context)
    ]
    if not todo:
        return BindResult()
    is_leased = any(leases.is_leased(row) for row in todo)
    for row in () if is_leased else todo:
        _check_state(tx, row)
    if rows[0]["other_arqs"] and not append:
        raise _instance_conflict(tx, instance, sorted(requests_by_uuid))
    if is_leased:
        return _consume_lease(tx, rows, todo, requests_by_uuid, context, append=append)
    providers = {uuid: item.device_rp_uuid for uuid, item in requests_by_uuid.items()}
    plan = make_plan(tx, todo, bind_requests[0].hostname, providers, for_host=instance is None)
    if context.check_host:
        check_available(tx, plan.demands)
    projects = _changed_projects(todo, requests_by_uuid, context)
    if context.limits is not None:
        units = [(projects.get(r["id"], r["project_id"]), r["resource_class"]) for r in todo]
        check_bind(tx, units, context.limits)
    verified = _is_verified(todo, requests_by_uuid, context)
    claim_contexts(
        tx,
        todo,
        projects,
        host=bind_requests[0].hostname,
        instance=instance,
        host_work=bool(plan.to_prepare),
        owner_verified=verified,
        owner_error=context.owner_error,
        check_host=context.check_host,
    )
    first_slot = _first_slot(tx, rows, instance, append=append)
    try:
        _reserve_instance_slots(
            tx, todo, requests_by_uuid, plan.state, projects, verified, first_slot
        )
    except Conflict:
        if append:  # a concurrent bind has the slots: the next attempt gets later ones
            raise Retry(SLOTS_TAKEN) from None
        raise
    updated: list[store.ArqToBindRow] = [
        {
            **row,
            "state": plan.state,
            "hostname": bind_requests[0].hostname,
            "instance_uuid": instance,
            "device_rp_uuid": requests_by_uuid[row["uuid"]].device_rp_uuid,
            "project_id": projects.get(row["id"], row["project_id"]),
        }
        for row in todo
    ]
    job_subject = subject or instance or ""
    claim_planned(
        tx, todo, updated, plan, context, instance=instance, subject=job_subject, wait=wait
    )
    return BindResult(updated, bool(plan.to_prepare))


def _consume_lease(
    tx: sa.Connection,
    rows: Sequence[store.ArqToBindRow],
    todo: Sequence[store.ArqToBindRow],
    requests_by_uuid: Mapping[str, BindRequest],
    context: BindContext,
    *,
    append: bool,
) -> BindResult:
    """Bind the ARQs of a device context with a lease: they own the handles already.

    Their units were counted when the lease began. Raise Conflict, WrongState, Unavailable, and
    Retry with ``append``.
    """
    instance = requests_by_uuid[todo[0]["uuid"]].instance_uuid
    if instance is None:
        raise WrongState("a device context with a lease can only be bound to an instance")
    leases.check_target(todo, requests_by_uuid)
    projects = _changed_projects(todo, requests_by_uuid, context)
    verified = _is_verified(todo, requests_by_uuid, context)
    found = lock_contexts(
        tx,
        todo,
        projects,
        instance=instance,
        owner_verified=verified,
        owner_error=context.owner_error,
    )
    leases.check_allocated(todo, instance, context.allocated)
    first_slot = _first_slot(tx, rows, instance, append=append)
    try:
        return leases.consume(tx, todo, found, instance, first_slot, context)
    except db_exc.DBDuplicateEntry as exc:
        if append:  # a concurrent bind has the slots: the next attempt gets later ones
            raise Retry(SLOTS_TAKEN) from None
        raise Conflict(
            f"instance {instance} already has other accelerator requests", instance=instance
        ) from exc


def _is_verified(
    todo: Sequence[store.ArqToBindRow],
    requests_by_uuid: Mapping[str, BindRequest],
    context: BindContext,
) -> bool:
    """Return whether the project of the instance is known: in Placement, or from the requests."""
    return context.owner_verified or all(
        requests_by_uuid[row["uuid"]].project_id is not None for row in todo
    )


def _first_slot(
    tx: sa.Connection, rows: Sequence[store.ArqToBindRow], instance: str | None, *, append: bool
) -> int:
    """Return the first free slot of an instance, after those of its other ARQs."""
    if instance is None:
        return 0  # not used
    used_slots = [row["instance_slot"] for row in rows if row["instance_slot"] is not None]
    if append:
        used_slots.append(store.last_slot(tx, instance))
    elif (hidden_slot := rows[0]["hidden_slot"]) is not None:
        used_slots.append(hidden_slot)
    return max(used_slots, default=-1) + 1


def _is_bound_as_requested(
    row: store.ArqToBindRow, bind_request: BindRequest, context: BindContext
) -> bool:
    """Return whether an earlier, equal request has bound, or is binding, the ARQ."""
    return (
        row["state"] in (ArqState.BOUND, ArqState.BIND_STARTED)
        and row["hostname"] == bind_request.hostname
        and row["device_rp_uuid"] == bind_request.device_rp_uuid
        and row["instance_uuid"] == bind_request.instance_uuid
        and bind_request.project_id in (None, context.project, row["project_id"])
    )


def _check_state(tx: sa.Connection, row: store.ArqToBindRow) -> None:
    allowed = source_states(Step.START)
    if row["state"] in allowed:
        return
    reason = f"expected one of {', '.join(allowed)}"
    if row["state"] == ArqState.UNBIND_FAILED:
        reason = "because its last handle is not clean; wait until it is Unbound, or create another"
        if (job := jobs.get_by_id(tx, row["job_id"] or 0)) is not None:
            reason += f": host {job['host']}, job {job['uuid']}: {job['error']}"
    raise WrongState(
        f"cannot bind ARQ {row['uuid']} in state {row['state']}, {reason}",
        request=row["uuid"],
        state=row["state"],
    )


def _instance_conflict(tx: sa.Connection, instance: str | None, uuids: Sequence[str]) -> Conflict:
    others = store.other_arqs_of_instance(tx, instance or "", uuids)
    conflicting = ", ".join(f"{row['uuid']} ({row['state']})" for row in others)
    return Conflict(
        f"instance {instance} already has other accelerator requests: {conflicting}",
        instance=instance,
        requests=[row["uuid"] for row in others],
    )


def _changed_projects(
    todo: Sequence[store.ArqToBindRow],
    requests_by_uuid: Mapping[str, BindRequest],
    context: BindContext,
) -> dict[int, str]:
    """Return the new project of each ARQ whose project changes, by row id.

    The project of the instance in Placement takes precedence over the project in the request.
    """
    projects = {
        row["id"]: context.project or requests_by_uuid[row["uuid"]].project_id for row in todo
    }
    return {
        row["id"]: project
        for row in todo
        if (project := projects[row["id"]]) is not None and project != row["project_id"]
    }


def _reserve_instance_slots(
    tx: sa.Connection,
    todo: Sequence[store.ArqToBindRow],
    requests_by_uuid: Mapping[str, BindRequest],
    state: ArqState,
    projects: Mapping[int, str],
    owner_verified: bool,
    first_slot: int,
) -> None:
    """Set state and slot of the ARQs; afterwards no other call can bind for the same instance."""
    first = requests_by_uuid[todo[0]["uuid"]]
    instance = first.instance_uuid
    try:
        changed = store.bind(
            tx,
            providers={row["id"]: requests_by_uuid[row["uuid"]].device_rp_uuid for row in todo},
            projects=projects,
            hostname=first.hostname,
            instance=instance,
            first_slot=first_slot,
            state=state,
            owner_verified=owner_verified,
        )
    except db_exc.DBDuplicateEntry as exc:
        raise Conflict(
            f"instance {instance} already has other accelerator requests", instance=instance
        ) from exc
    if changed != len(todo):
        raise Retry("an ARQ, or the agent of its host, has changed")
