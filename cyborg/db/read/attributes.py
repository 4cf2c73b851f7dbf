# SPDX-License-Identifier: Apache-2.0
"""Reading the attributes that operators gave to deployables.

Rows: uuid, deployable_uuid, key, value, created_at, updated_at. The agent's own attributes are
facts of the deployable and no objects: see ``cyborg.db.read.deployables``.
"""

from collections.abc import Collection

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import attributes as table
from cyborg.db.schema import deployables

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
) -> list[Row]:
    """Return attributes, in one statement; a marker adds one."""
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
    query = paging.cut(connection, query, table, page, SORTABLE)
    return [dict(row) for row in connection.execute(query).mappings()]


def get(connection: sa.Connection, uuid: str) -> Row | None:
    """Return one attribute, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)
