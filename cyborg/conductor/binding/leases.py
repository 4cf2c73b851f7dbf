# SPDX-License-Identifier: Apache-2.0
"""Lease of a device context: claim the handles of all its ARQs without an instance, or none.

The ARQs are BindStarted or Bound as after a bind, and have no instance. A bind gives them their
instance, while the lease lasts. The epoch of a context rises with each lease. It is the fencing
token: a caller with an earlier epoch can neither renew nor bind.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime

import sqlalchemy as sa

from cyborg.conductor.binding.claim_plan import BindContext, BindResult, claim_planned, make_plan
from cyborg.conductor.binding.claims import Retry, check_available
from cyborg.conductor.binding.limits import check_bind
from cyborg.conductor.custody import entries
from cyborg.core.binding.arqs import BindRequest
from cyborg.core.binding.profile import is_for_host
from cyborg.core.binding.states import OWNING_STATES, ArqState
from cyborg.core.contexts.leases import stale_lease
from cyborg.core.contexts.states import ContextState
from cyborg.core.errors import Conflict
from cyborg.db.binding import write as store
from cyborg.db.contexts import write as contexts


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
    by_arq = {row["uuid"]: providers[row["device_profile_group_id"]] for row in rows}
    plan = make_plan(tx, rows, hostname, by_arq)
    check_available(tx, plan.demands)
    if context.limits is not None:
        units = [(row["project_id"], row["resource_class"]) for row in rows]
        check_bind(tx, units, context.limits)
    state = ContextState.RESERVING if plan.to_prepare else ContextState.RESERVED
    # In the guarded UPDATE, which compares the former epoch: of two callers one gets this lease.
    epoch = device_context["epoch"] + 1
    if not contexts.start_lease(tx, device_context["id"], state, hostname, epoch, expires_at):
        raise Retry("the device context, or the agent of the host, has changed")
    changed = store.bind(
        tx,
        providers={row["id"]: by_arq[row["uuid"]] for row in rows},
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
            "device_rp_uuid": by_arq[row["uuid"]],
        }
        for row in rows
    ]
    subject = device_context["uuid"]
    claim_planned(tx, rows, updated, plan, context, instance=None, subject=subject, wait=wait)
    return BindResult(updated, bool(plan.to_prepare))


def check_target(rows: Sequence[store.ArqRow], requests_by_uuid: Mapping[str, BindRequest]) -> None:
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


def check_allocated(
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


def consume(
    tx: sa.Connection,
    rows: Sequence[store.ArqRow],
    device_contexts: Mapping[int, contexts.ContextRow],
    instance: str,
    first_slot: int,
    context: BindContext,
) -> BindResult:
    """Give the ARQs of a locked context with a lease their instance.

    Raise WrongState if the lease has ended or has another epoch, and oslo.db's DBDuplicateEntry if
    a concurrent bind for the instance uses the same slots.
    """
    (device_context,) = device_contexts.values()
    pending = any(row["state"] == ArqState.BIND_STARTED for row in rows)
    state = ContextState.BINDING if pending else ContextState.BOUND
    if not contexts.consume_lease(
        tx, device_context["id"], state, instance, context.epoch, context.now
    ):
        raise stale_lease(
            device_context["uuid"], device_context["state"], device_context["epoch"], context.epoch
        )
    ids = [row["id"] for row in rows]
    changed = store.assign_instance(
        tx,
        ids,
        instance=instance,
        first_slot=first_slot,
        owner_verified=True,
    )
    if changed != len(ids):
        raise Retry("an ARQ of the lease has changed")
    updated: list[store.ArqRow] = [{**row, "instance_uuid": instance} for row in rows]
    entries.record_assigned(tx, updated, context.now)
    return BindResult(updated, pending)
