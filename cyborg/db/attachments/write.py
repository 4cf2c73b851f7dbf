# SPDX-License-Identifier: Apache-2.0
"""Write attachments. The row is also the record of the work, which one conductor leases.

The lease guards every write of a conductor: a conductor that has lost the lease changes nothing.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa

from cyborg import tracing
from cyborg.core.attachments.attachment import (
    ATTACHMENT_LIFE_CYCLE,
    WORKING_STATES,
    AttachmentEvent,
    AttachmentState,
    Mode,
    Step,
)
from cyborg.core.binding.states import OWNING_STATES
from cyborg.db import bulk
from cyborg.db.attachments.read import AttachmentColumns
from cyborg.db.binding.write import ArqRow
from cyborg.db.paging import id_in
from cyborg.db.rows import StoredRow, equal, fetch_all, fetch_first
from cyborg.db.schema import arqs, attach_handles, attachments, deployables


def _lost(*owners: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Return the condition that an attachment is attached, and its ARQs are deleted or unbound.

    ``owners`` are more conditions of the ARQs that are read.
    """
    owned = sa.and_(
        arqs.c.attachment_id == attachments.c.id, arqs.c.state.in_(sorted(OWNING_STATES)), *owners
    )
    return sa.and_(
        attachments.c.state == AttachmentState.ATTACHED, sa.not_(sa.exists().where(owned))
    )


class AttachmentRow(StoredRow, AttachmentColumns):
    """All columns of an attachment."""

    request_key: str | None
    context_epoch: int | None
    failure: str | None
    intent: dict[str, Any] | None
    allocation_key: str | None
    boot_marker: str | None
    reboot_marker: str | None
    guest_job: str | None
    successor_of: str | None
    maintained_device: str | None
    deadline: datetime
    attempts: int
    next_try_at: datetime
    owner: str | None
    lease_until: datetime | None
    trace_context: str | None


def insert(tx: sa.Connection, values: Mapping[str, Any]) -> int:
    """Insert an attachment and return its row id.

    Raise oslo.db's DBDuplicateEntry if its uuid or key exists.
    """
    trace = tracing.current_context()
    return bulk.insert_row(tx, attachments, **values, trace_context=trace)


def count(tx: sa.Connection, project: str, limit: int | None = None) -> int:
    """Return the number of attachments of a project, counted up to ``limit`` if it is given."""
    own = (attachments.c.project_id == project, attachments.c.maintained_device.is_(None))
    counted = sa.select(attachments.c.id).where(*own).limit(limit).subquery()
    return int(tx.scalar(sa.select(sa.func.count()).select_from(counted)) or 0)


def find_request(
    tx: sa.Connection, uuid: str | None, request_key: str | None
) -> AttachmentRow | None:
    """Return the attachment of a repeated request, by the caller's uuid or by the key, or None."""
    a = attachments.c
    is_repeated = a.uuid == uuid if uuid is not None else a.request_key == request_key
    return fetch_first(AttachmentRow, tx.execute(sa.select(attachments).where(is_repeated)))


def lock(
    tx: sa.Connection,
    *,
    uuid: str | None = None,
    instance: str | None = None,
    hostname: str | None = None,
    accelerator: str | None = None,
    project_scope: str | None = None,
) -> list[AttachmentRow]:
    """Return one attachment, or all of an instance or host, in the order of their ids, locked.

    With ``hostname``, the attachments of the instances on the host are not among them.

    ``accelerator`` selects the attachments that hold this accelerator, or were requested for it.
    Successors are not among them: no caller can detach one. ``project_scope`` is the only project
    whose attachments the caller may see, None for all.
    """
    a = attachments.c
    query = sa.select(attachments).where(
        a.maintained_device.is_(None), *equal({a.uuid: uuid, a.instance_uuid: instance})
    )
    # All requests lock in this order: no deadlock.
    query = query.order_by(a.id).with_for_update()
    if hostname is not None:
        query = query.where(a.hostname == hostname, a.mode == Mode.HOST)
    if accelerator is not None:
        holders = (
            sa.select(arqs.c.attachment_id)
            .join(attach_handles, attach_handles.c.arq_id == arqs.c.id)
            .where(attach_handles.c.uuid == accelerator, arqs.c.attachment_id.is_not(None))
        )
        query = query.where(sa.or_(a.accelerator == accelerator, a.id.in_(holders)))
    query = query.where(*equal({a.project_id: project_scope}))
    return fetch_all(AttachmentRow, tx.execute(query))


