# SPDX-License-Identifier: Apache-2.0
"""Read the synchronization state of resource providers with Placement."""

from collections.abc import Collection
from datetime import datetime
from typing import TypedDict, cast

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page
from cyborg.db.schema import providers as table


class ProviderRow(TypedDict):
    """The synchronization state of a resource provider."""

    uuid: str
    name: str
    host: str
    revision: int
    published_revision: int
    stale: bool
    stale_since: datetime | None
    error: str | None
    attempts: int
    next_try_at: datetime | None
    verify_only: bool
    created_at: datetime
    updated_at: datetime | None


_STALE = table.c.published_revision < table.c.revision
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
) -> list[ProviderRow]:
    """Return providers; execute one statement, or two with a marker."""
    query = sa.select(*COLUMNS)
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if host is not None:
        query = query.where(table.c.host == host)
    if stale is not None:
        query = query.where(_STALE if stale else sa.not_(_STALE))
    query = paging.paginate(connection, query, table, page, SORTABLE)
    return [
        cast(ProviderRow, {**row, "stale": bool(row["stale"])})
        for row in connection.execute(query).mappings()
    ]


def get(connection: sa.Connection, uuid: str) -> ProviderRow | None:
    """Return one provider, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)
