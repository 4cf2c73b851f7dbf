# SPDX-License-Identifier: Apache-2.0
"""Seal custody records: give each a sequence number and a hash in the chain of its device.

The row of a chain in ``custody_heads`` is locked by each transaction that changes the chain, so
records are sealed one after the other, by any conductor. The committed rows are sealed in the order
of their ids. A row that is committed late is sealed after rows with higher ids. This does not
change the order of the events of a handle, because a transaction locks the handles of its events.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

from cyborg.core.custody import START, Link, find_head_fault, serialize_head, serialize_progress
from cyborg.db import bulk
from cyborg.db.custody.read import ChainRow, RecordRow, to_head
from cyborg.db.custody.write import keys_of
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import custody_heads as heads
from cyborg.db.schema import custody_records as table
from cyborg.db.schema import devices


class UnsealedRow(RecordRow):
    """A record that is not sealed yet."""

    id: int


class HeadRow(ChainRow):
    """The ends of a chain, to change them."""

    id: int
    oldest_at: datetime | None


_HEAD = (heads.c.id, heads.c.oldest_at, *row_columns(ChainRow, heads))
_UNSEALED = table.c.sequence.is_(None)
_DEVICES: sa.BindParameter[Any] = sa.bindparam("devices", expanding=True)
# SELECT id, sequence, hash, ... FROM custody_heads
#  WHERE device_uuid IN (:devices) ORDER BY device_uuid FOR UPDATE SKIP LOCKED
# Skipped: another conductor seals the records of that device now.
# Built once: SQLAlchemy needs more time to build such a statement than a database to run it.
_LOCK_HEADS = (
    sa.select(*_HEAD)
    .where(heads.c.device_uuid.in_(_DEVICES))
    .order_by(heads.c.device_uuid)
    .with_for_update(skip_locked=True)
)
_UNSEALED_ROWS = sa.select(table.c.id, *row_columns(RecordRow, table))
_FIND_UNSEALED = (
    _UNSEALED_ROWS.where(_UNSEALED, table.c.device_uuid.in_(_DEVICES))
    .order_by(table.c.id)
    .limit(sa.bindparam("max_records", type_=sa.Integer))
)


def unsealed_devices(
    tx: sa.Connection, limit: int, excluded: Collection[str] = (), refused: Collection[int] = ()
) -> dict[str, str]:
    """Return the devices of the oldest ``limit`` unsealed records, as {device uuid: host}.

    ``excluded`` are the uuids of devices, and ``refused`` the row ids of records, to leave out.
    """
    query = sa.select(table.c.device_uuid, table.c.host).where(_UNSEALED)
    if excluded:
        query = query.where(table.c.device_uuid.not_in(sorted(excluded)))
    if refused:
        query = query.where(table.c.id.not_in(sorted(refused)))
    rows = tx.execute(query.order_by(table.c.id).limit(limit))
    return {row.device_uuid: row.host for row in rows}


def add_heads(tx: sa.Connection, hosts: Mapping[str, str]) -> int:
    """Insert the missing heads of these devices; return their number.

    Raise oslo.db's DBDuplicateEntry if another transaction inserts the same head concurrently.
    """
    existing = tx.scalars(
        sa.select(heads.c.device_uuid).where(heads.c.device_uuid.in_(sorted(hosts)))
    )
    missing = sorted(set(hosts) - set(existing))
    if missing:
        start = {"hash": START.hash, "base_hash": START.hash, "checked_hash": START.hash}
        rows = [
            {
                "device_uuid": uuid,
                "host": hosts[uuid],
                **start,
                **_sign(tx, uuid, tip=START, base=START),
            }
            for uuid in missing
        ]
        bulk.insert(tx, heads, rows)
    return len(missing)


def lock_heads(tx: sa.Connection, device_uuids: Collection[str]) -> list[HeadRow]:
    """Lock and return the heads of devices; skip heads that another transaction has locked."""
    return fetch_all(HeadRow, tx.execute(_LOCK_HEADS, {"devices": sorted(device_uuids)}))


def unsealed(
    tx: sa.Connection, device_uuids: Collection[str], limit: int, refused: Collection[int] = ()
) -> list[UnsealedRow]:
    """Return up to ``limit`` unsealed records of devices whose heads the caller has locked.

    ``refused`` are the row ids of records to leave out.
    """
    values = {"devices": sorted(device_uuids), "max_records": limit}
    query = _FIND_UNSEALED
    if refused:
        query = query.where(table.c.id.not_in(sorted(refused)))
    return fetch_all(UnsealedRow, tx.execute(query, values))


def seal(tx: sa.Connection, links: Mapping[int, Link]) -> int:
    """Write sequence and hash of unsealed records, by row id; return how many were written."""
    rows = [
        {"id": id_, "sequence": link.sequence, "hash": link.hash} for id_, link in links.items()
    ]
    columns = {name: table.c[name] for name in ("id", "sequence", "hash")}
    count = 0
    for sealed in bulk.make_tables(tx, columns, rows):
        # The ids again, and a condition without an index: with the join alone, or with the index of
        # the sequence, MariaDB waits for records that other transactions have not committed yet.
        chosen = table.c.id.in_(sorted(links))
        not_sealed = sa.func.coalesce(table.c.sequence, START.sequence) == START.sequence
        update = sa.update(table).where(chosen, table.c.id == sealed.c.id, not_sealed)
        # The signature vouches for a record until it is sealed. If it remained, a copy of the row
        # would be accepted as another new record, and sealed.
        values = {"sequence": sealed.c.sequence, "hash": sealed.c.hash, "signature": None}
        count += tx.execute(update.values(values)).rowcount
    return count


def advance(
    tx: sa.Connection, changed: Sequence[tuple[HeadRow, Link]], oldest: Mapping[str, datetime]
) -> None:
    """Update heads, each with its new last record; the caller has locked the heads.

    ``oldest`` has the time of the first record of each chain by the uuid of its device.
    """
    rows = [
        {
            "id": head["id"],
            "sequence": tip.sequence,
            "hash": tip.hash,
            "oldest_at": oldest.get(head["device_uuid"]),
            **_sign(tx, head["device_uuid"], tip=tip, base=to_head(head).base),
        }
        for head, tip in changed
    ]
    bulk.update(tx, heads, rows)


def expired(tx: sa.Connection, cutoff: datetime, limit: int) -> Sequence[str]:
    """Return the uuids of up to ``limit`` devices whose first record is older than ``cutoff``."""
    query = sa.select(heads.c.device_uuid).where(heads.c.oldest_at < cutoff)
    return tx.scalars(query.order_by(heads.c.oldest_at).limit(limit)).all()


def delete_prefix(tx: sa.Connection, head: HeadRow, base: Link, oldest_at: datetime | None) -> int:
    """Delete the records of a chain up to and including ``base``; return their number.

    The head stores the sequence and the hash of ``base``. ``oldest_at`` is the time of the record
    after ``base``, None if there is no such record or if it must not be deleted. The caller has
    locked the head.
    """
    deleted = tx.execute(
        sa.delete(table).where(
            table.c.device_uuid == head["device_uuid"],
            table.c.sequence > head["base_sequence"],
            table.c.sequence <= base.sequence,
        )
    ).rowcount
    tx.execute(
        sa.update(heads)
        .where(heads.c.id == head["id"])
        .values(
            base_sequence=base.sequence,
            base_hash=base.hash,
            oldest_at=oldest_at,
            **_sign(tx, head["device_uuid"], tip=to_head(head).tip, base=base),
        )
    )
    return deleted


def find_fault(tx: sa.Connection, head: HeadRow) -> str | None:
    """Return why a head was not written by a conductor, None if it was."""
    return find_head_fault(to_head(head), keys_of(tx))


def save_progress(tx: sa.Connection, reached: Mapping[str, Link], now: datetime) -> None:
    """Record where the next audit of chains continues, by the uuid of the device."""
    sequences = {uuid: link.sequence for uuid, link in reached.items()}
    hashes = {uuid: link.hash for uuid, link in reached.items()}
    keys = keys_of(tx)
    signatures = {uuid: keys.sign(serialize_progress(uuid, link)) for uuid, link in reached.items()}
    tx.execute(
        sa.update(heads)
        .where(heads.c.device_uuid.in_(sorted(reached)))
        .values(
            checked_sequence=sa.case(sequences, value=heads.c.device_uuid),
            checked_hash=sa.case(hashes, value=heads.c.device_uuid),
            # Without keys None: the former signature does not fit the new position.
            checked_signature=sa.case(signatures, value=heads.c.device_uuid)
            if keys.secrets
            else None,
            checked_at=now,
        )
    )


def delete_empty_heads(tx: sa.Connection, cutoff: datetime) -> int:
    """Delete the heads that have no records and no existing device; return their number.

    Heads that were created at or after ``cutoff`` are not deleted.
    """
    # The head itself says whether it has sealed records; those not sealed yet count as well.
    has_records = sa.exists().where(table.c.device_uuid == heads.c.device_uuid)
    has_device = sa.exists().where(devices.c.uuid == heads.c.device_uuid)
    return tx.execute(
        sa.delete(heads).where(
            heads.c.oldest_at.is_(None),
            heads.c.sequence == heads.c.base_sequence,
            heads.c.created_at < cutoff,
            sa.not_(has_records),
            sa.not_(has_device),
        )
    ).rowcount


def lock_unanchored(tx: sa.Connection, cutoff: datetime, limit: int) -> list[HeadRow]:
    """Lock and return up to ``limit`` heads whose last notification was before ``cutoff``.

    Skip heads that another transaction has locked.
    """
    query = (
        sa.select(*_HEAD)
        .where(heads.c.anchored_at < cutoff)
        .order_by(heads.c.anchored_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return fetch_all(HeadRow, tx.execute(query))


def mark_anchored(tx: sa.Connection, ids: Sequence[int], now: datetime) -> None:
    """Record the time of the notification with the last records of chains, by row id."""
    tx.execute(sa.update(heads).where(heads.c.id.in_(ids)).values(anchored_at=now))


def next_devices(tx: sa.Connection, after: str, limit: int) -> Sequence[str]:
    """Return the uuids of up to ``limit`` devices with a head after a uuid, in order."""
    query = sa.select(heads.c.device_uuid).where(heads.c.device_uuid > after)
    return tx.scalars(query.order_by(heads.c.device_uuid).limit(limit)).all()


def sign_head(tx: sa.Connection, head: HeadRow) -> None:
    """Replace the signature of a head, which the caller has locked."""
    ends = to_head(head)
    values = _sign(tx, ends.device, tip=ends.tip, base=ends.base)
    tx.execute(sa.update(heads).where(heads.c.id == head["id"]).values(values))


class Chain(NamedTuple):
    """A chain: the uuid of its device, and the host of the device."""

    device: str
    host: str


def remove_signatures(tx: sa.Connection, after: str, limit: int) -> list[Chain]:
    """Remove the signatures of up to ``limit`` heads after the uuid of a device.

    Return their chains.
    """
    query = sa.select(heads.c.device_uuid, heads.c.host).where(
        heads.c.device_uuid > after, heads.c.signature.is_not(None)
    )
    rows = tx.execute(query.order_by(heads.c.device_uuid).limit(limit).with_for_update()).all()
    tx.execute(
        sa.update(heads)
        .where(heads.c.device_uuid.in_([row.device_uuid for row in rows]))
        .values(signature=None, checked_signature=None)
    )
    return [Chain(row.device_uuid, row.host) for row in rows]


def remove_new_signatures(tx: sa.Connection) -> int:
    """Remove the signatures of the records that are in no chain; return their number."""
    query = sa.update(table).where(_UNSEALED, table.c.signature.is_not(None))
    return tx.execute(query.values(signature=None)).rowcount


def new_records_after(tx: sa.Connection, last: int, limit: int) -> list[UnsealedRow]:
    """Return up to ``limit`` records that are in no chain, after a row id, in order."""
    query = _UNSEALED_ROWS.where(_UNSEALED, table.c.id > last).order_by(table.c.id).limit(limit)
    return fetch_all(UnsealedRow, tx.execute(query))


def save_signatures(tx: sa.Connection, signatures: Mapping[int, str]) -> None:
    """Write the signatures of records that are in no chain, by row id."""
    bulk.update(
        tx, table, [{"id": id_, "signature": signature} for id_, signature in signatures.items()]
    )


def _sign(tx: sa.Connection, device: str, *, tip: Link, base: Link) -> dict[str, str]:
    """Return the column with the signature of a head; without keys none, so none is removed."""
    signature = keys_of(tx).sign(serialize_head(device, tip, base))
    return {} if signature is None else {"signature": signature}
