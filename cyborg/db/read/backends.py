# SPDX-License-Identifier: Apache-2.0
"""Reading the backends of all agents, each a row of its own.

Rows: uuid, status, binary, host, last_seen_at, down_since, created_at and backends: a list of this
one alone, as ``cyborg.db.read.services`` has it, so that both kinds of rows are shown alike.
"""

from typing import Any

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import backends as table
from cyborg.db.schema import services

SORTABLE = {
    "binary": services.c.binary,
    "host": services.c.host,
    "last_seen_at": services.c.last_seen_at,
    **{name: table.c[name] for name in ("uuid", "name", "driver", "status", "created_at")},
}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    host: str | None = None,
    binary: str | None = None,
) -> list[Row]:
    """Return backends, in one statement; a marker adds one."""
    query = (
        sa.select(
            *(column for column in table.c if column.name not in ("id", "service_id")),
            services.c.binary,
            services.c.host,
            services.c.last_seen_at,
            services.c.down_since,
        )
        .select_from(table)
        .join(services, services.c.id == table.c.service_id)
    )
    if host is not None:
        query = query.where(services.c.host == host)
    if binary is not None:
        query = query.where(services.c.binary == binary)
    query = paging.cut(connection, query, table, page, SORTABLE)
    return [_row(row) for row in connection.execute(query).mappings()]


def _row(row: sa.RowMapping) -> dict[str, Any]:
    return {**row, "backends": [dict(row)]}
