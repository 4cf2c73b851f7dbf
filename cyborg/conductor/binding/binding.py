# SPDX-License-Identifier: Apache-2.0
"""Bind all ARQs of one call to one instance, or to their host, within one transaction.

Two concurrent calls for one instance cannot both succeed. The first UPDATE of a call reserves slots
of the instance, numbered from 0. A slot is unique in the schema, so the second call waits for the
first and then fails on the unique key. A call that starts later finds the ARQs of the first call.
In both cases the error is Conflict, even if handles are free.

If one of the devices must be prepared on its host, all the ARQs become BindStarted and wait for one
job; then all are Bound or all are BindFailed. Errors that do not come from host work are raised by
``bind``.

A lease of a device context claims the handles of all its ARQs without an instance, or none: they
are BindStarted or Bound as after a bind. A bind gives them their instance, while the lease lasts.
The epoch of a context rises with each lease. It is the fencing token: a caller with an earlier
epoch can neither renew nor bind.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.conductor.binding.claim_plan import BindContext, BindResult, claim_planned, make_plan
from cyborg.conductor.binding.claims import Retry, check_available
from cyborg.conductor.binding.context_states import ContextUser, claim_contexts, lock_contexts
from cyborg.conductor.binding.limits import check_bind
from cyborg.conductor.custody import entries
from cyborg.core.binding.arqs import BindRequest, arqs_not_found
from cyborg.core.binding.profile import is_for_host
from cyborg.core.binding.states import OWNING_STATES, ArqState, Step, source_states
from cyborg.core.contexts.leases import stale_lease
from cyborg.core.contexts.states import ContextState
from cyborg.core.errors import Conflict, WrongState
from cyborg.db.binding import write as store
from cyborg.db.contexts import write as contexts
from cyborg.db.jobs import write as jobs

SLOTS_TAKEN = "a concurrent bind for the instance has taken the next slots"


@dataclass(frozen=True, slots=True)
class _Call:
    """The ARQs of one call, locked; ``todo`` are those that are not bound as requested."""

    tx: sa.Connection
    rows: Sequence[store.ArqToBindRow]
    todo: Sequence[store.ArqToBindRow]
    requests: Mapping[str, BindRequest]
    context: BindContext
    append: bool

    @property
    def first(self) -> BindRequest:
        """Return a request: all have the same host and instance."""
        return self.requests[self.todo[0]["uuid"]]

    @property
    def instance(self) -> str | None:
        """Return the instance, None for an attachment to a host."""
        return self.first.instance_uuid

    @property
    def providers(self) -> dict[int, str]:
        """Return the requested provider of each ARQ, by row id."""
        return {row["id"]: self.requests[row["uuid"]].device_rp_uuid for row in self.todo}

    @property
    def owner_verified(self) -> bool:
        """Return whether the project of the instance is known: from Placement, or the requests."""
        return self.context.owner_verified or all(
            self.requests[row["uuid"]].project_id is not None for row in self.todo
        )

    @property
    def user(self) -> ContextUser:
        """Return what decides whether the instance may have device contexts."""
        return ContextUser(
            self.instance, self.projects, self.owner_verified, self.context.owner_error
        )

    @property
    def projects(self) -> dict[int, str]:
        """Return the new project of each ARQ whose project changes, by row id."""
        return {
            row["id"]: project
            for row in self.todo
            if (project := self.project_of(row)) is not None and project != row["project_id"]
        }

    def project_of(self, row: store.ArqToBindRow) -> str | None:
        """Return the project of an ARQ after the bind."""
        # What Placement says of the instance is no claim of the caller, so it comes first.
        project = self.context.project or self.requests[row["uuid"]].project_id
        return row["project_id"] if project is None else project

    def first_slot(self) -> int:
        """Return the first free slot of an instance, after those of its other ARQs."""
        if self.instance is None:
            return 0  # not used
        used = [row["instance_slot"] for row in self.rows if row["instance_slot"] is not None]
        if self.append:
            used.append(store.last_slot(self.tx, self.instance))
        # ARQs that an attachment hides from Nova are no conflict, but have slots. The query returns
        # their last slot in each row.
        elif (hidden_slot := self.rows[0]["hidden_slot"]) is not None:
            used.append(hidden_slot)
        return max(used, default=-1) + 1

    def slot_error(self) -> Conflict | Retry:
        """Return the error if a concurrent bind for the instance has the same slots."""
        if self.append:
            return Retry(SLOTS_TAKEN)  # the next attempt gets later ones
        return Conflict(
            f"instance {self.instance} already has other accelerator requests",
            instance=self.instance,
        )


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

    ``scope`` is the only project whose ARQs the caller may bind, None for all projects: other ARQs
    do not exist for the caller. Requests without an instance, of an attachment to a host, use no
    slot. ``subject`` is that of the job on the host, by default the instance.

    With ``append``, the ARQs get slots after those of the other ARQs of the instance; without it,
    such other ARQs are a conflict, except those that an attachment hides from Nova. Without
    ``wait``, skip handles that other transactions have locked, and raise Retry if too few
    remain. With ``wait``, wait for these locks, and raise NoHandle if too few are free. Raise
    NotFound, WrongState, Conflict, OverLimit, NoHandle, Retry, Unavailable, and
    ProjectsMissing of ``limits``.
    """
    requests = {item.request: item for item in bind_requests}
    instance = bind_requests[0].instance_uuid
    rows = store.lock_to_bind(tx, sorted(requests), instance, scope)
    if missing := sorted(set(requests) - {row["uuid"] for row in rows}):
        raise arqs_not_found(missing)
    todo = [row for row in rows if not _is_bound_as_requested(row, requests[row["uuid"]], context)]
    if not todo:
        return BindResult()  # a repeated call
    has_lease = any(is_leased(row) for row in todo)
    # With a lease the state of the context decides, which ``_consume_lease`` compares.
    if not has_lease:
        for row in todo:
            _check_state(tx, row)
    # The same for each row: the query asks it of the instance.
    has_other_arqs = rows[0]["other_arqs"]
    if has_other_arqs and not append:
        raise _instance_conflict(tx, instance, sorted(requests))
    call = _Call(tx=tx, rows=rows, todo=todo, requests=requests, context=context, append=append)
    if has_lease:
        return _consume_lease(call)
    return _claim(call, wait=wait, subject=subject or instance or "")


