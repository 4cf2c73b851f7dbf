# SPDX-License-Identifier: Apache-2.0
"""Write attach handles as a host reports them; ``db.binding.claims`` writes their owners."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypedDict
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.inventory.device import AttachHandle, HandleType
from cyborg.db import bulk, joins
from cyborg.db.binding.write import ArqRow
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import arqs, attach_handles, deployables, devices


class HandleRow(TypedDict):
    """A handle, with the addresses of its device and its deployable.

    ``set_id`` is the row id of the device set through which it was claimed, None for none.
    """

    id: int
    address: str
    type: str
    info: dict[str, Any]
    draining: bool
    arq_id: int | None
    needs_cleaning: bool
    set_id: int | None
    deployable: str
    device: str


class OwnedHandleRow(TypedDict):
    """A handle that an ARQ owns; ``instance_uuid`` is None under a lease, and for a host.

    ``device`` is the address of its card.
    """

    address: str
    device: str
    type: str
    info: dict[str, Any]
    instance_uuid: str | None


class OwnerRow(ArqRow):
    """An ARQ that owns a handle, and the row id of the handle."""

    handle: int


def of_host(tx: sa.Connection, host: str) -> list[HandleRow]:
    """Return every handle of a host."""
    query = sa.select(*row_columns(HandleRow, attach_handles, **joins.ADDRESSES)).select_from(
        joins.HANDLES
    )
    return fetch_all(HandleRow, tx.execute(query.where(devices.c.host == host)))


def owned(tx: sa.Connection, host: str) -> list[OwnedHandleRow]:
    """Return the handles of a host that ARQs own."""
    query = (
        sa.select(*row_columns(OwnedHandleRow, attach_handles, arqs, device=devices.c.address))
        .join(arqs, arqs.c.id == attach_handles.c.arq_id)
        .join(deployables, deployables.c.id == attach_handles.c.deployable_id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(devices.c.host == host)
    )
    return fetch_all(OwnedHandleRow, tx.execute(query))


def to_handle(row: HandleRow) -> AttachHandle:
    """Convert a row to the value that describes a reported handle."""
    return AttachHandle(row["address"], HandleType(row["type"]), row["info"])


class NewHandle(NamedTuple):
    """A handle to insert, with the row id of its deployable; without ``uuid``, it gets one."""

    deployable_id: int
    value: AttachHandle
    uuid: str | None
    needs_cleaning: bool  # before its first use


def add(tx: sa.Connection, new: Iterable[NewHandle]) -> None:
    """Insert handles."""
    bulk.insert(
        tx,
        attach_handles,
        [
            {
                "uuid": uuid or str(uuid4()),
                "deployable_id": deployable_id,
                "address": value.address,
                "type": str(value.type),
                "info": dict(value.info),
                "draining": False,
                "needs_cleaning": needs_cleaning,
            }
            for deployable_id, value, uuid, needs_cleaning in new
        ],
    )


def update(tx: sa.Connection, changed: Mapping[int, AttachHandle]) -> None:
    """Write the reported values of handles, by row id; draining handles become available again."""
    bulk.update(
        tx,
        attach_handles,
        [
            {"id": id_, "type": str(h.type), "info": dict(h.info), "draining": False}
            for id_, h in changed.items()
        ],
    )


def mark_draining(tx: sa.Connection, ids: Collection[int]) -> None:
    """Mark handles, by row id, that were removed from the host but are still owned or dirty."""
    bulk.update_where(tx, attach_handles.c.id, ids, draining=True)


def lock(tx: sa.Connection, ids: Collection[int]) -> dict[int, int | None]:
    """Lock handles, by row id, against claims; return the handles that must stay.

    The result has, by row id, the set through which each was claimed, None for none.

    Owned and dirty handles must not be deleted. If a dirty handle were deleted, and a handle with
    the same address were added later, the cleaning job of the deleted handle could clean the new
    handle while an ARQ owns it.

    SQLite has no row locks and needs none, because it allows one writer at a time.
    """
    pinned: dict[int, int | None] = {}
    h = attach_handles.c
    # In the order of ids, as in a claim that waits: else both could wait for each other.
    for chunk in bulk.chunks(sorted(ids)):
        query = (
            sa.select(h.id, h.set_id, h.arq_id, h.needs_cleaning)
            .where(attach_handles.c.id.in_(chunk))
            .order_by(attach_handles.c.id)
            .with_for_update()
        )
        pinned |= {
            r.id: r.set_id for r in tx.execute(query) if r.arq_id is not None or r.needs_cleaning
        }
    return pinned


def force_clean(tx: sa.Connection, ids: Collection[int]) -> None:
    """Mark dirty handles, by row id, as clean without cleaning, so that they can be deleted.

    The caller must delete them in the same transaction, so that no ARQ can claim them.
    """
    # The owner is the guard: an owned handle keeps its mark until its release.
    unowned = attach_handles.c.arq_id.is_(None)
    values = {"needs_cleaning": False, "job_id": None, "set_id": None}
    bulk.update_where(tx, attach_handles.c.id, ids, unowned, **values)


def abandon_sets(tx: sa.Connection, ids: Collection[int]) -> None:
    """Make dirty handles, by row id, be cleaned without the work of the sets of their claims."""
    unowned = attach_handles.c.arq_id.is_(None)
    bulk.update_where(tx, attach_handles.c.id, ids, unowned, set_id=None)


def delete_clean(tx: sa.Connection, ids: Collection[int]) -> int:
    """Delete the handles, by row id, that are clean and not owned; return their number."""
    clean = (attach_handles.c.arq_id.is_(None), sa.not_(attach_handles.c.needs_cleaning))
    return bulk.delete_where(tx, attach_handles.c.id, ids, *clean)


def owners(tx: sa.Connection, ids: Collection[int]) -> list[OwnerRow]:
    """Return the ARQs that own these handles.

    Within each chunk of handles the rows are ordered by ARQ id.
    """
    rows: list[OwnerRow] = []
    for chunk in bulk.chunks(ids):
        query = (
            sa.select(arqs, attach_handles.c.id.label("handle"))
            .join(attach_handles, attach_handles.c.arq_id == arqs.c.id)
            .where(attach_handles.c.id.in_(chunk))
            .order_by(arqs.c.id)
        )
        rows += fetch_all(OwnerRow, tx.execute(query))
    return rows