def accelerators_of(tx: sa.Connection, ids: Collection[int]) -> dict[int, list[str]]:
    """Return the uuids of the accelerators that the ARQs of attachments own, by row id."""
    query = (
        sa.select(arqs.c.attachment_id, attach_handles.c.uuid)
        .join(arqs, arqs.c.id == attach_handles.c.arq_id)
        .where(arqs.c.attachment_id.in_(sorted(ids)))
    )
    uuids = defaultdict[int, list[str]](list)
    for attachment, uuid in tx.execute(query):
        uuids[attachment].append(uuid)
    return dict(uuids)


def state_of(tx: sa.Connection, id_: int) -> str | None:
    """Return the state of an attachment, not locked, or None if it does not exist."""
    return tx.scalar(sa.select(attachments.c.state).where(attachments.c.id == id_))


def provider_of(tx: sa.Connection, accelerator: str) -> str | None:
    """Return the resource provider of an accelerator, or None if it does not exist."""
    query = (
        sa.select(deployables.c.rp_uuid)
        .join(attach_handles, attach_handles.c.deployable_id == deployables.c.id)
        .where(attach_handles.c.uuid == accelerator)
    )
    return tx.scalar(query)


def start_detach(
    tx: sa.Connection, ids: Collection[int], now: datetime, *, step: Step | None, reboot: bool
) -> int:
    """Change attached attachments to detaching; return how many were changed.

    Without ``step``, change those that are being attached or undone, and keep their step: then the
    work on a step of the attach is cancelled, and undone from this step. ``reboot`` is whether the
    work may ask Nova for a reboot while the guest may have the devices.
    """
    event = AttachmentEvent.CANCEL if step is None else AttachmentEvent.DETACH
    return _apply(
        tx,
        event,
        attachments.c.id.in_(ids),
        **({} if step is None else {"step": step}),
        # The key is free again: the same may be attached while this one is still being detached.
        request_key=None,
        reboot=reboot,
        reboot_marker=None,
        error=None,
        failure=None,
        attempts=0,
        next_try_at=now,
        trace_context=tracing.current_context(),
    )


def request_reboot(tx: sa.Connection, ids: Collection[int], now: datetime) -> int:
    """Let the work on detaching attachments ask for a reboot; return how many were changed."""
    guard = (attachments.c.id.in_(ids), attachments.c.state == AttachmentState.DETACHING)
    query = sa.update(attachments).where(*guard)
    return tx.execute(query.values(reboot=True, next_try_at=now)).rowcount


def schedule_reboot(tx: sa.Connection, id_: int, now: datetime, deadline: datetime) -> int:
    """Let the work on an attachment that has no reboot ask for one; return how many were changed.

    An attached one continues with the step ``reboot``, until ``deadline``.
    ``core.attachments.attachment.can_get_reboot`` has the rule.
    """
    guard = (
        attachments.c.id == id_,
        attachments.c.mode == Mode.NEXT_BOOT,
        sa.not_(attachments.c.reboot),
    )
    # With a failure it is being undone.
    is_attaching = (
        attachments.c.state == AttachmentState.ATTACHING,
        attachments.c.failure.is_(None),
    )
    # The work has not come to the step ``reboot`` yet, and finds the flag there.
    set_flag = sa.update(attachments).where(*guard, *is_attaching).values(reboot=True)
    if changed := tx.execute(set_flag).rowcount:
        return changed
    return _apply(
        tx,
        AttachmentEvent.REBOOT,
        *guard,
        step=Step.REBOOT,
        reboot=True,
        deadline=deadline,
        error=None,
        attempts=0,
        next_try_at=now,
    )


def restart(tx: sa.Connection, ids: Collection[int], now: datetime, deadline: datetime) -> int:
    """Let the work on failed successors begin again; return how many were changed."""
    return _apply(
        tx,
        AttachmentEvent.RETRY,
        attachments.c.id.in_(sorted(ids)),
        step=Step.ALLOCATE,
        failure=None,
        attempts=0,
        boot_marker=None,
        reboot_marker=None,
        deadline=deadline,
        next_try_at=now,
    )


