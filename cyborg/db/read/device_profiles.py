# SPDX-License-Identifier: Apache-2.0
"""Reading device profiles.

Rows: uuid, name, description, groups (a list of objects), created_at, updated_at.
"""

from collections.abc import Collection

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import device_profiles as table

COLUMNS = [column for column in table.c if column.name != "id"]
SORTABLE = {name: table.c[name] for name in ("uuid", "name", "created_at", "updated_at")}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    names: Collection[str] | None = None,
    uuids: Collection[str] | None = None,
) -> list[Row]:
    """Return device profiles, in one statement; a marker adds one."""
    query = sa.select(*COLUMNS)
    if names is not None:
        query = query.where(table.c.name.in_(names))
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    query = paging.cut(connection, query, table, page, SORTABLE)
    return [dict(row) for row in connection.execute(query).mappings()]


def get(connection: sa.Connection, key: str) -> Row | None:
    """Return the profile of this uuid or, if there is none, of this name, or None."""
    query = (
        sa.select(*COLUMNS)
        .where(sa.or_(table.c.uuid == key, table.c.name == key))
        .order_by(sa.case((table.c.uuid == key, 0), else_=1))
        .limit(1)
    )
    found = connection.execute(query).mappings().first()
    return None if found is None else dict(found)
