# SPDX-License-Identifier: Apache-2.0
"""Write requested discoveries, with a row for each backend of each host that must answer.

A backend starts IN-PROGRESS. The first outcome is final: the agent's report, the failure to reach
the agent, or the timeout. A discovery is open while one of its backends is in progress. At most one
open discovery has given filters: it has their key in ``mutex_key``, which is unique.

A discovery has the numbers of its backends by state, so that no list counts them. Each function
that changes backends changes the numbers by as many, after the backends: all lock in this order.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypedDict

import sqlalchemy as sa

from cyborg.core.hosts import AGENT
from cyborg.db import bulk
from cyborg.db.rows import equal, fetch_all, row_columns
from cyborg.db.schema import backends, discoveries, discovery_backends, services

IN_PROGRESS = "IN-PROGRESS"
DONE = "DONE"
FAILED = "FAILED"

# The columns of a discovery that count its backends, by their state.
_COUNTS = {
    IN_PROGRESS: discoveries.c.in_progress,
    DONE: discoveries.c.done,
    FAILED: discoveries.c.failed,
}


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
    row = tx.execute(sa.select(d.uuid, d.in_progress).where(d.mutex_key == key)).first()
    if row is None or row.in_progress:
        return None if row is None else str(row.uuid)
    # An ended discovery never opens again. This is no change of it, so updated_at remains.
    has_key = (d.mutex_key == key, d.uuid == row.uuid)
    tx.execute(
        sa.update(discoveries).where(*has_key).values(mutex_key=None, updated_at=d.updated_at)
    )
    return None


def count_open(tx: sa.Connection) -> int:
    """Return the number of open discoveries."""
    query = sa.select(sa.func.count()).where(discoveries.c.in_progress > 0)
    return tx.scalar(query) or 0


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
    rows = [
        {**target._asdict(), "state": IN_PROGRESS if target.error is None else FAILED}
        for target in targets
    ]
    counts = Counter(row["state"] for row in rows)
    id_ = bulk.insert_row(
        tx,
        discoveries,
        uuid=uuid,
        in_progress=counts[IN_PROGRESS],
        failed=counts[FAILED],
        mutex_key=key if counts[IN_PROGRESS] else None,
    )
    bulk.insert(tx, discovery_backends, [{"discovery_id": id_, **row} for row in rows])


class Outcome(NamedTuple):
    """The state in which the discovery of a backend ended, and its error."""

    backend: str
    state: str
    error: str | None


def record_outcomes(tx: sa.Connection, uuid: str, host: str, outcomes: Iterable[Outcome]) -> int:
    """Record outcomes; a final state does not change.

    Return the number of backends whose outcome was recorded.
    """
    b = discovery_backends.c
    columns = {name: b[name] for name in Outcome._fields}
    by_state = defaultdict[str, list[Mapping[str, Any]]](list)
    for outcome in sorted(outcomes, key=lambda item: item.backend):
        by_state[outcome.state].append(outcome._asdict())
    id_, num_recorded = _find_id(tx, uuid), Counter[str]()
    # One statement for each state: its row count is what changes in the numbers.
    for state, rows in sorted(by_state.items()):
        for reported in bulk.make_tables(tx, columns, rows):  # the outcomes as a table to join
            pending = _in_progress(id_, host, b.backend == reported.c.backend)
            result = tx.execute(pending.values(state=state, error=reported.c.error))
            num_recorded[state] += result.rowcount
    _add_to_counts(tx, {id_: _ended(num_recorded)})
    return num_recorded.total()


def fail_host(tx: sa.Connection, uuid: str, host: str, error: str) -> int:
    """Record that a host could not be reached; return the number of its failed backends."""
    id_ = _find_id(tx, uuid)
    failed = tx.execute(_in_progress(id_, host).values(state=FAILED, error=error)).rowcount
    _add_to_counts(tx, {id_: _ended({FAILED: failed})})
    return failed


def delete_of_host(tx: sa.Connection, host: str) -> int:
    """Delete the backends of a host, and discoveries without others; return their number."""
    b = discovery_backends.c
    query = sa.select(b.id, b.discovery_id, b.state).where(b.host == host).order_by(b.id)
    # Locked: their states are subtracted from the numbers.
    rows = tx.execute(query.with_for_update()).all()
    bulk.delete(tx, discovery_backends, [row.id for row in rows])
    removed = defaultdict[int, Counter[str]](Counter)
    for row in rows:
        removed[row.discovery_id][row.state] -= 1
    # This is no outcome, so updated_at remains.
    _add_to_counts(tx, removed, updated_at=discoveries.c.updated_at)
    bulk.delete_where(tx, discoveries.c.id, removed, *(column == 0 for column in _COUNTS.values()))
    return len(rows)


def delete_without_backends(tx: sa.Connection) -> None:
    """Delete the discoveries whose backends were deleted because of their age."""
    b, d = discovery_backends.c, discoveries.c
    # Backends are deleted in the order of their ids: no discovery after the first one of those that
    # are left is searched. The numbers do not tell: the list shows them until all are deleted.
    oldest = tx.scalar(sa.select(sa.func.min(b.discovery_id)))
    conditions = [sa.not_(sa.exists().where(b.discovery_id == d.id))]
    if oldest is not None:
        conditions.append(d.id < oldest)
    tx.execute(sa.delete(discoveries).where(*conditions))


def fail_older(tx: sa.Connection, cutoff: datetime, error: str) -> int:
    """Fail backends in progress of discoveries before ``cutoff``; return their number."""
    b = discovery_backends.c
    late = (b.state == IN_PROGRESS, b.created_at < cutoff)
    # A SELECT first: on MariaDB an UPDATE without a match still locks the rows that it scans.
    ids = defaultdict[int, list[int]](list)
    for row in tx.execute(sa.select(b.id, b.discovery_id).where(*late).order_by(b.id)):
        ids[row.discovery_id].append(row.id)
    failed = {
        discovery: bulk.update_where(tx, b.id, chosen, *late, state=FAILED, error=error)
        for discovery, chosen in ids.items()
    }
    _add_to_counts(tx, {id_: _ended({FAILED: number}) for id_, number in failed.items()})
    return sum(failed.values())


def _find_id(tx: sa.Connection, uuid: str) -> int:
    """Return the row id of a discovery; 0, which none has, if it is unknown."""
    # Not as a subquery: MariaDB would lock the row for all that count in it, before the backends.
    return tx.scalar(sa.select(discoveries.c.id).where(discoveries.c.uuid == uuid)) or 0


def _in_progress(id_: int, host: str, *conditions: sa.ColumnElement[bool]) -> sa.Update:
    """Return the UPDATE of the backends of a host whose discovery has not ended."""
    b = discovery_backends.c
    of_host = (b.discovery_id == id_, b.host == host, b.state == IN_PROGRESS)
    return sa.update(discovery_backends).where(*of_host, *conditions)


def _ended(counts: Mapping[str, int]) -> Mapping[str, int]:
    """Return the change of the numbers if as many backends have ended in these states."""
    return {**counts, IN_PROGRESS: -sum(counts.values())}


def _add_to_counts(
    tx: sa.Connection, changes: Mapping[int, Mapping[str, int]], **values: Any
) -> None:
    """Add to the numbers of backends by state, by the row id of the discovery."""
    columns = {"id": discoveries.c.id, **{column.name: column for column in _COUNTS.values()}}
    rows = [
        {"id": id_, **{_COUNTS[state].name: change.get(state, 0) for state in _COUNTS}}
        for id_, change in sorted(changes.items())
        if any(change.values())
    ]
    for added in bulk.make_tables(tx, columns, rows):
        sums = {name: discoveries.c[name] + added.c[name] for name in columns if name != "id"}
        query = sa.update(discoveries).where(discoveries.c.id == added.c.id)
        tx.execute(query.values(**sums, **values))
