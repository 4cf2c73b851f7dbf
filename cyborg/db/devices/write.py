# SPDX-License-Identifier: Apache-2.0
"""Write devices and their maintenance windows.

No column is written by both the operator (``status``) and the host's reports. The row of a device
is locked before that of its window, so that its status and its window change together.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.inventory.device import Device, DeviceType, Health, Layout, load_abilities
from cyborg.core.inventory.plan import Tombstone
from cyborg.db import bulk, joins
from cyborg.db.columns import Moment
from cyborg.db.rows import DeviceRow, StoredRow, fetch_all, fetch_first
from cyborg.db.schema import arqs, attach_handles, device_tombstones, devices
from cyborg.db.schema import device_maintenances as windows

ENABLED = "enabled"  # the status of a new device
_OPENED: Mapping[str, Any] = {"failing": False, "retry_at": None}


def of_host(tx: sa.Connection, host: str) -> list[DeviceRow]:
    """Return every device row of a host."""
    return fetch_all(DeviceRow, tx.execute(sa.select(devices).where(devices.c.host == host)))


# The columns that have the value of the field of the same name in core.inventory.device.Device.
_SAME = (
    *("backend", "vendor", "model", "numa_node", "serial", "health_reason", "setup_required"),
    *("reboot_required", "deliverable", "undeliverable_reason", "layout"),
)


def to_device(row: DeviceRow) -> Device:
    """Convert a row to the value that describes a reported device, without its deployables."""
    # Not as a TypedDict, which mypy lets be read by literal keys only.
    columns: Mapping[str, Any] = row
    return Device(
        address=row["address"],
        type=DeviceType(row["type"]),
        std_board_info=row["std_board_info"],
        vendor_board_info=row["vendor_board_info"],
        health=Health(row["health"]),
        abilities=load_abilities(row["abilities"]),
        topology=row["topology"],
        layouts=tuple(map(Layout.from_dict, row["layouts"])),
        **{name: columns[name] for name in _SAME},
    )


def _reported(device: Device) -> dict[str, Any]:
    return {name: getattr(device, name) for name in _SAME} | {
        "type": str(device.type),
        "std_board_info": dict(device.std_board_info),
        "vendor_board_info": dict(device.vendor_board_info),
        "health": str(device.health),
        "abilities": sorted(device.abilities),
        "topology": dict(device.topology),
        "layouts": [layout.to_dict() for layout in device.layouts],
        "draining": False,
    }


def add(
    tx: sa.Connection,
    host: str,
    new: Iterable[Device],
    tombstones: Mapping[str, Tombstone] = MappingProxyType({}),
) -> dict[str, str]:
    """Insert devices of a host; return their uuids by address.

    ``tombstones`` has, by address, the tombstones from which devices are restored.
    """
    rows = [
        {
            "uuid": tombstones[d.address].uuid if d.address in tombstones else str(uuid4()),
            "status": tombstones[d.address].status if d.address in tombstones else ENABLED,
            "host": host,
            "address": d.address,
            **_reported(d),
        }
        for d in new
    ]
    bulk.insert(tx, devices, rows)
    return {row["address"]: row["uuid"] for row in rows}


def uuids_of_host(tx: sa.Connection, host: str) -> Sequence[str]:
    """Return the uuids of the devices of a host."""
    return tx.scalars(sa.select(devices.c.uuid).where(devices.c.host == host)).all()


def ids_by_address(tx: sa.Connection, host: str) -> dict[str, int]:
    """Return the row ids of a host's devices by address."""
    query = sa.select(devices.c.address, devices.c.id).where(devices.c.host == host)
    return {row.address: row.id for row in tx.execute(query)}


def by_addresses(tx: sa.Connection, host: str, addresses: Collection[str]) -> list[DeviceRow]:
    """Return the rows of the devices of a host with these addresses."""
    query = sa.select(devices).where(devices.c.host == host)
    return [
        row
        for chunk in bulk.chunks(sorted(addresses))
        for row in fetch_all(DeviceRow, tx.execute(query.where(devices.c.address.in_(chunk))))
    ]


def update(
    tx: sa.Connection,
    changed: Mapping[int, Device],
    stored: Mapping[int, DeviceRow],
    now: datetime,
) -> None:
    """Write the reported values of devices, by row id; draining devices become available again.

    ``health_since`` becomes ``now`` if the health changes. ``stored`` has the present rows; the
    caller must hold the lock of the host's agent, without which no device changes its health.
    """
    rows = []
    for id_, device in changed.items():
        row = stored[id_]
        since = row["health_since"] if row["health"] == device.health else now
        rows.append({"id": id_, **_reported(device), "health_since": since})
    bulk.update(tx, devices, rows)


def by_uuid(tx: sa.Connection, uuid: str) -> DeviceRow | None:
    """Return a device's row, or None."""
    return fetch_first(DeviceRow, tx.execute(sa.select(devices).where(devices.c.uuid == uuid)))


def holders(tx: sa.Connection, uuid: str) -> list[str]:
    """Return the uuids of the ARQs that own handles of a device."""
    query = (
        sa.select(arqs.c.uuid)
        .select_from(joins.OWNED_HANDLES)
        .where(devices.c.uuid == uuid)
        .order_by(arqs.c.id)
    )
    return list(tx.scalars(query))


