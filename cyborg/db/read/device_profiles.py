# SPDX-License-Identifier: Apache-2.0
"""Read device profiles."""

from collections.abc import Collection
from datetime import datetime
from typing import TypedDict

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page
from cyborg.db.rows import fetch_all, fetch_first
from cyborg.db.schema import device_profiles as table


class DeviceProfileRow(TypedDict):
    """A device profile with its groups."""

    uuid: str
    name: str
    description: str | None
    groups: list[dict[str, str]]
    created_at: datetime
    updated_at: datetime | None


COLUMNS = [column for column in table.c if column.name != "id"]
SORTABLE = {name: table.c[name] for name in ("uuid", "name", "created_at", "updated_at")}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    names: Collection[str] | None = None,
    uuids: Collection[str] | None = None,
) -> list[DeviceProfileRow]:
    """Return device profiles; execute one statement, or two with a marker."""
    query = sa.select(*COLUMNS)
    if names is not None:
        query = query.where(table.c.name.in_(names))
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    query = paging.paginate(connection, query, table, page, SORTABLE)
    return fetch_all(DeviceProfileRow, connection.execute(query))


def get(connection: sa.Connection, key: str) -> DeviceProfileRow | None:
    """Return the profile with this uuid or, if there is none, with this name; or None."""
    query = (
        sa.select(*COLUMNS)
        .where(sa.or_(table.c.uuid == key, table.c.name == key))
        .order_by(sa.case((table.c.uuid == key, 0), else_=1))
        .limit(1)
    )
    return fetch_first(DeviceProfileRow, connection.execute(query))
