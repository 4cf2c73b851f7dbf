# SPDX-License-Identifier: Apache-2.0
"""Read the attributes that operators added to deployables.

Attributes reported by the agent are a column of the deployable: see
``cyborg.db.deployables.read``.
"""

from collections.abc import Collection
from datetime import datetime
from typing import TypedDict

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.paging import Page
from cyborg.db.rows import fetch_all
from cyborg.db.schema import attributes as table
from cyborg.db.schema import deployables


class AttributeRow(TypedDict):
    """An attribute that an operator added to a deployable."""

    uuid: str
    deployable_uuid: str
    key: str
    value: str
    created_at: datetime
    updated_at: datetime | None


COLUMNS = [
    *(column for column in table.c if column.name not in ("id", "deployable_id")),
    deployables.c.uuid.label("deployable_uuid"),
]
SORTABLE = {name: table.c[name] for name in ("uuid", "key", "value", "created_at")}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuids: Collection[str] | None = None,
    deployable_uuid: str | None = None,
    key: str | None = None,
) -> list[AttributeRow]:
    """Return attributes; execute one statement, or two with a marker."""
    query = (
        sa.select(*COLUMNS)
        .select_from(table)
        .join(deployables, deployables.c.id == table.c.deployable_id)
    )
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if deployable_uuid is not None:
        query = query.where(deployables.c.uuid == deployable_uuid)
    if key is not None:
        query = query.where(table.c.key == key)
    query = paging.paginate(connection, query, table, page, SORTABLE)
    return fetch_all(AttributeRow, connection.execute(query))


def get(connection: sa.Connection, uuid: str) -> AttributeRow | None:
    """Return one attribute, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)
