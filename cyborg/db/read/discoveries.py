# SPDX-License-Identifier: Apache-2.0
"""Reading discoveries that were asked for.

Rows of ``find``: uuid, host, backend, state, error, created_at, updated_at, one for each backend
of each host that must answer. ``get`` gathers those of one discovery.
"""

from collections.abc import Collection

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
