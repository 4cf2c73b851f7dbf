# SPDX-License-Identifier: Apache-2.0
"""Write what an import takes, one host in one transaction; a repeated import changes nothing."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import sqlalchemy as sa

from cyborg.core import naming
from cyborg.core.custody import Entry, Event
from cyborg.core.errors import Conflict
from cyborg.core.inventory.plan import DeployableKey, DeployableTombstone, Tombstone
from cyborg.core.migration import import_plan
from cyborg.core.migration.import_plan import (
    HostImport,
    ImportedArq,
    ImportedDevice,
    ImportedProfile,
)
from cyborg.db import bulk, schema
from cyborg.db.backends import write as backends
from cyborg.db.custody import write as records
from cyborg.db.deployables import write as deployables
from cyborg.db.devices import tombstones
from cyborg.db.devices import write as devices
from cyborg.db.handles import write as attach_handles

# Number of objects by their kind.
Counts = Counter[str]


def write_profiles(
    tx: sa.Connection, profiles: Sequence[ImportedProfile]
) -> tuple[dict[int, int], Counts]:
    """Insert device profiles that do not exist.

    Return the row ids of all profiles by the ids of the source, and the number of the new ones.
    Raise Conflict if another profile has the name of one of them.
    """
    table = schema.device_profiles
    names = {row.name: row.uuid for row in tx.execute(sa.select(table.c.name, table.c.uuid))}
    stored = set(names.values())
    new = []
    for profile in profiles:
        if profile.uuid in stored:
            continue
        if (other := names.get(profile.name)) is not None:
            raise Conflict(
                f"the device profile {profile.name} of the source has the uuid {profile.uuid}, but "
                f"one with this name and the uuid {other} exists here: delete or rename one of them"
            )
        new.append(
            {
                "uuid": profile.uuid,
                "name": profile.name,
                "description": profile.description,
                "groups": [group.to_dict() for group in profile.groups],
            }
        )
    bulk.insert(tx, table, new)
    row_ids = {row.uuid: row.id for row in tx.execute(sa.select(table.c.id, table.c.uuid))}
    return {p.id: row_ids[p.uuid] for p in profiles}, Counter({import_plan.PROFILE: len(new)})


def write_host(
    tx: sa.Connection, plan: HostImport, profile_ids: Mapping[int, int], now: datetime
) -> Counts:
    """Insert the devices and ARQs of a host that do not exist; return the number of new objects.

    ``profile_ids`` maps the ids of profiles in the source to row ids. Raise Conflict if the host
    has another device at one of the addresses: its agent has reported before the import.
    """
    if not plan.devices:
        # Without a statement: a host whose name is invalid has no devices here, and PostgreSQL
        # rejects a statement with a name that has a NUL character.
        return Counter()
    stored = {row["uuid"]: row["address"] for row in devices.of_host(tx, plan.host)}
    uuids_by_address = {address: uuid for uuid, address in stored.items()}
    new = [device for device in plan.devices if device.uuid not in stored]
    for device in new:
        if (other := uuids_by_address.get(device.value.address)) is not None:
            raise Conflict(
                f"host {plan.host} has the device {other} at {device.value.address}, which the "
                f"source knows as {device.uuid}: its agent has reported before the import. Stop "
                f"the agent, run 'cyborg service-delete' for it, and import again"
            )
    counts = _write_devices(tx, plan.host, new, now)
    if new:
        backends.sync_functions(tx, plan.host)
    counts += _write_arqs(tx, plan, profile_ids, now)
    _verify(tx, plan)
    return counts


def _write_devices(
    tx: sa.Connection, host: str, new: Sequence[ImportedDevice], now: datetime
) -> Counts:
    """Insert devices with all their parts; return how many rows of the source they are, by kind."""
    if not new:
        return Counter()
    # As tombstones, so that the devices get the uuids and the status that the source has.
    identities = {d.value.address: Tombstone(d.uuid, d.status) for d in new}
    devices.add(tx, host, [d.value.without_deployables() for d in new], identities)
    # Devices, then deployables, then handles: each needs the row ids of those before.
    ids = _write_deployables(tx, host, new)
    _write_parents(tx, new, ids)
    _write_handles(tx, new, ids)
    tombstones.restore_attributes(
        tx,
        {
            ids[DeployableKey(device.value.address, address)]: DeployableTombstone(
                identity.uuid, identity.attributes
            )
            for device in new
            for address, identity in device.deployables.items()
        },
    )
    _write_providers(tx, host, new, now)
    records.add(tx, [_to_entry(host, device) for device in new], now)
    return sum((Counter(device.rows) for device in new), Counter())


def _write_deployables(
    tx: sa.Connection, host: str, new: Sequence[ImportedDevice]
) -> Mapping[DeployableKey, int]:
    """Insert the deployables of devices, without their parents.

    Return the row ids of all deployables of the host.
    """
    device_ids = devices.ids_by_address(tx, host)
    identities = {
        address: identity for device in new for address, identity in device.deployables.items()
    }
    deployables.add(
        tx,
        host,
        [
            deployables.NewDeployable(
                device_id=device_ids[device.value.address],
                value=deployable.without_handles(),
                num_handles=len(deployable.handles),
            )
            for device in new
            for deployable in device.value.deployables
        ],
        uuids={address: identity.uuid for address, identity in identities.items()},
        providers={address: identity.provider for address, identity in identities.items()},
    )
    return deployables.ids_by_key(tx, host)


def _write_parents(
    tx: sa.Connection, new: Sequence[ImportedDevice], ids: Mapping[DeployableKey, int]
) -> None:
    """Write the parents and roots of the deployables of devices; ``ids`` has the row ids."""
    parents_by_id: dict[int, deployables.ParentIds] = {}
    for device in new:
        parents = {value.address: value.parent for value in device.value.deployables}
        row_ids = {a: ids[DeployableKey(device.value.address, a)] for a in parents}
        for address, parent in parents.items():
            root = address
            while (above := parents[root]) is not None:
                root = above
            parent_id = None if parent is None else row_ids[parent]
            ids_of_parents = deployables.ParentIds(parent_id, row_ids[root])
            parents_by_id[row_ids[address]] = ids_of_parents
    deployables.set_parents(tx, parents_by_id)


def _write_handles(
    tx: sa.Connection, new: Sequence[ImportedDevice], ids: Mapping[DeployableKey, int]
) -> None:
    """Insert the handles of devices; ``ids`` has the row ids of the deployables."""
    attach_handles.add(
        tx,
        [
            attach_handles.NewHandle(
                deployable_id=ids[DeployableKey(device.value.address, deployable.address)],
                value=handle,
                uuid=device.handles[deployable.address, handle.address],
                needs_cleaning=device.dirty,
            )
            for device in new
            for deployable in device.value.deployables
            for handle in deployable.handles
        ],
    )


def _write_providers(
    tx: sa.Connection, host: str, new: Sequence[ImportedDevice], now: datetime
) -> None:
    """Insert providers as published: Placement has them, and nothing changes there until a report.

    The first report of the host, or the next verification, compares them.
    """
    bulk.insert(
        tx,
        schema.providers,
        [
            {
                "uuid": identity.provider,
                "name": naming.provider_name(host, address),
                "host": host,
                "published_revision": 1,
                "verified_at": now,
            }
            for device in new
            for address, identity in device.deployables.items()
        ],
    )


def _write_arqs(
    tx: sa.Connection, plan: HostImport, profile_ids: Mapping[int, int], now: datetime
) -> Counts:
    """Insert the missing ARQs as Bound and give them their handles."""
    arqs, handles = schema.arqs, schema.attach_handles
    # An import that was interrupted continues with what is missing.
    stored = _read_ids(tx, arqs, [arq.uuid for arq in plan.arqs])
    new = [arq for arq in plan.arqs if arq.uuid not in stored]
    slots = _read_slots(tx, new)
    rows = []
    for arq in new:
        slot = slots[arq.instance]
        slots[arq.instance] += 1
        rows.append(
            {
                "uuid": arq.uuid,
                "state": "Bound",
                "profile_id": profile_ids[arq.profile_id],
                "device_profile_name": arq.profile,
                "device_profile_group_id": arq.group_id,
                "resource_class": arq.resource_class,
                "group": arq.group.to_dict(),
                "project_id": arq.project,
                "hostname": plan.host,
                "device_rp_uuid": arq.provider,
                "instance_uuid": arq.instance,
                "instance_slot": slot,
                "owner_verified": False,
                "hidden": False,
            }
        )
    bulk.insert(tx, arqs, rows)
    ids = _read_ids(tx, arqs, [arq.uuid for arq in new])
    handle_ids = _read_ids(tx, handles, [arq.handle for arq in new])
    # Each handle is cleaned after its release, although the driver may not be able to: an agent
    # without this ability has nothing to do, and the source does not record what a device can.
    bulk.update(
        tx,
        handles,
        [
            {"id": handle_ids[arq.handle], "arq_id": ids[arq.uuid], "needs_cleaning": True}
            for arq in new
        ],
    )
    places = {
        uuid: _HandlePlace(device.uuid, deployable, address)
        for device in plan.devices
        for (deployable, address), uuid in device.handles.items()
    }
    records.add(tx, [_to_claim(plan.host, arq, places[arq.handle]) for arq in new], now)
    return Counter({import_plan.ARQ: len(new)})


def _read_ids(tx: sa.Connection, table: sa.Table, uuids: Collection[str]) -> dict[str, int]:
    """Return the row ids of the rows of a table that have these uuids, by uuid."""
    found: dict[str, int] = {}
    for chunk in bulk.chunks(uuids):
        query = sa.select(table.c.uuid, table.c.id).where(table.c.uuid.in_(chunk))
        found |= {row.uuid: row.id for row in tx.execute(query)}
    return found


def _verify(tx: sa.Connection, plan: HostImport) -> None:
    """Raise Conflict unless each object of a plan is in the database."""
    identities = [i for device in plan.devices for i in device.deployables.values()]
    expected: Mapping[sa.Table, Collection[str]] = {
        schema.devices: [device.uuid for device in plan.devices],
        schema.deployables: [i.uuid for i in identities],
        schema.attributes: [a.uuid for i in identities for a in i.attributes],
        schema.attach_handles: [u for device in plan.devices for u in device.handles.values()],
        schema.arqs: [arq.uuid for arq in plan.arqs],
    }
    for table, uuids in expected.items():
        count = sa.select(sa.func.count()).select_from(table)
        chunks = bulk.chunks(uuids)
        num_found = sum(tx.scalar(count.where(table.c.uuid.in_(chunk))) or 0 for chunk in chunks)
        if num_found != len(uuids):
            raise Conflict(
                f"host {plan.host}: {len(uuids)} rows of {table.name} are expected, {num_found} "
                "exist: the host has changed since an earlier import"
            )


def _read_slots(tx: sa.Connection, new: Sequence[ImportedArq]) -> Counts:
    """Return the first free slot of each instance."""
    arqs = schema.arqs
    slots: Counts = Counter()
    for chunk in bulk.chunks(sorted({arq.instance for arq in new})):
        query = (
            sa.select(arqs.c.instance_uuid, sa.func.max(arqs.c.instance_slot).label("last"))
            .where(arqs.c.instance_uuid.in_(chunk))
            .group_by(arqs.c.instance_uuid)
        )
        for row in tx.execute(query):
            slots[str(row.instance_uuid)] = (-1 if row.last is None else row.last) + 1
    return slots


def _to_entry(host: str, device: ImportedDevice) -> Entry:
    value = device.value
    details = {
        "address": value.address,
        "backend": value.backend,
        "type": str(value.type),
        "vendor": value.vendor,
        "model": value.model,
        "serial": value.serial,
    }
    return Entry(device.uuid, host, Event.DEVICE_ADDED, details)


class _HandlePlace(NamedTuple):
    """The uuid of the device of a handle, and the addresses of its deployable and of itself."""

    device: str
    deployable: str
    address: str


def _to_claim(host: str, arq: ImportedArq, place: _HandlePlace) -> Entry:
    details = {
        "handle": arq.handle,
        "handle_address": place.address,
        "deployable_address": place.deployable,
        "arq": arq.uuid,
        "instance": arq.instance,
        "project": arq.project,
    }
    return Entry(place.device, host, Event.CLAIMED, details)