def _apply(
    tx: sa.Connection,
    event: AttachmentEvent,
    *conditions: sa.ColumnElement[bool],
    **values: Any,
) -> int:
    transition = ATTACHMENT_LIFE_CYCLE.transition(event)
    return bulk.change_state(tx, attachments, transition, *conditions, **values)


def delete_failed(tx: sa.Connection, ids: Collection[int]) -> int:
    """Delete attachments in error; return how many were deleted."""
    guard = (attachments.c.id.in_(ids), attachments.c.state == AttachmentState.ERROR)
    return tx.execute(sa.delete(attachments).where(*guard)).rowcount


def lease(tx: sa.Connection, *, owner: str, now: datetime, until: datetime) -> AttachmentRow | None:
    """Lease the attachment whose work is due for longest; return its row before the lease, or None.

    ``owner`` must be unique to each call.
    """
    due = sa.and_(
        attachments.c.state.in_(sorted(WORKING_STATES)),
        attachments.c.next_try_at <= now,
        sa.or_(attachments.c.lease_until.is_(None), attachments.c.lease_until < now),
    )
    order = (attachments.c.next_try_at, attachments.c.id)
    # Read, then a guarded UPDATE: no FOR UPDATE, since conductors would wait for each other here.
    first = sa.select(attachments).where(due).order_by(*order).limit(1)
    row = fetch_first(AttachmentRow, tx.execute(first))
    if row is None:
        return None
    query = sa.update(attachments).where(attachments.c.id == row["id"], due)
    leased = tx.execute(query.values(owner=owner, lease_until=until)).rowcount
    return row if leased else None


def write(
    tx: sa.Connection,
    id_: int,
    owner: str,
    values: Mapping[str, Any],
    expected: Mapping[str, Any] = MappingProxyType({}),
) -> bool:
    """Write columns of a leased attachment; return whether ``owner`` still had the lease.

    Write nothing unless the columns ``expected`` still have these values: a request may have
    changed them, or an earlier commit whose outcome is unknown. Raise oslo.db's DBDuplicateEntry if
    another attachment changes the instance's allocation.
    """
    leased = [attachments.c.id == id_, attachments.c.owner == owner]
    # In the guard, not read first: a request changes the row without the lease.
    leased += [attachments.c[name] == value for name, value in expected.items()]
    return bool(tx.execute(sa.update(attachments).where(*leased).values(**values)).rowcount)


def delete(tx: sa.Connection, id_: int, owner: str) -> bool:
    """Delete a leased attachment; return whether ``owner`` still had the lease."""
    leased = (attachments.c.id == id_, attachments.c.owner == owner)
    return bool(tx.execute(sa.delete(attachments).where(*leased)).rowcount)


def lock_arqs(tx: sa.Connection, id_: int) -> list[ArqRow]:
    """Return the ARQs of an attachment in the order of their ids, locked."""
    query = sa.select(arqs).where(arqs.c.attachment_id == id_).order_by(arqs.c.id)
    return fetch_all(ArqRow, tx.execute(query.with_for_update()))


def take_arqs(tx: sa.Connection, id_: int, arq_ids: Collection[int]) -> int:
    """Give existing ARQs to an attachment, hidden from Nova; return how many were changed."""
    free = (arqs.c.id.in_(sorted(arq_ids)), arqs.c.attachment_id.is_(None))
    # The orphan collector uses updated_at as the time of the bind.
    values = {"attachment_id": id_, "hidden": True, "updated_at": arqs.c.updated_at}
    return tx.execute(sa.update(arqs).where(*free).values(**values)).rowcount


def set_hidden(tx: sa.Connection, id_: int, *, hidden: bool) -> int:
    """Hide the ARQs of an attachment from Nova, or show them to Nova; return their number."""
    query = sa.update(arqs).where(arqs.c.attachment_id == id_)
    # The orphan collector uses updated_at as the time of the bind.
    return tx.execute(query.values(hidden=hidden, updated_at=arqs.c.updated_at)).rowcount


