# SPDX-License-Identifier: Apache-2.0
"""Write the tombstones of devices that were removed from their host.

The caller must hold a lock on the row of the host's agent.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.core.inventory.plan import Attribute, DeployableTombstone, Tombstone
from cyborg.db import bulk
from cyborg.db.schema import attributes
from cyborg.db.schema import device_tombstones as table


def of_host(tx: sa.Connection, host: str, addresses: Collection[str]) -> dict[str, Tombstone]:
    """Return the tombstones of these devices of a host, by address."""
    tombstones: dict[str, Tombstone] = {}
    for chunk in bulk.chunks(sorted(addresses)):
        query = sa.select(table.c.address, table.c.uuid, table.c.status, table.c.deployables).where(
            table.c.host == host, table.c.address.in_(chunk)
        )
        for row in tx.execute(query):
            deployables = {address: _load(body) for address, body in row.deployables.items()}
            tombstones[row.address] = Tombstone(row.uuid, row.status, deployables)
    return tombstones


def replace(
    tx: sa.Connection,
    host: str,
    stored: Mapping[str, Tombstone],
    tombstones: Mapping[str, Tombstone],
    now: datetime,
) -> None:
    """Replace the tombstones of a host; unchanged tombstones are not written."""
    changed = sorted(a for a in {*stored, *tombstones} if stored.get(a) != tombstones.get(a))
    to_delete = [address for address in changed if address in stored]
    bulk.delete_where(tx, table.c.address, to_delete, table.c.host == host)
    bulk.insert(
        tx,
        table,
        [
            {
                "uuid": tombstones[address].uuid,
                "host": host,
                "address": address,
                "status": tombstones[address].status,
                "deployables": {
                    key: _dump(tombstone)
                    for key, tombstone in tombstones[address].deployables.items()
                },
                "created_at": now,
            }
            for address in changed
            if address in tombstones
        ],
    )


def uuids_of_host(tx: sa.Connection, host: str) -> Sequence[str]:
    """Return the uuids of the removed devices of a host."""
    return tx.scalars(sa.select(table.c.uuid).where(table.c.host == host)).all()


def delete_clean(tx: sa.Connection, host: str) -> int:
    """Delete the tombstones of a host that have no dirty handle; return their number."""
    query = sa.select(table.c.id, table.c.deployables).where(table.c.host == host)
    ids = [
        row.id
        for row in tx.execute(query)
        if not any(_load(body).dirty_handles for body in row.deployables.values())
    ]
    return bulk.delete(tx, table, ids)


def restore_attributes(tx: sa.Connection, restored: Mapping[int, DeployableTombstone]) -> None:
    """Write the attributes of restored deployables, by row id."""
    bulk.insert(
        tx,
        attributes,
        [
            {"uuid": a.uuid, "deployable_id": id_, "key": a.key, "value": a.value}
            for id_, tombstone in restored.items()
            for a in tombstone.attributes
        ],
    )


def _dump(tombstone: DeployableTombstone) -> dict[str, Any]:
    return {
        "uuid": tombstone.uuid,
        "attributes": [
            {"uuid": a.uuid, "key": a.key, "value": a.value} for a in tombstone.attributes
        ],
        "dirty": list(tombstone.dirty_handles),
    }


def _load(body: Mapping[str, Any]) -> DeployableTombstone:
    restored = tuple(Attribute(**a) for a in body["attributes"])
    return DeployableTombstone(body["uuid"], restored, tuple(body.get("dirty", ())))
