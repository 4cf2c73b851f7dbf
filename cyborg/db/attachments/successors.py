# SPDX-License-Identifier: Apache-2.0
"""Write successors: attachments whose devices replace those of a device context.

A row of ``attachments`` with ``maintained_device`` is a successor: ``core.attachments.successor``.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.attachments.attachment import AttachmentState
from cyborg.core.binding.states import ArqState
from cyborg.db import bulk
from cyborg.db.attachments import write as records
from cyborg.db.attachments.write import AttachmentRow
from cyborg.db.binding.write import ArqRow
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import (
    arqs,
    attach_handles,
    attachments,
    deployables,
    devices,
    set_members,
)
from cyborg.db.schema import device_contexts as contexts
from cyborg.db.schema import device_maintenances as windows

_OWNED_HANDLES = (
    attach_handles.join(deployables, deployables.c.id == attach_handles.c.deployable_id)
    .join(devices, devices.c.id == deployables.c.device_id)
    .join(arqs, arqs.c.id == attach_handles.c.arq_id)
)


class BoundContextRow(TypedDict):
    """A device context that owns handles of a device for an instance."""

    successor_of: str
    project_id: str
    instance_uuid: str
    hostname: str
    device_profile_name: str


# ARQs with which the server of a context was built; those of an attached context stay.
_BOUND_NOT_ATTACHED = (
    arqs.c.state == ArqState.BOUND,
    arqs.c.instance_uuid.is_not(None),
    arqs.c.attachment_id.is_(None),
)
# The work on the successor has not exchanged the handles: there is no other one meanwhile.
_NOT_EXCHANGED = attachments.c.state.in_([AttachmentState.ATTACHING, AttachmentState.ERROR])


def record_key(context: str, device: str, instance: str) -> str:
    """Return the request key of a successor, unique for context, device and instance."""
    return f"successor/{context}/{device}/{instance}"


def bound_contexts(tx: sa.Connection, device: str) -> list[BoundContextRow]:
    """Return the contexts with an ARQ that is Bound to an instance and owns a handle of a device.

    Attached contexts are not among them.
    """
    of_context = {
        "successor_of": contexts.c.uuid,
        "project_id": contexts.c.project_id,
    }
    query = (
        sa.select(*row_columns(BoundContextRow, arqs, **of_context))
        .select_from(_OWNED_HANDLES)
        .join(contexts, contexts.c.id == arqs.c.context_id)
        .where(devices.c.uuid == device, *_BOUND_NOT_ATTACHED)
        .order_by(contexts.c.uuid)
        # A context may own several handles of the device.
        .distinct()
    )
    return fetch_all(BoundContextRow, tx.execute(query))


def recorded(tx: sa.Connection, device: str) -> list[AttachmentRow]:
    """Return the successors of a device that have not exchanged their handles yet."""
    query = sa.select(attachments).where(attachments.c.maintained_device == device, _NOT_EXCHANGED)
    return fetch_all(AttachmentRow, tx.execute(query.order_by(attachments.c.id)))


def windows_after(
    tx: sa.Connection, id_: int, now: datetime, mode: str, limit: int
) -> Sequence[int]:
    """Return the row ids of the next ``limit`` open windows with a mode, after a row id."""
    query = sa.select(windows.c.id).where(
        windows.c.id > id_, windows.c.until > now, windows.c.successor == mode
    )
    return tx.scalars(query.order_by(windows.c.id).limit(limit)).all()


def devices_to_plan(
    tx: sa.Connection, now: datetime, mode: str, window_ids: Collection[int]
) -> list[str]:
    """Return the uuids of devices with successors to insert or to begin again.

    They have one of these windows, which is open and has this mode, and a bound context without a
    successor, or a failed successor that is due.
    """
    has_window = (
        windows.c.id.in_(window_ids),
        windows.c.until > now,
        windows.c.successor == mode,
    )
    missing = (
        sa.select(devices.c.uuid)
        .select_from(_OWNED_HANDLES)
        .join(contexts, contexts.c.id == arqs.c.context_id)
        .join(windows, windows.c.device_uuid == devices.c.uuid)
        .where(
            *has_window,
            *_BOUND_NOT_ATTACHED,
            ~sa.exists().where(
                attachments.c.successor_of == contexts.c.uuid,
                attachments.c.maintained_device == devices.c.uuid,
                attachments.c.instance_uuid == arqs.c.instance_uuid,
                _NOT_EXCHANGED,
            ),
        )
    )
    due = (
        sa.select(devices.c.uuid)
        .join(windows, windows.c.device_uuid == devices.c.uuid)
        .join(attachments, attachments.c.maintained_device == devices.c.uuid)
        .where(
            *has_window,
            attachments.c.state == AttachmentState.ERROR,
            attachments.c.next_try_at <= now,
        )
    )
    return list(tx.scalars(sa.union(missing, due)))


def insert_all(tx: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert successors."""
    bulk.insert(tx, attachments, rows)


