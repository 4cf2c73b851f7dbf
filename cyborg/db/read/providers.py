# SPDX-License-Identifier: Apache-2.0
"""Reading how far Placement has been brought to what is wanted.

Rows: uuid, name, host, revision, published, stale (Placement was last brought to an older
revision), stale_since, error, attempts, next_try_at, created_at, updated_at.
"""

from collections.abc import Collection

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import providers as table

_STALE = table.c.published < table.c.revision
COLUMNS = [
    *(column for column in table.c if column.name not in ("id", "owner", "lease_until")),
    _STALE.label("stale"),
]
SORTABLE = {name: table.c[name] for name in ("uuid", "name", "host", "stale_since", "created_at")}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuids: Collection[str] | None = None,
    host: str | None = None,
    stale: bool | None = None,
) -> list[Row]:
    """Return providers, in one statement; a marker adds one."""
    query = sa.select(*COLUMNS)
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if host is not None:
        query = query.where(table.c.host == host)
    if stale is not None:
        query = query.where(_STALE if stale else sa.not_(_STALE))
    query = paging.cut(connection, query, table, page, SORTABLE)
    return [{**row, "stale": bool(row["stale"])} for row in connection.execute(query).mappings()]


def get(connection: sa.Connection, uuid: str) -> Row | None:
    """Return one provider, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)
