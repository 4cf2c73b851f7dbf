# SPDX-License-Identifier: Apache-2.0
"""Writing deployables: the parts of devices that are resource providers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core import names
from cyborg.core.device import Deployable
from cyborg.db.schema import attach_handles, deployables, devices, jobs, services
from cyborg.db.store import bulk
from cyborg.db.store.services import AGENT


def of_host(tx: sa.Connection, host: str) -> Sequence[sa.RowMapping]:
    """Return every deployable row of a host, with ``device`` and ``parent``: their addresses."""
    parents = deployables.alias("parents")
    query = (
        sa.select(
            deployables,
            devices.c.address.label("device"),
            parents.c.address.label("parent"),
        )
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(parents, parents.c.id == deployables.c.parent_id)
        .where(devices.c.host == host)
    )
    return tx.execute(query).mappings().all()


def value(row: Mapping[Any, Any]) -> Deployable:
    """Return a row of ``of_host`` as the deployable that was reported, without its handles."""
    return Deployable(
        address=row["address"],
        resource_class=row["resource_class"],
        traits=frozenset(row["traits"]),
        attributes=row["attributes"],
        parent=row["parent"],
        bitstream_id=row["bitstream_id"],
    )


def _reported(deployable: Deployable) -> dict[str, Any]:
    return {
        "resource_class": deployable.resource_class,
        "traits": sorted(deployable.traits),
        "attributes": dict(deployable.attributes),
        "bitstream_id": deployable.bitstream_id,
        "draining": False,
    }


def add(
    tx: sa.Connection,
    host: str,
    new: Iterable[tuple[int, Deployable, int]],
    uuids: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add deployables, each to the device of that row id, with its number of handles.

    ``uuids`` are those that had one before, by address. ``place`` says what they lie within.
    """
    bulk.insert(
        tx,
        deployables,
        [
            {
                "uuid": uuids.get(d.address) or str(uuid4()),
                "device_id": device_id,
                "address": d.address,
                "name": names.provider_name(host, d.address),
                "rp_uuid": names.provider_uuid(host, d.address),
                "num_accelerators": handles,
                **_reported(d),
            }
            for device_id, d, handles in new
        ],
    )


def ids(tx: sa.Connection, host: str) -> dict[tuple[str, str], int]:
    """Return the row ids of a host's deployables by the addresses of device and deployable."""
    query = (
        sa.select(devices.c.address, deployables.c.address, deployables.c.id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(devices.c.host == host)
    )
    return {(device, own): id_ for device, own, id_ in tx.execute(query)}


def change(tx: sa.Connection, changed: Mapping[int, Deployable]) -> None:
    """Write what is reported now, by row id; a draining deployable is back then."""
    bulk.update(tx, deployables, [{"id": id_, **_reported(d)} for id_, d in changed.items()])


def place(tx: sa.Connection, places: Mapping[int, tuple[int | None, int]]) -> None:
    """Write, by row id, the row ids of the deployable around it and of the outermost one."""
    # Nearly all lie within nothing: these are one statement, also on the wire.
    alone = [id_ for id_, (parent, _) in places.items() if parent is None]
    for some in bulk.chunks(alone):
        tx.execute(
            sa.update(deployables)
            .where(deployables.c.id.in_(some))
            .values(parent_id=None, root_id=deployables.c.id)
        )
    bulk.update(
        tx,
        deployables,
        [
            {"id": id_, "parent_id": parent, "root_id": root}
            for id_, (parent, root) in places.items()
            if parent is not None
        ],
    )


def count(tx: sa.Connection, counts: Mapping[int, int]) -> None:
    """Write how many handles deployables have, by row id."""
    bulk.update(tx, deployables, [{"id": i, "num_accelerators": n} for i, n in counts.items()])


def drain(tx: sa.Connection, gone: Collection[int]) -> None:
    """Mark deployables, by row id, that the host has no longer but of which a handle is bound."""
    for some in bulk.chunks(gone):
        tx.execute(sa.update(deployables).where(deployables.c.id.in_(some)).values(draining=True))


def remove(tx: sa.Connection, gone: Collection[int]) -> None:
    """Delete deployables by row id. Raises oslo.db's DBReferenceError while handles are left."""
    bulk.delete(tx, deployables, gone)


def desired(tx: sa.Connection, providers: Collection[str]) -> Sequence[sa.RowMapping]:
    """Return what decides how these providers, by uuid, should look; none for one that must go.

    Keys: uuid, name, parent (provider uuid or None), resource_class, traits, total (handles that
    are of use or in use), stuck (those of them that cannot be cleaned at present), programming,
    draining (of the part or its device), device_status, health, setup_required, reboot_required,
    withdrawn, host_down (the conductors hold the agent for down; a host whose agent is not known is
    not), host and identity (what its agent told of the compute node; None of an unknown agent).
    """
    parents = deployables.alias("parents")
    total = (
        sa.select(sa.func.count())
        .where(
            attach_handles.c.deployable_id == deployables.c.id,
            sa.or_(sa.not_(attach_handles.c.draining), attach_handles.c.request_id.is_not(None)),
        )
        .scalar_subquery()
    )
    stuck = (
        sa.select(sa.func.count())
        .select_from(attach_handles)
        .join(jobs, jobs.c.id == attach_handles.c.job_id)
        .where(
            attach_handles.c.deployable_id == deployables.c.id,
            attach_handles.c.request_id.is_(None),
            sa.not_(attach_handles.c.draining),
            jobs.c.error.is_not(None),
        )
        .scalar_subquery()
    )
    query = (
        sa.select(
            deployables.c.rp_uuid.label("uuid"),
            deployables.c.name,
            parents.c.rp_uuid.label("parent"),
            deployables.c.resource_class,
            deployables.c.traits,
            total.label("total"),
            stuck.label("stuck"),
            deployables.c.job_id.is_not(None).label("programming"),
            sa.or_(deployables.c.draining, devices.c.draining).label("draining"),
            devices.c.status.label("device_status"),
            devices.c.health,
            devices.c.setup_required,
            devices.c.reboot_required,
            devices.c.withdrawn,
            services.c.down_since.is_not(None).label("host_down"),
            devices.c.host,
            services.c.identity,
        )
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(parents, parents.c.id == deployables.c.parent_id)
        .outerjoin(services, sa.and_(services.c.host == devices.c.host, services.c.binary == AGENT))
        .where(deployables.c.rp_uuid.in_(sorted(providers)))
        .order_by(deployables.c.id)
    )
    return tx.execute(query).mappings().all()