def count_dirty_handles(tx: sa.Connection, uuid: str) -> int:
    """Return the number of handles of a device that need cleaning and have no owner."""
    query = (
        sa.select(sa.func.count())
        .select_from(joins.HANDLES)
        .where(
            devices.c.uuid == uuid,
            attach_handles.c.needs_cleaning,
            attach_handles.c.arq_id.is_(None),
        )
    )
    return int(tx.execute(query).scalar_one())


def mark_draining(tx: sa.Connection, ids: Collection[int]) -> None:
    """Mark devices, by row id, that were removed from the host but have a bound handle."""
    bulk.update_where(tx, devices.c.id, ids, draining=True)


def delete(tx: sa.Connection, ids: Collection[int]) -> None:
    """Delete devices by row id. Raise oslo.db's DBReferenceError if handles still exist."""
    bulk.delete(tx, devices, ids)


def addresses_with_failures(
    tx: sa.Connection, host: str, addresses: Collection[str]
) -> Sequence[str]:
    """Return those addresses of a host whose devices have failures of jobs."""
    query = sa.select(devices.c.address).where(
        devices.c.host == host,
        devices.c.address.in_(sorted(addresses)),
        devices.c.job_failures.is_not(None),
    )
    return tx.scalars(query).all()


def lock_history(tx: sa.Connection, host: str, addresses: Collection[str]) -> list[DeviceRow]:
    """Return devices, locked, to change the failures of their jobs."""
    query = (
        sa.select(devices)
        # In the order of the ids: two transactions that lock some devices do not wait for each
        # other.
        .where(devices.c.host == host, devices.c.address.in_(sorted(addresses)))
        .order_by(devices.c.id)
        .with_for_update()
    )
    return fetch_all(DeviceRow, tx.execute(query))


def write_history(tx: sa.Connection, id_: int, **values: Any) -> None:
    """Write the failures of the jobs of a device, which the caller has locked."""
    tx.execute(sa.update(devices).where(devices.c.id == id_).values(**values))


def open_due(tx: sa.Connection, now: datetime, limit: int) -> list[str]:
    """End the failing condition of up to ``limit`` devices whose time has passed; return uuids.

    The oldest come first. The number of failed prepare jobs does not change, so that one more
    failure makes the device failing again.
    """
    due = sa.select(devices.c.id, devices.c.uuid).where(devices.c.retry_at <= now)
    due_rows = tx.execute(due.order_by(devices.c.retry_at).limit(limit)).all()
    if not due_rows:
        return []
    tx.execute(
        sa.update(devices)
        # Checked again: one more failure may have set a later time since the SELECT.
        .where(devices.c.id.in_([row.id for row in due_rows]), devices.c.retry_at <= now)
        .values(_OPENED)
    )
    return [row.uuid for row in due_rows]


def end_grace(tx: sa.Connection, backends: Collection[tuple[str, str]]) -> None:
    """Let no server in build get a device of these cordoned backends, given as (host, name)."""
    by_name = defaultdict[str, list[str]](list)
    for host, name in backends:
        by_name[name].append(host)
    for name, hosts in sorted(by_name.items()):
        is_backend = devices.c.backend == name
        bulk.update_where(tx, devices.c.host, sorted(hosts), is_backend, cordoned_since=None)


def set_status(tx: sa.Connection, uuid: str, status: str, now: datetime) -> bool | None:
    """Set the operator's status of a device; enabling a device ends its failing condition.

    Its failed prepare jobs no longer count. Return whether this changed the device, None if it does
    not exist.
    """
    same_uuid = devices.c.uuid == uuid
    # In the guard, so that the row count is that of real changes: it also counts rows that get the
    # values that they have.
    differs = devices.c.status != status
    values: dict[str, Any] = {"status": status}
    if status == ENABLED:
        differs = sa.or_(differs, devices.c.failing, devices.c.failed_prepares > 0)
        values |= {**_OPENED, "failed_prepares": 0}
    since = None if status == ENABLED else sa.literal(now, Moment)
    # A server in build may still bind for a while that counts from ``cordoned_since``; None allows
    # none. A cordon in force keeps its time or None: the status must not grant new time.
    values["cordoned_since"] = sa.case((devices.c.cordoned, devices.c.cordoned_since), else_=since)
    changed = tx.execute(sa.update(devices).where(same_uuid, differs).values(**values)).rowcount
    if changed:
        return True
    return False if tx.execute(sa.select(devices.c.id).where(same_uuid)).first() else None


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
    # No other transaction inserts it meanwhile: the caller has locked the device.
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
    return bulk.delete_where(tx, windows.c.device_uuid, sorted(uuids))


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
    is_obsolete = sa.and_(
        windows.c.until <= now,
        ~sa.exists().where(devices.c.uuid == windows.c.device_uuid),
        # A device with a tombstone may return: its window continues then.
        ~sa.exists().where(device_tombstones.c.uuid == windows.c.device_uuid),
    )
    obsolete = sa.select(windows.c.id).where(is_obsolete).limit(limit)
    ids: Collection[int] = tx.scalars(obsolete).all()
    return tx.execute(sa.delete(windows).where(windows.c.id.in_(ids))).rowcount if ids else 0
