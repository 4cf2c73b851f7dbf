# SPDX-License-Identifier: Apache-2.0
"""Read how far the devices under maintenance are drained."""

from collections import defaultdict
from collections.abc import Collection
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.attachments.attachment import AttachmentState, describe_target
from cyborg.core.maintenance import SuccessorState, successor_state
from cyborg.db.schema import (
    HANDLES,
    OWNED_HANDLES,
    arqs,
    attach_handles,
    attachments,
    device_contexts,
    device_maintenances,
    devices,
)

MAX_OWNERS = 64
"""Maximum number of owners of one device that are shown."""


class OwnerRow(TypedDict):
    """An ARQ that owns a handle of the device; ``device_context`` is the uuid of its context.

    ``successor`` is None if the context has no successor, and for other ARQs. ``error`` is why
    there is none, or why the work on it waits.
    """

    arq: str
    state: str
    instance_uuid: str | None
    project_id: str | None
    device_context: str | None
    successor: SuccessorState | None
    error: str | None


class MaintenanceRow(TypedDict):
    """A maintenance window; ``owned`` and ``cleaning`` are numbers of handles.

    ``owners`` are the first MAX_OWNERS owners of handles.
    """

    since: datetime
    until: datetime
    user_id: str | None
    successor: str | None
    owned: int
    cleaning: int
    owners: list[OwnerRow]


COLUMNS: list[sa.ColumnElement[Any]] = [
    device_maintenances.c.created_at.label("window_since"),
    device_maintenances.c.until.label("window_until"),
    device_maintenances.c.user_id.label("window_user_id"),
    device_maintenances.c.successor.label("window_successor"),
]
"""Columns of a query for devices that has an outer join with the windows."""


def build_rows(
    connection: sa.Connection, found: Collection[dict[str, Any]]
) -> dict[str, MaintenanceRow]:
    """Return the windows of rows with COLUMNS, by the uuid of the device.

    Execute two statements if there is a window, none otherwise.
    """
    with_window = [row for row in found if row["window_until"] is not None]
    if not with_window:
        return {}
    uuids = [row["uuid"] for row in with_window]
    owners, counts = _owners(connection, uuids), _count_handles(connection, uuids)
    windows: dict[str, MaintenanceRow] = {}
    for row in with_window:
        uuid = row["uuid"]
        owned, cleaning = counts.get(uuid, (0, 0))
        windows[uuid] = {
            "since": row["window_since"],
            "until": row["window_until"],
            "user_id": row["window_user_id"],
            "successor": row["window_successor"],
            "owned": owned,
            "cleaning": cleaning,
            "owners": owners[uuid],
        }
    return windows


def _owners(connection: sa.Connection, uuids: Collection[str]) -> dict[str, list[OwnerRow]]:
    """Return the first MAX_OWNERS owners of handles of these devices, by the uuid of the device."""
    number = sa.func.row_number().over(partition_by=devices.c.id, order_by=arqs.c.id)
    numbered = (
        sa.select(arqs.c.id, devices.c.uuid.label("device"), number.label("number"))
        .select_from(OWNED_HANDLES)
        .where(devices.c.uuid.in_(sorted(uuids)))
        .subquery()
    )
    own, other = attachments.alias("own"), attachments.alias("other")
    # After the exchange the old handle belongs to an ARQ of the successor, before to the context.
    query = (
        sa.select(
            numbered.c.device,
            arqs.c.uuid.label("arq"),
            arqs.c.state,
            arqs.c.instance_uuid,
            arqs.c.project_id,
            sa.func.coalesce(device_contexts.c.uuid, own.c.successor_of).label("device_context"),
            own.c.uuid.label("attachment"),
            own.c.hostname.label("own_host"),
            own.c.maintained_device.label("own_device"),
            own.c.state.label("own_state"),
            own.c.step.label("own_step"),
            own.c.error.label("own_error"),
            other.c.state.label("other_state"),
            other.c.step.label("other_step"),
            other.c.error.label("other_error"),
        )
        .select_from(numbered)
        .join(arqs, arqs.c.id == numbered.c.id)
        .outerjoin(device_contexts, device_contexts.c.id == arqs.c.context_id)
        .outerjoin(own, own.c.id == arqs.c.attachment_id)
        .outerjoin(
            other,
            sa.and_(
                other.c.successor_of == device_contexts.c.uuid,
                other.c.maintained_device == numbered.c.device,
                other.c.instance_uuid == arqs.c.instance_uuid,
                other.c.state.in_([AttachmentState.ATTACHING, AttachmentState.ERROR]),
            ),
        )
        .where(numbered.c.number <= MAX_OWNERS)
        .order_by(arqs.c.id)
    )
    owners = defaultdict[str, list[OwnerRow]](list)
    for row in connection.execute(query):
        successor, error = _successor_of(row)
        owners[row.device].append(
            {
                "arq": row.arq,
                "state": row.state,
                "instance_uuid": row.instance_uuid,
                "project_id": row.project_id,
                "device_context": row.device_context,
                "successor": successor,
                "error": error,
            }
        )
    return owners


def _successor_of(row: Any) -> tuple[SuccessorState | None, str | None]:
    """Return the state of the successor for an owner, and why there is none or why it waits."""
    if row.own_device == row.device:
        return successor_state(row.own_state, row.own_step), row.own_error
    if row.attachment is not None:
        if row.device_context is None or row.own_device is not None:
            return None, None
        return None, (
            f"device context {row.device_context} is attached to "
            f"{describe_target(row.instance_uuid, row.own_host)} by attachment "
            f"{row.attachment}, which gets no successor: detach it"
        )
    if row.other_state is None:
        return None, None
    return successor_state(row.other_state, row.other_step), row.other_error


def _count_handles(connection: sa.Connection, uuids: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return the numbers of owned handles and of those to clean, by the uuid of the device.

    A handle to clean is dirty and has no owner.
    """
    owned, cleaning = attach_handles.c.arq_id.is_not(None), attach_handles.c.needs_cleaning
    query = (
        sa.select(
            devices.c.uuid,
            sa.func.sum(sa.case((owned, 1), else_=0)),
            sa.func.sum(sa.case((sa.and_(sa.not_(owned), cleaning), 1), else_=0)),
        )
        .select_from(HANDLES)
        .where(devices.c.uuid.in_(sorted(uuids)))
        .group_by(devices.c.uuid)
    )
    return {uuid: (int(count), int(dirty)) for uuid, count, dirty in connection.execute(query)}