def _claim(call: _Call, *, wait: bool, subject: str) -> BindResult:
    """Bind ARQs that own no handles: check, reserve the slots of the instance, claim handles."""
    tx = call.tx
    todo = call.todo
    context = call.context
    hostname = call.first.hostname
    provider_by_uuid = {uuid: item.device_rp_uuid for uuid, item in call.requests.items()}
    plan = make_plan(tx, todo, hostname, provider_by_uuid, for_host=call.instance is None)
    if context.check_host:
        check_available(tx, plan.demands)
    if context.limits is not None:
        units = [(call.project_of(row), row["resource_class"]) for row in todo]
        check_bind(tx, units, context.limits)
    # Locks are taken in one order: ARQs (by the caller), projects, contexts, slots, handles. The
    # slots come before the handles: then two binds for one instance never claim for both.
    context_state = ContextState.BINDING if plan.to_prepare else ContextState.BOUND
    claim_contexts(tx, todo, call.user, context_state, hostname, check_host=context.check_host)
    _reserve_instance_slots(call, plan.state)
    updated = _updated_rows(call, plan.state)
    claim_planned(
        tx,
        rows=todo,
        updated=updated,
        plan=plan,
        context=context,
        instance=call.instance,
        subject=subject,
        wait=wait,
    )
    return BindResult(
        arqs=updated, host_work_pending=bool(plan.to_prepare), providers=len(plan.sets)
    )


def _updated_rows(call: _Call, state: ArqState) -> list[store.ArqToBindRow]:
    """Return the rows of the ARQs to bind with the values that the bind writes."""
    return [
        {
            **row,
            "state": state,
            "hostname": call.first.hostname,
            "instance_uuid": call.instance,
            "device_rp_uuid": call.requests[row["uuid"]].device_rp_uuid,
            "project_id": call.project_of(row),
        }
        for row in call.todo
    ]


