# SPDX-License-Identifier: Apache-2.0
"""Rows of new ARQs, of a device profile or of a device context, and the form that is shown."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.conductor.binding.context_states import expiry, follow_arqs
from cyborg.conductor.notifications.notifications import ArqEventRecorder
from cyborg.core.binding.profile import Group, expand_slots
from cyborg.core.binding.states import ArqState
from cyborg.core.contexts.leases import ContextFacts, lost_lease, stale_lease
from cyborg.core.contexts.states import LEASED, USABLE
from cyborg.core.errors import WrongState
from cyborg.core.text import to_iso
from cyborg.db.attachments import write as attachments
from cyborg.db.binding import claims as handle_claims
from cyborg.db.binding import write as store
from cyborg.db.contexts import write as contexts

_SHOWN = (
    "uuid",
    "state",
    "device_profile_name",
    "device_profile_group_id",
    "resource_class",
    "group",
    "project_id",
)


def build_arqs(
    profile_id: int,
    profile_name: str,
    groups: Sequence[Group],
    project_id: str | None,
    now: datetime,
    context_id: int | None = None,
) -> list[store.NewArqRow]:
    """Return the row of an ARQ for each unit of each group."""
    return [
        {
            "uuid": str(uuid4()),
            "state": str(ArqState.INITIAL),
            "profile_id": profile_id,
            "context_id": context_id,
            "device_profile_name": profile_name,
            "device_profile_group_id": slot.group_id,
            "resource_class": slot.resource_class,
            "group": slot.group.to_dict(),
            "project_id": project_id,
            "created_at": now,
        }
        for slot in expand_slots(groups)
    ]


def copy_arq(
    row: store.ArqRow, project_id: str | None, now: datetime, context_id: int | None = None
) -> store.NewArqRow:
    """Return a new ARQ for the same unit of the same group as an ARQ of a device context.

    ``context_id`` is the row id of the context that gets it, None for the ARQ of a successor.
    """
    return {
        "uuid": str(uuid4()),
        "state": str(ArqState.INITIAL),
        "profile_id": row["profile_id"],
        "context_id": context_id,
        "device_profile_name": row["device_profile_name"],
        "device_profile_group_id": row["device_profile_group_id"],
        "resource_class": row["resource_class"],
        "group": row["group"],
        "project_id": project_id,
        "created_at": now,
    }


def renew_context_arqs(
    tx: sa.Connection,
    context_id: int,
    scope: str | None,
    now: datetime,
    recorder: ArqEventRecorder,
    *,
    attachment_id: int | None = None,
    epoch: int | None = None,
) -> Sequence[store.NewArqRow] | None:
    """Replace the ARQs of a context and return them; None if it is not in the scope of the caller.

    Each caller gets ARQs with uuids of its own: a late bind or deletion by a former caller finds no
    ARQ. ARQs whose former handles are still cleaned are replaced too, since the cleaning does not
    need them. The ARQs of a context with a lease keep their handles; an attachment, whose row id is
    ``attachment_id``, must give the ``epoch`` of the lease. ``scope`` is the only project whose
    contexts the caller may use, None for all projects. Raise WrongState or Conflict if the context
    is bound, its lease has ended or has another epoch, or its last bind failed; for an attachment,
    also if a device of the lease can no longer be used.
    """
    # Context and ARQs in one query: a boot from a context costs no round trip more than one from a
    # profile.
    locked, old = contexts.lock_with_arqs(tx, [context_id])
    context = next(iter(locked), None)
    if context is None or scope not in (None, context["project_id"]):
        return None
    # An attachment without an epoch was requested before the lease: it has no part in the lease.
    may_use_lease = attachment_id is None or epoch is not None
    if context["state"] in LEASED and may_use_lease:
        renamed = _rename_leased(tx, context, old, now, recorder, epoch)
        if attachment_id is not None:
            _attach_leased(tx, context, attachment_id, [row["id"] for row in old])
        return renamed
    if epoch is not None:
        facts = ContextFacts(
            context["uuid"], context["state"], context["epoch"], instance=context["instance_uuid"]
        )
        raise lost_lease(facts, epoch, context["error"])
    if context["state"] not in USABLE:
        raise _not_usable(context)
    rows = [copy_arq(row, context["project_id"], now, context_id) for row in old]
    if store.delete(tx, [row["id"] for row in old]) != len(old):
        raise _changed_concurrently(context)
    store.insert_all(tx, rows, attachment_id)
    recorder.record_deleted(tx, old)
    recorder.record_created(tx, rows)
    # A context in Cleaning is Unbound now: its new ARQs wait for no cleaning.
    follow_arqs(tx, old, recorder, now)
    if (expires_at := expiry(now, recorder.conf.device_contexts.unbound_ttl)) is not None:
        contexts.postpone_expiry(tx, [context_id], expires_at)
    return rows


def _attach_leased(
    tx: sa.Connection, context: contexts.ContextRow, attachment_id: int, ids: Sequence[int]
) -> None:
    """Give the ARQs of a locked context with a lease to an attachment.

    Raise WrongState if one of their devices has been closed since it was reserved.
    """
    if attachments.take_arqs(tx, attachment_id, ids) != len(ids):
        raise _changed_concurrently(context)
    # The handles were claimed when the lease began: no later claim sees that a device was closed,
    # and Placement may not know it yet.
    if handle_claims.lock_schedulable(tx, ids) != len(ids):
        raise WrongState(
            f"a device that device context {context['uuid']} has reserved can no longer be used: "
            "it is disabled, under maintenance, unhealthy, being removed or being changed, which "
            "cyborg device-show shows; attach the context again when the device can be used, or "
            "unbind the context to get another device",
            device_context=context["uuid"],
            state=context["state"],
        )


def _not_usable(context: contexts.ContextRow) -> WrongState:
    """Return the error for a context in a state in which its caller cannot use it."""
    uuid = context["uuid"]
    state = context["state"]
    instance = context["instance_uuid"]
    if state in LEASED:  # only an attachment without an epoch cannot use it
        reason = "it was reserved after the request to attach it, attach it again"
    else:
        reason = f"only a context that is {' or '.join(sorted(USABLE))} can be used"
    bound = f", bound to instance {instance}" if instance else ""
    return WrongState(
        f"device context {uuid} is {state}{bound}: {reason}", device_context=uuid, state=state
    )


def _changed_concurrently(context: contexts.ContextRow) -> WrongState:
    return WrongState(
        f"the ARQs of device context {context['uuid']} changed concurrently, retry",
        device_context=context["uuid"],
        state=context["state"],
    )


def _rename_leased(
    tx: sa.Connection,
    context: contexts.ContextRow,
    rows: Sequence[store.ArqRow],
    now: datetime,
    recorder: ArqEventRecorder,
    epoch: int | None,
) -> Sequence[store.ArqRow]:
    """Give the ARQs of a locked context with a lease new uuids, and return them.

    So a late call of a former caller finds none of them.

    ``epoch`` is None for a caller that does not know it. Raise WrongState or Conflict if the lease
    has ended or has another epoch.
    """
    ended = context["lease_expires_at"] is None or context["lease_expires_at"] <= now
    if ended or epoch not in (None, context["epoch"]):
        raise stale_lease(context["uuid"], context["state"], context["epoch"], given=epoch)
    renamed: list[store.ArqRow] = [{**row, "uuid": str(uuid4())} for row in rows]
    store.replace_uuids(tx, {row["id"]: row["uuid"] for row in renamed})
    recorder.record_replaced(tx, rows, renamed)
    return renamed


def to_response(row: store.NewArqRow) -> dict[str, Any]:
    """Convert the row of a new ARQ to the dictionary that the API shows.

    The ARQ of a context with a lease has a host and a provider; its handle is not shown here.
    """
    values: Any = row  # an ARQ of a lease has more columns than a new one
    updated_at = values.get("updated_at")
    return {name: values[name] for name in _SHOWN} | {
        "hostname": values.get("hostname"),
        "device_rp_uuid": values.get("device_rp_uuid"),
        "instance_uuid": None,
        "attach_handle_type": "",
        "attach_handle_uuid": None,
        "attach_handle_info": {},
        "attached_at": None,
        "attach_error": None,
        "created_at": to_iso(row["created_at"]),
        "updated_at": None if updated_at is None else to_iso(updated_at),
    }