def awaits_marker(tx: sa.Connection, instance: str, *, without: int) -> bool:
    """Return whether an attachment that is being detached has not recorded its reboot marker.

    For such an attachment, a reboot before its marker does not prove that the guest has lost the
    devices. ``without`` is the row id of an attachment to leave out.
    """
    query = sa.select(attachments.c.id).where(
        attachments.c.instance_uuid == instance,
        attachments.c.id != without,
        attachments.c.state == AttachmentState.DETACHING,
        # The steps up to the one that records the marker.
        attachments.c.step.in_([Step.HIDE, Step.GUEST]),
        attachments.c.reboot_marker.is_(None),
    )
    return tx.scalar(query.limit(1)) is not None


def owned_units(
    tx: sa.Connection, instance: str, *, without: int | None = None, all_contexts: bool
) -> dict[str, dict[str, int]]:
    """Return the number of handles that an instance owns, by provider and resource class.

    The handles of a device context that is not attached are counted only with ``all_contexts``. If
    Nova built the server with the context, its allocation belongs to the server. If the context was
    leased, its allocation may belong to another consumer. The handles of the attachment ``without``
    are not counted.
    """
    plain_or_attached = sa.or_(arqs.c.context_id.is_(None), arqs.c.attachment_id.is_not(None))
    # Not "!=": it would also leave out the ARQs without an attachment, which have NULL.
    not_excluded = sa.true() if without is None else arqs.c.attachment_id.is_distinct_from(without)
    query = (
        sa.select(arqs.c.device_rp_uuid, arqs.c.resource_class, sa.func.count())
        .where(
            arqs.c.instance_uuid == instance,
            sa.true() if all_contexts else plain_or_attached,
            arqs.c.device_rp_uuid.is_not(None),
            arqs.c.state.in_(sorted(OWNING_STATES)),
            not_excluded,
        )
        .group_by(arqs.c.device_rp_uuid, arqs.c.resource_class)
    )
    units = defaultdict[str, dict[str, int]](dict)
    for provider, resource_class, count in tx.execute(query):
        units[provider][resource_class] = int(count)
    return dict(units)


def lost_of_instances(tx: sa.Connection, instances: Collection[str]) -> Sequence[int]:
    """Return the row ids of the attached attachments of these instances that own no ARQ."""
    query = sa.select(attachments.c.id).where(
        attachments.c.instance_uuid.in_(sorted(instances)), _lost()
    )
    return tx.scalars(query.order_by(attachments.c.id)).all()


def ids_after(tx: sa.Connection, id_: int, limit: int) -> Sequence[int]:
    """Return the row ids of the next ``limit`` attachments after a row id, in order."""
    query = sa.select(attachments.c.id).where(attachments.c.id > id_)
    return tx.scalars(query.order_by(attachments.c.id).limit(limit)).all()


def find_lost(tx: sa.Connection, ids: Collection[int]) -> Sequence[int]:
    """Return those of these attachments, by row id, that are attached and own no ARQ.

    There must be at least one, and it is fastest if no others are between them.
    """
    # MariaDB first reads the ARQs of all attachments that the subquery may select.
    owners = arqs.c.attachment_id.between(min(ids), max(ids))
    query = sa.select(attachments.c.id).where(id_in(attachments.c.id, ids), _lost(owners))
    # MariaDB would read all attached ones, by the index on the state.
    query = query.with_hint(attachments, "FORCE INDEX (PRIMARY)", "mysql")
    return tx.scalars(query.order_by(attachments.c.id)).all()


def lock_lost(tx: sa.Connection, ids: Collection[int]) -> Sequence[int]:
    """Return what ``find_lost`` returns, and lock these attachments."""
    # Few ids, which a statement without locks has found: a lock holds back the work on others.
    query = sa.select(attachments.c.id).where(attachments.c.id.in_(sorted(ids)), _lost())
    return tx.scalars(query.order_by(attachments.c.id).with_for_update()).all()


def purge(tx: sa.Connection, cutoff: datetime, limit: int) -> int:
    """Delete up to ``limit`` attachments that failed before ``cutoff``; return their number."""
    a = attachments.c
    # The last attempt is not later than the last change, and an index has its time: without it all
    # failed attachments would be read to find the old ones.
    failed = (a.state == AttachmentState.ERROR, a.next_try_at < cutoff, a.updated_at < cutoff)
    # Deleted by id and state: the work on a successor may have begun again meanwhile.
    ids: Sequence[int] = tx.scalars(sa.select(a.id).where(*failed).limit(limit)).all()
    return delete_failed(tx, ids) if ids else 0