def _consume_lease(call: _Call) -> BindResult:
    """Give the ARQs of a device context with a lease, which own the handles, their instance.

    Their units were counted when the lease began. Raise Conflict, Unavailable, WrongState if the
    lease has ended or has another epoch, and Retry with ``append``.
    """
    tx = call.tx
    rows = call.todo
    instance = call.instance
    context = call.context
    if instance is None:
        raise WrongState("a device context with a lease can only be bound to an instance")
    _check_target(rows, call.requests)
    # One, since ``_check_target`` requires it; and the owner of the instance is verified.
    (device_context,) = lock_contexts(tx, rows, call.user).values()
    _check_allocated(rows, instance, context.allocated)
    pending = any(row["state"] == ArqState.BIND_STARTED for row in rows)
    context_state = ContextState.BINDING if pending else ContextState.BOUND
    if not contexts.consume_lease(
        tx, device_context["id"], context_state, instance, context.epoch, context.now
    ):
        raise stale_lease(
            device_context["uuid"],
            device_context["state"],
            device_context["epoch"],
            given=context.epoch,
        )
    ids = [row["id"] for row in rows]
    try:
        changed = store.assign_instance(
            tx, ids, instance=instance, first_slot=call.first_slot(), owner_verified=True
        )
    except db_exc.DBDuplicateEntry as exc:
        raise call.slot_error() from exc
    if changed != len(ids):
        raise Retry("an ARQ of the lease has changed")
    updated: list[store.ArqToBindRow] = [{**row, "instance_uuid": instance} for row in rows]
    entries.record_assigned(tx, updated, context.now)
    return BindResult(arqs=updated, host_work_pending=pending)


def _is_bound_as_requested(
    row: store.ArqToBindRow, bind_request: BindRequest, context: BindContext
) -> bool:
    """Return whether an earlier, equal request has bound, or is binding, the ARQ.

    The project of the request, if it has one, must be that of the instance or of the ARQ.
    """
    return (
        row["state"] in (ArqState.BOUND, ArqState.BIND_STARTED)
        and row["hostname"] == bind_request.hostname
        and row["device_rp_uuid"] == bind_request.device_rp_uuid
        and row["instance_uuid"] == bind_request.instance_uuid
        and bind_request.project_id in (None, context.project, row["project_id"])
    )


def _check_state(tx: sa.Connection, row: store.ArqToBindRow) -> None:
    """Raise WrongState, with what prevents it, if an ARQ cannot be bound."""
    allowed = source_states(Step.START)
    if row["state"] in allowed:
        return
    reason = f"expected one of {', '.join(allowed)}"
    if row["state"] == ArqState.UNBIND_FAILED:
        reason = "because its last handle is not clean; wait until it is Unbound, or create another"
        # No job has the id 0.
        if (job := jobs.get_by_id(tx, row["job_id"] or 0)) is not None:
            reason += f": host {job['host']}, job {job['uuid']}: {job['error']}"
    raise WrongState(
        f"cannot bind ARQ {row['uuid']} in state {row['state']}, {reason}",
        request=row["uuid"],
        state=row["state"],
    )


def _instance_conflict(tx: sa.Connection, instance: str | None, uuids: Sequence[str]) -> Conflict:
    # Only for the error: the query of each bind returns whether there are others, not which.
    others = store.other_arqs_of_instance(tx, instance or "", uuids)
    conflicting = ", ".join(f"{row['uuid']} ({row['state']})" for row in others)
    return Conflict(
        f"instance {instance} already has other accelerator requests: {conflicting}",
        instance=instance,
        requests=[row["uuid"] for row in others],
    )


def _reserve_instance_slots(call: _Call, state: ArqState) -> None:
    """Set state and slot of the ARQs; afterwards no other call can bind for the same instance."""
    try:
        changed = store.bind(
            call.tx,
            providers=call.providers,
            projects=call.projects,
            hostname=call.first.hostname,
            instance=call.instance,
            first_slot=call.first_slot(),
            state=state,
            owner_verified=call.owner_verified,
        )
    except db_exc.DBDuplicateEntry as exc:
        # The unique key of instance and slot decides, not a query before the write.
        raise call.slot_error() from exc
    if changed != len(call.todo):
        raise Retry("an ARQ has changed")


