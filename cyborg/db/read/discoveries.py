# SPDX-License-Identifier: Apache-2.0
"""Reading discoveries that were asked for.

Rows of ``find``: uuid, host, backend, state, error, created_at, updated_at, one for each backend
of each host that must answer. ``get`` gathers those of one discovery, ``whole`` counts those of
each.
"""

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import discoveries as table

COLUMNS = [column for column in table.c if column.name != "id"]
SORTABLE = {name: table.c[name] for name in ("uuid", "host", "backend", "state", "created_at")}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuids: Collection[str] | None = None,
    host: str | None = None,
    backend: str | None = None,
    states: Collection[str] | None = None,
) -> list[Row]:
    """Return parts of discoveries, in one statement; a marker (its first part) adds one."""
    query = sa.select(*COLUMNS)
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if host is not None:
        query = query.where(table.c.host == host)
    if backend is not None:
        query = query.where(table.c.backend == backend)
    if states is not None:
        query = query.where(table.c.state.in_(states))
    query = paging.cut(connection, query, table, page, SORTABLE)
    return [dict(row) for row in connection.execute(query).mappings()]


_IN_PROGRESS, _FAILED = (
    sa.func.sum(sa.case((table.c.state == state, 1), else_=0))
    for state in ("IN-PROGRESS", "FAILED")
)
_WHOLE = sa.select(
    sa.func.min(table.c.id).label("id"),
    table.c.uuid,
    sa.case((_IN_PROGRESS > 0, "IN-PROGRESS"), (_FAILED > 0, "FAILED"), else_="DONE").label(
        "state"
    ),
    sa.func.count().label("total"),
    _IN_PROGRESS.label("in_progress"),
    _FAILED.label("failed"),
    sa.func.min(table.c.created_at).label("created_at"),
    sa.func.max(table.c.updated_at).label("updated_at"),
).group_by(table.c.uuid)
WHOLE_SORTABLE = ("uuid", "state", "created_at", "updated_at")


def whole(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    host: str | None = None,
    state: str | None = None,
) -> list[Row]:
    """Return discoveries, in one statement; a marker adds one.

    Rows: uuid, state (in progress while one part is, failed if one has), created_at, updated_at
    (the last change) and progress: how many parts are in which state. ``host`` is that of any part.
    """
    query = _WHOLE
    if host is not None:
        there = sa.select(table.c.uuid).where(table.c.host == host)
        query = query.where(table.c.uuid.in_(there))
    grouped = query.subquery()
    listed = sa.select(grouped)
    if state is not None:
        listed = listed.where(grouped.c.state == state)
    sortable = {name: grouped.c[name] for name in WHOLE_SORTABLE}
    listed = paging.cut(connection, listed, grouped, page, sortable)
    return [_counted(dict(row)) for row in connection.execute(listed).mappings()]


def _counted(row: dict[str, Any]) -> Row:
    del row["id"]
    total, waiting, failed = (int(row.pop(k)) for k in ("total", "in_progress", "failed"))
    counts = {"DONE": total - waiting - failed, "FAILED": failed, "IN-PROGRESS": waiting}
    return {**row, "progress": {name: count for name, count in counts.items() if count}}


def get(connection: sa.Connection, uuid: str) -> Row | None:
    """Return one discovery: uuid, created_at, updated_at (the last change) and parts, or None.

    Parts are rows of ``find`` in the order of host and backend.
    """
    parts = sorted(find(connection, uuids=[uuid]), key=lambda row: (row["host"], row["backend"]))
    if not parts:
        return None
    changes = [part["updated_at"] for part in parts if part["updated_at"] is not None]
    return {
        "uuid": uuid,
        "created_at": min(part["created_at"] for part in parts),
        "updated_at": max(changes, default=None),
        "parts": parts,
    }
