# SPDX-License-Identifier: Apache-2.0
"""Write requested discoveries: one row for each backend of each host that must answer.

A row starts IN-PROGRESS. The first outcome is final: the agent's report, the failure to reach the
agent, or the timeout. A discovery is open while one of its rows is in progress. At most one open
discovery has given filters: one of its rows has their key in ``mutex_key``, which is unique.
"""

import hashlib
import json
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple, TypedDict

import sqlalchemy as sa

from cyborg.core.hosts import AGENT
from cyborg.db import bulk
from cyborg.db.rows import equal, fetch_all, row_columns
from cyborg.db.schema import backends, discoveries, services

IN_PROGRESS = "IN-PROGRESS"
DONE = "DONE"
FAILED = "FAILED"


class TargetRow(TypedDict):
    """A backend to discover; ``host_down`` is whether its agent is marked down."""

    host: str
    backend: str
    driver: str
    host_down: bool


def targets(tx: sa.Connection, host: str | None, driver: str | None) -> list[TargetRow]:
    """Return the backends of a host and a driver; None selects all.

    ``driver`` is the name of a driver or of a backend.
    """
    down = services.c.down_since.is_not(None)
    query = (
        sa.select(
            *row_columns(TargetRow, services, backends, backend=backends.c.name, host_down=down)
        )
        .join(services, services.c.id == backends.c.service_id)
        .where(services.c.binary == AGENT)
        .order_by(services.c.host, backends.c.name)
    )
    query = query.where(*equal({services.c.host: host}))
    if driver is not None:
        query = query.where(sa.or_(backends.c.driver == driver, backends.c.name == driver))
    return fetch_all(TargetRow, tx.execute(query))


def mutex_key(host: str | None, driver: str | None) -> str:
    """Return the key of the filters of a discovery: 64 characters."""
    # A hash: two names are longer than the column may be.
    return hashlib.sha256(json.dumps([host, driver]).encode()).hexdigest()


def find_open(tx: sa.Connection, key: str) -> str | None:
    """Return the uuid of the open discovery with a key, or None; then the key is free."""
    d = discoveries.c
    uuid: str | None = tx.scalar(sa.select(d.uuid).where(d.mutex_key == key))
    if uuid is None:
        return None
    in_progress = sa.select(d.id).where(d.uuid == uuid, d.state == IN_PROGRESS).limit(1)
    if tx.scalar(in_progress) is not None:
        return uuid
    # An ended discovery never opens again. This is no change of it, so updated_at remains.
    has_key = (d.mutex_key == key, d.uuid == uuid)
    tx.execute(
        sa.update(discoveries).where(*has_key).values(mutex_key=None, updated_at=d.updated_at)
    )
    return None


def count_open(tx: sa.Connection) -> int:
    """Return the number of open discoveries."""
    uuids = sa.func.count(discoveries.c.uuid.distinct())
    return tx.scalar(sa.select(uuids).where(discoveries.c.state == IN_PROGRESS)) or 0


class Target(NamedTuple):
    """A backend of a discovery; one with an error has failed already."""

    host: str
    backend: str
    error: str | None


def add(tx: sa.Connection, uuid: str, key: str, targets: Iterable[Target]) -> None:
    """Record that a discovery was requested from these targets.

    If all have failed already, the discovery has no key. Raise oslo.db's DBDuplicateEntry if
    another discovery has the key.
    """
    # For the first row that is in progress: the column is unique.
    keys = iter([key])
    bulk.insert(
        tx,
        discoveries,
        [
            {
                "uuid": uuid,
                "host": target.host,
                "backend": target.backend,
                "state": IN_PROGRESS if target.error is None else FAILED,
                "error": target.error,
                "mutex_key": next(keys, None) if target.error is None else None,
            }
            for target in targets
        ],
    )


class Outcome(NamedTuple):
    """The state in which the discovery of a backend ended, and its error."""

    backend: str
    state: str
    error: str | None


def record_outcomes(tx: sa.Connection, uuid: str, host: str, outcomes: Iterable[Outcome]) -> int:
    """Record outcomes; a final state does not change.

    Return the number of backends whose outcome was recorded.
    """
    d = discoveries.c
    columns = {name: d[name] for name in Outcome._fields}
    rows = [outcome._asdict() for outcome in sorted(outcomes, key=lambda item: item.backend)]
    num_recorded = 0
    for reported in bulk.make_tables(tx, columns, rows):  # the outcomes as a table to join
        in_progress = sa.update(discoveries).where(
            d.uuid == uuid, d.host == host, d.backend == reported.c.backend, d.state == IN_PROGRESS
        )
        result = tx.execute(in_progress.values(state=reported.c.state, error=reported.c.error))
        num_recorded += result.rowcount
    return num_recorded


def fail_host(tx: sa.Connection, uuid: str, host: str, error: str) -> int:
    """Record that a host could not be reached; return the number of its failed backends."""
    return tx.execute(
        sa.update(discoveries)
        .where(
            discoveries.c.uuid == uuid,
            discoveries.c.host == host,
            discoveries.c.state == IN_PROGRESS,
        )
        .values(state=FAILED, error=error)
    ).rowcount


def delete_of_host(tx: sa.Connection, host: str) -> int:
    """Delete the rows of a host; return their number."""
    return tx.execute(sa.delete(discoveries).where(discoveries.c.host == host)).rowcount


def fail_older(tx: sa.Connection, cutoff: datetime, error: str) -> int:
    """Fail the rows created before ``cutoff`` that are still in progress; return their number."""
    late = (discoveries.c.state == IN_PROGRESS, discoveries.c.created_at < cutoff)
    # A SELECT first: on MariaDB an UPDATE without a match still locks the rows that it scans.
    ids = tx.scalars(sa.select(discoveries.c.id).where(*late).order_by(discoveries.c.id)).all()
    return bulk.update_where(tx, discoveries.c.id, ids, *late, state=FAILED, error=error)