def is_leased(row: store.ArqRow) -> bool:
    """Return whether an ARQ owns a handle under the lease of its device context."""
    has_handle = row["state"] in OWNING_STATES and not is_for_host(row["group"])
    return has_handle and row["instance_uuid"] is None and row["context_id"] is not None


def reserve(
    tx: sa.Connection,
    device_context: contexts.ContextRow,
    rows: Sequence[store.ArqRow],
    hostname: str,
    providers: Sequence[str],
    expires_at: datetime,
    context: BindContext,
    *,
    wait: bool,
) -> BindResult:
    """Start the next lease of a locked context; ``rows`` are all its ARQs, which own no handle.

    ``providers`` has the provider of each group, by its number. Raise NotFound, OverLimit,
    NoHandle, Retry, and ProjectsMissing of ``limits``.
    """
    provider_by_uuid = {row["uuid"]: providers[row["device_profile_group_id"]] for row in rows}
    plan = make_plan(tx, rows, hostname, provider_by_uuid)
    check_available(tx, plan.demands)
    if context.limits is not None:
        units = [(row["project_id"], row["resource_class"]) for row in rows]
        check_bind(tx, units, context.limits)
    context_state = ContextState.RESERVING if plan.to_prepare else ContextState.RESERVED
    # In the guarded UPDATE, which compares the former epoch: of two callers one gets this lease.
    epoch = device_context["epoch"] + 1
    if not contexts.start_lease(
        tx, device_context["id"], context_state, hostname, epoch, expires_at
    ):
        raise Retry("the device context, or the agent of the host, has changed")
    changed = store.bind(
        tx,
        providers={row["id"]: provider_by_uuid[row["uuid"]] for row in rows},
        projects={},
        hostname=hostname,
        instance=None,
        first_slot=0,
        state=plan.state,
        owner_verified=True,
    )
    if changed != len(rows):
        raise Retry("an ARQ of the device context has changed")
    updated: list[store.ArqRow] = [
        {
            **row,
            "state": plan.state,
            "hostname": hostname,
            "instance_uuid": None,
            "device_rp_uuid": provider_by_uuid[row["uuid"]],
        }
        for row in rows
    ]
    claim_planned(
        tx,
        rows=rows,
        updated=updated,
        plan=plan,
        context=context,
        instance=None,
        subject=device_context["uuid"],
        wait=wait,
    )
    return BindResult(
        arqs=updated, host_work_pending=bool(plan.to_prepare), providers=len(plan.sets)
    )


def _check_target(
    rows: Sequence[store.ArqRow], requests_by_uuid: Mapping[str, BindRequest]
) -> None:
    """Raise Conflict unless the ARQs are bound to the host and the providers of their lease."""
    if not all(is_leased(row) for row in rows) or len({row["context_id"] for row in rows}) != 1:
        raise Conflict(
            "the ARQs of a device context with a lease must be bound in a call of their own"
        )
    for row in rows:
        request = requests_by_uuid[row["uuid"]]
        if (row["hostname"], row["device_rp_uuid"]) != (request.hostname, request.device_rp_uuid):
            raise Conflict(
                f"ARQ {row['uuid']} has a lease for host {row['hostname']} and resource provider "
                f"{row['device_rp_uuid']}, it cannot be bound to host {request.hostname} and "
                f"provider {request.device_rp_uuid}: use those of the lease, or unbind its device "
                "context first",
                request=row["uuid"],
                hostname=row["hostname"],
                provider=row["device_rp_uuid"],
            )


def _check_allocated(
    rows: Sequence[store.ArqRow], instance: str, allocated: Mapping[str, int] | None
) -> None:
    """Raise Conflict unless Placement has allocated the units of the lease to the instance.

    Otherwise Placement would offer the units to another server, and the orphan collector would
    unbind the ARQs later. ``allocated`` has the units by provider, None if they are not known.
    """
    if allocated is None:
        return
    for provider, units in sorted(Counter(row["device_rp_uuid"] for row in rows).items()):
        if (count := allocated.get(str(provider), 0)) < units:
            raise Conflict(
                f"Placement has allocated {count} of {units} units of resource provider {provider} "
                f"to instance {instance}: allocate the units of the lease to the instance, then "
                "bind again",
                instance=instance,
                provider=provider,
            )
