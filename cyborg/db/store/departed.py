# SPDX-License-Identifier: Apache-2.0
"""Writing what is remembered of devices that have gone from their host.

The caller holds the row of the host's agent: nobody else writes of that host.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.core.departed import Attribute, Departed, Part
from cyborg.db.schema import attributes, departed
from cyborg.db.store import bulk


def of_host(tx: sa.Connection, host: str, addresses: Collection[str]) -> dict[str, Departed]:
    """Return what is remembered of these devices of a host, by address."""
    found: dict[str, Departed] = {}
    for some in bulk.chunks(sorted(addresses)):
        query = sa.select(
            departed.c.address, departed.c.uuid, departed.c.status, departed.c.parts
        ).where(departed.c.host == host, departed.c.address.in_(some))
        for row in tx.execute(query):
            parts = {address: _part(body) for address, body in row.parts.items()}
            found[row.address] = Departed(row.uuid, row.status, parts)
    return found


def replace(
    tx: sa.Connection,
    host: str,
    before: Mapping[str, Departed],
    after: Mapping[str, Departed],
    now: datetime,
) -> None:
    """Remember these devices of a host in place of those; what is equal is not written."""
    differ = sorted(a for a in {*before, *after} if before.get(a) != after.get(a))
    for some in bulk.chunks([address for address in differ if address in before]):
        tx.execute(sa.delete(departed).where(departed.c.host == host, departed.c.address.in_(some)))
    bulk.insert(
        tx,
        departed,
        [
            {
                "uuid": after[address].uuid,
                "host": host,
                "address": address,
                "status": after[address].status,
                "parts": {key: _body(part) for key, part in after[address].parts.items()},
                "created_at": now,
            }
            for address in differ
            if address in after
        ],
    )


def purge(tx: sa.Connection, before: datetime, limit: int) -> int:
    """Forget up to ``limit`` of what has been remembered since before ``before``; say how many.

    Rows are never changed, so that the oldest have the lowest ids: no more than these are read.
    """
    oldest = (
        sa.select(departed.c.id, departed.c.created_at).order_by(departed.c.id).limit(limit)
    ).subquery()
    ids = tx.scalars(sa.select(oldest.c.id).where(oldest.c.created_at < before)).all()
    return bulk.delete(tx, departed, ids) if ids else 0


def attributes_of(
    tx: sa.Connection, deployables: Collection[int]
) -> dict[int, tuple[Attribute, ...]]:
    """Return operators' attributes of deployables by row id; those without any are absent."""
    found: dict[int, tuple[Attribute, ...]] = {}
    for some in bulk.chunks(deployables):
        query = (sa.select(attributes).where(attributes.c.deployable_id.in_(some))).order_by(
            attributes.c.id
        )
        for row in tx.execute(query):
            one = Attribute(row.uuid, row.key, row.value)
            found[row.deployable_id] = (*found.get(row.deployable_id, ()), one)
    return found


def give_attributes(tx: sa.Connection, given: Sequence[tuple[int, Part]]) -> None:
    """Write the attributes of deployables that are back, by row id."""
    bulk.insert(
        tx,
        attributes,
        [
            {"uuid": one.uuid, "deployable_id": id_, "key": one.key, "value": one.value}
            for id_, part in given
            for one in part.attributes
        ],
    )


def _body(part: Part) -> dict[str, Any]:
    return {
        "uuid": part.uuid,
        "attributes": [
            {"uuid": one.uuid, "key": one.key, "value": one.value} for one in part.attributes
        ],
        "dirty": list(part.dirty),
    }


def _part(body: Mapping[str, Any]) -> Part:
    given = tuple(Attribute(**one) for one in body["attributes"])
    return Part(body["uuid"], given, tuple(body.get("dirty", ())))
