# SPDX-License-Identifier: Apache-2.0
"""Reading audits: what was looked at, and what disagreed.

Rows of ``find``: uuid, host, repair, state, error, sides, done, total, found, created_at,
updated_at. ``get`` adds findings.
"""

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import audits as table

_HIDDEN = ("id", "owner", "lease_until", "last_host", "findings")
COLUMNS = [column for column in table.c if column.name not in _HIDDEN]
SORTABLE = {name: table.c[name] for name in ("uuid", "host", "state", "created_at", "updated_at")}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    host: str | None = None,
    state: str | None = None,
) -> list[Row]:
    """Return audits without their findings, in one statement; a marker adds one."""
    query = sa.select(*COLUMNS)
    if host is not None:
        query = query.where(table.c.host == host)
    if state is not None:
        query = query.where(table.c.state == state)
    query = paging.cut(connection, query, table, page, SORTABLE)
    return [{**row, "repair": bool(row["repair"])} for row in connection.execute(query).mappings()]


def get(connection: sa.Connection, uuid: str) -> Row | None:
    """Return one audit with its findings, or None."""
    query = sa.select(*COLUMNS, table.c.findings).where(table.c.uuid == uuid)
    row = connection.execute(query).mappings().first()
    return None if row is None else {**row, "repair": bool(row["repair"])}
