# SPDX-License-Identifier: Apache-2.0
"""Read the custody logs of devices, also of devices that no longer exist.

Fields of a record: uuid, device_uuid, host, event, recorded_at (naive UTC), details (an object),
and sequence and hash, both None until the record is sealed.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.custody import Head, Link, NewRecord, Record, SealedRecord
from cyborg.db.listing import Listing, columns_of
from cyborg.db.rows import fetch_all, fetch_first, row_columns
from cyborg.db.schema import custody_heads, devices
from cyborg.db.schema import custody_records as table


class RecordRow(TypedDict):
    """A record of a custody log."""

    uuid: str
    device_uuid: str
    host: str
    event: str
    recorded_at: datetime
    details: dict[str, Any]
    sequence: int | None
    hash: str | None
    signature: str | None


class ChainRow(TypedDict):
    """The ends of the chain of a device, and where the next audit continues."""

    device_uuid: str
    sequence: int
    hash: str
    base_sequence: int
    base_hash: str
    signature: str | None
    checked_sequence: int
    checked_hash: str
    checked_signature: str | None


class LateRow(TypedDict):
    """The number of old unsealed records of a device, and the time of the oldest record."""

    device_uuid: str
    count: int
    oldest_at: datetime


COLUMNS = row_columns(RecordRow, table)
SORTABLE = columns_of(table, "sequence", "recorded_at", "event")
RECORDS = Listing(
    row=RecordRow,
    table=table,
    columns=COLUMNS,
    sortable=SORTABLE,
    filters=columns_of(table, "device_uuid", "event"),
)
find = RECORDS.find
_CHAINS = sa.select(*row_columns(ChainRow, custody_heads))


def chain(connection: sa.Connection, device_uuid: str) -> ChainRow | None:
    """Return the ends of the chain of a device, None if no record of it was ever sealed."""
    query = _CHAINS.where(custody_heads.c.device_uuid == device_uuid)
    return fetch_first(ChainRow, connection.execute(query))


def has_device(connection: sa.Connection, device_uuid: str) -> bool:
    """Return whether a device exists."""
    query = sa.select(devices.c.id).where(devices.c.uuid == device_uuid)
    return connection.execute(query).first() is not None


def chains_of_host(connection: sa.Connection, host: str, limit: int) -> list[ChainRow]:
    """Return up to ``limit`` chains of a host, the least recently checked chain first."""
    query = _CHAINS.where(custody_heads.c.host == host)
    query = query.order_by(custody_heads.c.checked_at, custody_heads.c.id).limit(limit)
    return fetch_all(ChainRow, connection.execute(query))


def sealed_after(
    connection: sa.Connection, device_uuid: str, sequence: int | None, limit: int
) -> list[SealedRecord]:
    """Return up to ``limit`` sealed records of a device after a sequence number, in order.

    None is before every number, also one that no conductor gave.
    """
    later = table.c.sequence.is_not(None) if sequence is None else table.c.sequence > sequence
    query = (
        sa.select(*COLUMNS)
        .where(table.c.device_uuid == device_uuid, later)
        .order_by(table.c.sequence)
        .limit(limit)
    )
    rows = fetch_all(RecordRow, connection.execute(query))
    return [to_sealed_record(row) for row in rows]


def devices_without_head(connection: sa.Connection, host: str, limit: int) -> Sequence[str]:
    """Return the uuids of up to ``limit`` devices with sealed records of a host, but no head of it.

    Such a head was deleted or changed by hand: a head exists before the first record is sealed, and
    is deleted after the last record.
    """
    recorded = sa.select(table.c.device_uuid).where(table.c.host == host).distinct().subquery()
    uuid = recorded.c.device_uuid
    query = sa.select(uuid).where(sa.not_(_has_head(uuid, host))).order_by(uuid).limit(limit)
    headless = connection.scalars(query).all()
    if not headless:
        return ()
    # An own statement: as a semi-join MariaDB would read all records of all hosts first. Devices
    # whose first record is not sealed yet are excluded.
    sealed = sa.select(table.c.device_uuid).where(
        table.c.device_uuid.in_(headless), table.c.sequence.is_not(None)
    )
    return connection.scalars(sealed.distinct().order_by(table.c.device_uuid)).all()


def devices_without_log(connection: sa.Connection, host: str, limit: int) -> Sequence[str]:
    """Return the uuids of up to ``limit`` existing devices of a host with no record and no head.

    Record and head were deleted by hand: each new device gets a record in the same transaction, and
    this service never deletes the head of an existing device.
    """
    recorded = sa.exists().where(table.c.device_uuid == devices.c.uuid)
    query = sa.select(devices.c.uuid).where(
        devices.c.host == host, sa.not_(_has_head(devices.c.uuid, host)), sa.not_(recorded)
    )
    return connection.scalars(query.order_by(devices.c.uuid).limit(limit)).all()


def _has_head(uuid: sa.ColumnElement[str], host: str) -> sa.ColumnElement[bool]:
    # A head of another host does not count: an audit reads the heads by host.
    return sa.exists().where(custody_heads.c.device_uuid == uuid, custody_heads.c.host == host)


def new_records(connection: sa.Connection, host: str, limit: int) -> list[NewRecord]:
    """Return up to ``limit`` records of a host that are not sealed, the newest first."""
    query = sa.select(*COLUMNS).where(table.c.sequence.is_(None), table.c.host == host)
    rows = connection.execute(query.order_by(table.c.id.desc()).limit(limit))
    return [NewRecord(to_record(row), row["signature"]) for row in fetch_all(RecordRow, rows)]


def late(connection: sa.Connection, host: str, cutoff: datetime) -> list[LateRow]:
    """Return the devices of a host with unsealed records from before ``cutoff``."""
    oldest = sa.func.min(table.c.recorded_at)
    query = (
        sa.select(*row_columns(LateRow, table, count=sa.func.count(), oldest_at=oldest))
        .where(table.c.sequence.is_(None), table.c.host == host, table.c.recorded_at < cutoff)
        .group_by(table.c.device_uuid)
        .order_by(table.c.device_uuid)
    )
    return fetch_all(LateRow, connection.execute(query))


def to_record(row: RecordRow) -> Record:
    """Return a row as a value, with the sequence number 0 if it is not sealed."""
    # The numbers of a chain begin with 1, so 0 cannot be that of a sealed record. A Record with an
    # optional number would make every reader of a chain check it.
    return Record(
        uuid=row["uuid"],
        device=row["device_uuid"],
        sequence=row["sequence"] or 0,
        time=row["recorded_at"],
        host=row["host"],
        event=row["event"],
        details=row["details"],
    )


def to_sealed_record(row: RecordRow) -> SealedRecord:
    """Return a sealed row as a value."""
    # Sequence and hash are set together. A row that lacks its hash was changed by others: with an
    # empty one the check of the chain fails, and names the record, instead of an exception here.
    return SealedRecord(to_record(row), row["hash"] or "")


def to_head(row: ChainRow) -> Head:
    """Return the ends of a chain as a value."""
    return Head(row["device_uuid"], tip(row), base(row), row["signature"])


def tip(row: ChainRow) -> Link:
    """Return the last record of a chain."""
    return Link(row["sequence"], row["hash"])


def base(row: ChainRow) -> Link:
    """Return the last record that was removed after its retention, or the start of the chain."""
    return Link(row["base_sequence"], row["base_hash"])
