# SPDX-License-Identifier: Apache-2.0
"""Reading the outbox: what neighbours have not been told yet, and what they never took.

Rows: uuid, kind, subject, state, attempts, next_try_at, error, created_at, updated_at, payload (an
object).
"""

from collections.abc import Collection

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import outbox as table

_HIDDEN = ("id", "owner", "lease_until")
COLUMNS = [column for column in table.c if column.name not in _HIDDEN]
SORTABLE = {
    name: table.c[name]
    for name in (
        "uuid",
        "kind",
        "subject",
        "state",
        "attempts",
        "next_try_at",
        "created_at",
        "updated_at",
    )
}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuids: Collection[str] | None = None,
    state: str | None = None,
    kind: str | None = None,
) -> list[Row]:
    """Return messages of the outbox, in one statement; a marker adds one."""
    query = sa.select(*COLUMNS)
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if state is not None:
        query = query.where(table.c.state == state)
    if kind is not None:
        query = query.where(table.c.kind == kind)
    query = paging.cut(connection, query, table, page, SORTABLE)
    return [dict(row) for row in connection.execute(query).mappings()]


def get(connection: sa.Connection, uuid: str) -> Row | None:
    """Return one message, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)
