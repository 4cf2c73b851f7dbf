# SPDX-License-Identifier: Apache-2.0
"""Record events of the custody logs, in the transaction that makes the change.

The engine of the transaction has the keys of ``[conductor] custody_key_file``.
"""

from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import TypedDict
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.core.custody import NO_KEYS, Entry, Keys, Record, parse_keys, serialize_new
from cyborg.core.errors import Invalid, Misconfigured
from cyborg.db import bulk, joins
from cyborg.db.rows import fetch_all, fetch_first, row_columns
from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import custody_records, deployables, devices

_OPTION = "cyborg_custody_keys"


def load(conf: cfg.ConfigOpts) -> Keys:
    """Return the keys of the file, NO_KEYS without a file. Raise Misconfigured."""
    if not (name := conf.conductor.custody_key_file):
        return NO_KEYS
    try:
        return parse_keys(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, Invalid) as exc:
        raise Misconfigured(
            f"[conductor] custody_key_file: cannot read the keys of {name}: {exc}",
            option="[conductor] custody_key_file",
        ) from exc


def attach(engine: sa.Engine, keys: Keys) -> sa.Engine:
    """Return the engine, with the same connections, whose transactions sign with ``keys``."""
    return engine.execution_options(**{_OPTION: keys})


def keys_of(connection: sa.Connection) -> Keys:
    """Return the keys of the engine of a connection."""
    keys: Keys = connection.get_execution_options().get(_OPTION, NO_KEYS)
    return keys


class HandleRow(TypedDict):
    """A handle with the owner's row id, and its device's uuid, host and abilities."""

    uuid: str
    address: str
    arq_id: int | None
    needs_cleaning: bool
    deployable: str
    device: str
    host: str
    abilities: list[str]


class DeviceHostRow(TypedDict):
    """The uuid and the host of a device, and the address of one of its deployables."""

    device: str
    host: str
    deployable: str


_PLACE = {"device": devices.c.uuid, "deployable": deployables.c.address}
_HANDLES = (
    sa.select(*row_columns(HandleRow, handles, devices, **_PLACE))
    .select_from(joins.HANDLES)
    .order_by(handles.c.id)
)
# SELECT h.uuid, h.address, ..., dev.uuid, dev.host, dev.abilities
#   FROM attach_handles h JOIN deployables d ... JOIN devices dev ...
#  WHERE h.arq_id IN (:arq_ids)       -- or h.job_id = :job_id AND h.arq_id IS NULL
#  ORDER BY h.id                      -- the order in which the records are written
# Built once: SQLAlchemy needs more time to build such a statement than a database to run it.
_OF_ARQS = _HANDLES.where(handles.c.arq_id.in_(sa.bindparam("arq_ids", expanding=True)))
_OF_JOB = _HANDLES.where(
    handles.c.job_id == sa.bindparam("job_id", type_=sa.BigInteger), handles.c.arq_id.is_(None)
)


def add(tx: sa.Connection, entries: Collection[Entry], now: datetime) -> None:
    """Record events with one INSERT, after the changes that they record; do nothing for none.

    The changes lock what they change, so a later event of the same handle gets a higher row id.
    """
    keys = keys_of(tx)
    rows = []
    for entry in entries:
        record = Record(
            uuid=str(uuid4()),
            device=entry.device,
            sequence=0,  # not sealed yet
            time=now,
            host=entry.host,
            event=str(entry.event),
            details=dict(entry.details),
        )
        row = {
            "uuid": record.uuid,
            "device_uuid": record.device,
            "host": record.host,
            "event": record.event,
            "recorded_at": now,
            "details": record.details,
        }
        signature = keys.sign(serialize_new(record)) if keys.secrets else None
        # With keys or without, all rows have the same columns, as an INSERT of many rows needs.
        rows.append(row if signature is None else {**row, "signature": signature})
    bulk.insert(tx, custody_records, rows)


def handles_of_arqs(tx: sa.Connection, arq_ids: Collection[int]) -> list[HandleRow]:
    """Return the handles that ARQs own, by row id of the ARQ."""
    return fetch_all(HandleRow, tx.execute(_OF_ARQS, {"arq_ids": list(arq_ids)}))


def handles_to_clean(tx: sa.Connection, job_id: int) -> list[HandleRow]:
    """Return the handles that a job cleans."""
    return fetch_all(HandleRow, tx.execute(_OF_JOB, {"job_id": job_id}))


def device_of(tx: sa.Connection, deployable_uuid: str) -> DeviceHostRow | None:
    """Return the device of a deployable, None if the deployable does not exist."""
    query = (
        sa.select(*row_columns(DeviceHostRow, devices, **_PLACE))
        .join(deployables, deployables.c.device_id == devices.c.id)
        .where(deployables.c.uuid == deployable_uuid)
    )
    return fetch_first(DeviceHostRow, tx.execute(query))
