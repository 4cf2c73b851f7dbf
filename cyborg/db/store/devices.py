# SPDX-License-Identifier: Apache-2.0
"""Writing devices. What the operator decides (``status``) and what a host reports never mix."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core import wire
from cyborg.core.departed import Departed
from cyborg.core.device import Device, DeviceType, Health
from cyborg.db.schema import attach_handles, deployables, devices, requests
from cyborg.db.store import bulk

ENABLED = "enabled"  # what a device is until an operator says otherwise


def of_host(tx: sa.Connection, host: str) -> Sequence[sa.RowMapping]:
    """Return every device row of a host."""
    return tx.execute(sa.select(devices).where(devices.c.host == host)).mappings().all()


def value(row: Mapping[Any, Any]) -> Device:
    """Return the row as the device that was reported, without its deployables."""
    return Device(
        address=row["address"],
        type=DeviceType(row["type"]),
        vendor=row["vendor"],
        model=row["model"],
        backend=row["backend"],
        std_board_info=row["std_board_info"],
        vendor_board_info=row["vendor_board_info"],
        numa_node=row["numa_node"],
        serial=row["serial"],
        health=Health(row["health"]),
        health_reason=row["health_reason"],
        setup_required=row["setup_required"],
        reboot_required=row["reboot_required"],
        abilities=wire.load_abilities(row["abilities"]),
    )


def _reported(device: Device) -> dict[str, Any]:
    return {
        "backend": device.backend,
        "type": str(device.type),
        "vendor": device.vendor,
        "model": device.model,
        "std_board_info": dict(device.std_board_info),
        "vendor_board_info": dict(device.vendor_board_info),
        "numa_node": device.numa_node,
        "serial": device.serial,
        "health": str(device.health),
        "health_reason": device.health_reason,
        "setup_required": device.setup_required,
        "reboot_required": device.reboot_required,
        "abilities": sorted(device.abilities),
        "draining": False,
    }


def add(
    tx: sa.Connection,
    host: str,
    new: Iterable[Device],
    before: Mapping[str, Departed] = MappingProxyType({}),
) -> None:
    """Add devices of a host; ``before`` are those, by address, that are back."""
    bulk.insert(
        tx,
        devices,
        [
            {
                "uuid": before[d.address].uuid if d.address in before else str(uuid4()),
                "status": before[d.address].status if d.address in before else ENABLED,
                "host": host,
                "address": d.address,
                **_reported(d),
            }
            for d in new
        ],
    )


def ids(tx: sa.Connection, host: str) -> dict[str, int]:
    """Return the row ids of a host's devices by address."""
    query = sa.select(devices.c.address, devices.c.id).where(devices.c.host == host)
    return {row.address: row.id for row in tx.execute(query)}


def some(tx: sa.Connection, host: str, addresses: Collection[str]) -> list[sa.RowMapping]:
    """Return the rows of these devices of a host."""
    mine = sa.select(devices).where(devices.c.host == host)
    return [
        row
        for part in bulk.chunks(sorted(addresses))
        for row in tx.execute(mine.where(devices.c.address.in_(part))).mappings()
    ]


def change(tx: sa.Connection, changed: Mapping[int, Device], now: datetime) -> None:
    """Write what is reported now, by row id; a draining device is back then.

    ``health_since`` becomes ``now`` where the health differs.
    """
    if changed:
        tx.execute(
            _CHANGE, [_renamed({"id": id_, **_reported(d)}, now) for id_, d in changed.items()]
        )


def _renamed(values: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    return {"now": now} | {f"new_{name}": value for name, value in values.items()}


_NAMES = tuple(_reported(Device("-", DeviceType.OTHER, "-", "-", "-")))
_CHANGE = (
    sa.update(devices)
    .where(devices.c.id == sa.bindparam("new_id"))
    # In this order, for MySQL assigns one after another: the health compared is still the old one.
    .ordered_values(
        (
            devices.c.health_since,
            sa.case(
                (devices.c.health == sa.bindparam("new_health"), devices.c.health_since),
                else_=sa.bindparam("now", type_=devices.c.health_since.type),
            ),
        ),
        *((devices.c[name], sa.bindparam(f"new_{name}")) for name in _NAMES),
    )
)


def by_uuid(tx: sa.Connection, uuid: str) -> sa.RowMapping | None:
    """Return a device's row, or None."""
    return tx.execute(sa.select(devices).where(devices.c.uuid == uuid)).mappings().first()


def holders(tx: sa.Connection, uuid: str) -> list[str]:
    """Return the uuids of the requests that hold anything of a device."""
    query = (
        sa.select(requests.c.uuid)
        .join(attach_handles, attach_handles.c.request_id == requests.c.id)
        .join(deployables, deployables.c.id == attach_handles.c.deployable_id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(devices.c.uuid == uuid)
        .order_by(requests.c.id)
    )
    return list(tx.scalars(query))


def dirty(tx: sa.Connection, uuid: str) -> int:
    """Return how many handles of a device nobody owns and nobody has cleaned yet."""
    query = (
        sa.select(sa.func.count())
        .select_from(attach_handles)
        .join(deployables, deployables.c.id == attach_handles.c.deployable_id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(
            devices.c.uuid == uuid,
            attach_handles.c.prepared,
            attach_handles.c.request_id.is_(None),
        )
    )
    return int(tx.execute(query).scalar_one())


def drain(tx: sa.Connection, gone: Collection[int]) -> None:
    """Mark devices, by row id, that the host has no longer but something of which is bound."""
    for some in bulk.chunks(gone):
        tx.execute(sa.update(devices).where(devices.c.id.in_(some)).values(draining=True))


def remove(tx: sa.Connection, gone: Collection[int]) -> None:
    """Delete devices by row id. Raises oslo.db's DBReferenceError while handles are left."""
    bulk.delete(tx, devices, gone)


def set_status(tx: sa.Connection, uuid: str, status: str) -> bool | None:
    """Set what the operator wants of a device.

    Returns whether that is a change, None when there is no such device.
    """
    mine = devices.c.uuid == uuid
    changed = tx.execute(
        sa.update(devices).where(mine, devices.c.status != status).values(status=status)
    ).rowcount
    if changed:
        return True
    return False if tx.execute(sa.select(devices.c.id).where(mine)).first() else None