def purge(tx: sa.Connection, mode: str, limit: int) -> int:
    """Delete up to ``limit`` failed successors that nothing needs any more; return their number.

    A successor is not needed if the device has no window with this mode, or if no handle of the
    device belongs to the context for the instance.
    """
    # Whether or not its time has passed: the sweep that calls this deletes ended windows itself.
    has_window = sa.exists().where(
        windows.c.device_uuid == attachments.c.maintained_device,
        windows.c.successor == mode,
    )
    is_bound = (
        sa.select(arqs.c.id)
        .select_from(_OWNED_HANDLES)
        .join(contexts, contexts.c.id == arqs.c.context_id)
        .where(
            devices.c.uuid == attachments.c.maintained_device,
            contexts.c.uuid == attachments.c.successor_of,
            arqs.c.instance_uuid == attachments.c.instance_uuid,
            *_BOUND_NOT_ATTACHED,
        )
        .correlate(attachments)
        .exists()
    )
    is_obsolete = (
        attachments.c.maintained_device.is_not(None),
        attachments.c.state == AttachmentState.ERROR,
        sa.or_(sa.not_(has_window), sa.not_(is_bound)),
    )
    ids = tx.scalars(sa.select(attachments.c.id).where(*is_obsolete).limit(limit)).all()
    # ``delete_failed`` checks the state again: the work on a successor may have begun again.
    return records.delete_failed(tx, ids) if ids else 0


def lock_replaced(tx: sa.Connection, context: str, device: str) -> list[ArqRow]:
    """Return the ARQs of a context that own handles of a device, by id, locked.

    The devices of a set are replaced together: its other ARQs are among them.
    """
    h = attach_handles.c
    handles = tx.execute(
        sa.select(h.arq_id, h.set_id)
        .select_from(_OWNED_HANDLES)
        .join(contexts, contexts.c.id == arqs.c.context_id)
        .where(devices.c.uuid == device, contexts.c.uuid == context)
    ).all()
    ids = {row.arq_id for row in handles}
    if sets := sorted({row.set_id for row in handles if row.set_id is not None}):
        ids |= set(tx.scalars(sa.select(h.arq_id).where(h.set_id.in_(sets), h.arq_id.is_not(None))))
    if not ids:
        return []
    # A statement of its own: FOR UPDATE of the join would also lock the handles and the device.
    query = sa.select(arqs).where(arqs.c.id.in_(ids)).order_by(arqs.c.id)
    return fetch_all(ArqRow, tx.execute(query.with_for_update()))


def providers_of(tx: sa.Connection, device: str) -> set[str]:
    """Return the uuids of the resource providers of a device, and of the sets that have it."""
    of_device = (
        sa.select(deployables.c.rp_uuid)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(devices.c.uuid == device)
    )
    # A set is a deployable: ``deployable_id`` is the set, ``handle_id`` its member.
    sets = (
        sa.select(set_members.c.deployable_id)
        .join(attach_handles, attach_handles.c.id == set_members.c.handle_id)
        .join(deployables, deployables.c.id == attach_handles.c.deployable_id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(devices.c.uuid == device)
    )
    of_sets = sa.select(deployables.c.rp_uuid).where(deployables.c.id.in_(sets))
    return set(tx.scalars(of_device.union(of_sets)))


def host_of(tx: sa.Connection, device: str) -> str | None:
    """Return the host of a device, or None."""
    return tx.scalar(sa.select(devices.c.host).where(devices.c.uuid == device))


def exchange_handles(tx: sa.Connection, pairs: Mapping[int, int]) -> bool:
    """Exchange the handles and providers of pairs of ARQs, by row id.

    Return False if an ARQ owns no handle. The caller has locked the ARQs. Their ``updated_at``, the
    time of the bind, stays.

    ``db.binding.claims`` says which other functions write owners of handles.
    """
    # No guard as that of a claim: the locks of the ARQs exclude their release, and a handle with an
    # owner cannot be claimed.
    partners = {**pairs, **{new: old for old, new in pairs.items()}}
    owned = sa.select(attach_handles.c.id, attach_handles.c.arq_id).where(
        attach_handles.c.arq_id.in_(sorted(partners))
    )
    owners = {row.id: row.arq_id for row in tx.execute(owned.with_for_update())}
    if len(owners) != len(partners):
        return False
    ids = attach_handles.c.id.in_(sorted(owners))
    # The owner is unique: no handle may get its new owner before the other one has lost it.
    tx.execute(sa.update(attach_handles).where(ids).values(arq_id=None))
    new_owners = {handle: partners[owner] for handle, owner in owners.items()}
    case = sa.case(new_owners, value=attach_handles.c.id)
    tx.execute(sa.update(attach_handles).where(ids).values(arq_id=case))
    # Each ARQ gets the provider that its partner had.
    former = sa.select(arqs.c.id, arqs.c.device_rp_uuid).where(arqs.c.id.in_(sorted(partners)))
    providers = {partners[row.id]: row.device_rp_uuid for row in tx.execute(former)}
    tx.execute(
        sa.update(arqs)
        .where(arqs.c.id.in_(sorted(partners)))
        .values(device_rp_uuid=sa.case(providers, value=arqs.c.id), updated_at=arqs.c.updated_at)
    )
    return True
