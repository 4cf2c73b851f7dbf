# SPDX-License-Identifier: Apache-2.0
"""Writing attach handles as a host reports them; who owns them is the matter of ``claims``."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.device import AttachHandle, HandleType
from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import deployables, devices, requests
from cyborg.db.store import bulk


def of_host(tx: sa.Connection, host: str) -> Sequence[sa.RowMapping]:
    """Return what is known of every handle of a host.

    Keys: id, address, type, info, draining, request_id, prepared, and ``device`` and
    ``deployable``: the addresses above it.
    """
    query = (
        sa.select(
            handles.c.id,
            handles.c.address,
            handles.c.type,
            handles.c.info,
            handles.c.draining,
            handles.c.request_id,
            handles.c.prepared,
            deployables.c.address.label("deployable"),
            devices.c.address.label("device"),
        )
        .join(deployables, deployables.c.id == handles.c.deployable_id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(devices.c.host == host)
    )
    return tx.execute(query).mappings().all()


def value(row: Mapping[Any, Any]) -> AttachHandle:
    """Return a row as the handle that was reported."""
    return AttachHandle(row["address"], HandleType(row["type"]), row["info"])


def add(
    tx: sa.Connection,
    new: Iterable[tuple[int, AttachHandle]],
    dirty: Collection[tuple[int, str]] = (),
) -> None:
    """Add handles, each to the deployable of that row id.

    ``dirty`` are those, by that and their address, that must be cleaned before anybody gets them.
    """
    bulk.insert(
        tx,
        handles,
        [
            {
                "uuid": str(uuid4()),
                "deployable_id": deployable_id,
                "address": h.address,
                "type": str(h.type),
                "info": dict(h.info),
                "draining": False,
                "prepared": (deployable_id, h.address) in dirty,
            }
            for deployable_id, h in new
        ],
    )


def change(tx: sa.Connection, changed: Mapping[int, AttachHandle]) -> None:
    """Write what is reported now, by row id; a draining handle is back then."""
    bulk.update(
        tx,
        handles,
        [
            {"id": id_, "type": str(h.type), "info": dict(h.info), "draining": False}
            for id_, h in changed.items()
        ],
    )


def drain(tx: sa.Connection, gone: Collection[int]) -> None:
    """Mark handles, by row id, that the host has no longer but that are owned or dirty."""
    for some in bulk.chunks(gone):
        tx.execute(sa.update(handles).where(handles.c.id.in_(some)).values(draining=True))


def lock(tx: sa.Connection, which: Collection[int]) -> set[int]:
    """Keep these handles, by row id, from being claimed until the end; return those that must stay.

    That are those with an owner, and dirty ones: a handle that came back under the same address
    while its old self is still being cleaned would be taken from its new owner.

    A database without row locks (SQLite) lets one writer in at a time and needs none.
    """
    owned: set[int] = set()
    for some in bulk.chunks(which):
        query = (
            sa.select(handles.c.id, handles.c.request_id, handles.c.prepared)
            .where(handles.c.id.in_(some))
            .order_by(handles.c.id)
            .with_for_update()
        )
        owned |= {r.id for r in tx.execute(query) if r.request_id is not None or r.prepared}
    return owned


def let_go(tx: sa.Connection, which: Collection[int]) -> None:
    """Have dirty handles, by row id, count as clean, so that they can go with what they are of.

    Nobody gets one before: the caller removes them in the same transaction.
    """
    for some in bulk.chunks(which):
        mine = sa.and_(handles.c.id.in_(some), handles.c.request_id.is_(None))
        tx.execute(sa.update(handles).where(mine).values(prepared=False, job_id=None))


def remove(tx: sa.Connection, gone: Collection[int]) -> int:
    """Delete clean handles, by row id, that nobody owns, and return how many those were."""
    return sum(
        tx.execute(
            sa.delete(handles).where(
                handles.c.id.in_(some),
                handles.c.request_id.is_(None),
                sa.not_(handles.c.prepared),
            )
        ).rowcount
        for some in bulk.chunks(gone)
    )


def owners(tx: sa.Connection, which: Collection[int]) -> list[sa.RowMapping]:
    """Return the requests that own these handles, by row id: their rows with ``handle``, that id.

    They come in the order of their ids.
    """
    found: list[sa.RowMapping] = []
    for some in bulk.chunks(which):
        query = (
            sa.select(requests, handles.c.id.label("handle"))
            .join(handles, handles.c.request_id == requests.c.id)
            .where(handles.c.id.in_(some))
            .order_by(requests.c.id)
        )
        found += tx.execute(query).mappings().all()
    return found
