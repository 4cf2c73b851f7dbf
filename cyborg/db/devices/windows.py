# SPDX-License-Identifier: Apache-2.0
"""Write the maintenance windows of devices.

The row of the device is locked before that of its window, so that the status of the device and its
window change together.
"""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.db import bulk
from cyborg.db.rows import StoredRow, fetch_first
from cyborg.db.schema import device_maintenances as windows
from cyborg.db.schema import device_tombstones, devices


class WindowRow(StoredRow):
    """All columns of a maintenance window."""

    device_uuid: str
    until: datetime
    next_status: str
    successor: str | None
    user_id: str | None


def lock_status(tx: sa.Connection, device: str) -> str | None:
    """Return the status of a device, locked; None if it does not exist."""
    query = sa.select(devices.c.status).where(devices.c.uuid == device).with_for_update()
    return tx.scalar(query)


def find_window(tx: sa.Connection, device: str) -> WindowRow | None:
    """Return the window of a device, or None."""
    query = sa.select(windows).where(windows.c.device_uuid == device)
    return fetch_first(WindowRow, tx.execute(query))


def put_window(tx: sa.Connection, device: str, next_status: str, values: Mapping[str, Any]) -> bool:
    """Insert the window of a locked device, or change it; return whether it is new.

    ``next_status`` is the status of the device after a new window. A change of a window does not
    change it, nor any column that is not in ``values``.
    """
    change = sa.update(windows).where(windows.c.device_uuid == device)
    if tx.execute(change.values(**values)).rowcount:
        return False
    row = {"device_uuid": device, "next_status": next_status, **values}
    tx.execute(sa.insert(windows), [row])
    return True


def set_next_status(tx: sa.Connection, device: str, status: str) -> None:
    """Set the status that a device has after its window, if it has one."""
    change = sa.update(windows).where(windows.c.device_uuid == device)
    tx.execute(change.values(next_status=status))


def delete_window(tx: sa.Connection, device: str, due_by: datetime | None = None) -> bool:
    """Delete the window of a device; return whether it was deleted.

    With ``due_by``, delete the window only if it ends at or before ``due_by``: an operator may have
    extended it.
    """
    query = sa.delete(windows).where(windows.c.device_uuid == device)
    if due_by is not None:
        query = query.where(windows.c.until <= due_by)
    return bool(tx.execute(query).rowcount)


def delete_windows(tx: sa.Connection, uuids: Collection[str]) -> int:
    """Delete the windows of these devices; return their number."""
    return sum(
        tx.execute(sa.delete(windows).where(windows.c.device_uuid.in_(chunk))).rowcount
        for chunk in bulk.chunks(sorted(uuids))
    )


def find_due_windows(tx: sa.Connection, now: datetime, limit: int) -> list[str]:
    """Return the uuids of up to ``limit`` present devices whose window has ended, oldest first."""
    query = (
        sa.select(windows.c.device_uuid)
        .join(devices, devices.c.uuid == windows.c.device_uuid)
        .where(windows.c.until <= now)
        .order_by(windows.c.until, windows.c.id)
        .limit(limit)
    )
    return list(tx.scalars(query))


def purge_windows(tx: sa.Connection, now: datetime, limit: int) -> int:
    """Delete up to ``limit`` ended windows of devices that will not return; return their number."""
    gone = sa.and_(
        windows.c.until <= now,
        ~sa.exists().where(devices.c.uuid == windows.c.device_uuid),
        ~sa.exists().where(device_tombstones.c.uuid == windows.c.device_uuid),
    )
    ids: Collection[int] = tx.scalars(sa.select(windows.c.id).where(gone).limit(limit)).all()
    return tx.execute(sa.delete(windows).where(windows.c.id.in_(ids))).rowcount if ids else 0
