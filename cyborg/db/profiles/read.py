# SPDX-License-Identifier: Apache-2.0
"""Read device profiles.

The hidden profile of a device context is found by its uuid or exact name only, and only in the
scope of the project of the context. The hidden profile of an attachment is never found.
"""

from collections.abc import Collection
from datetime import datetime
from typing import TypedDict

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.paging import Page
from cyborg.db.rows import fetch_all, fetch_first
from cyborg.db.schema import device_contexts
from cyborg.db.schema import device_profiles as table


class DeviceProfileRow(TypedDict):
    """A device profile with its groups."""

    uuid: str
    name: str
    description: str | None
    groups: list[dict[str, str]]
    created_at: datetime
    updated_at: datetime | None


COLUMNS = [column for column in table.c if column.name not in ("id", "context_id", "attachment_id")]
SORTABLE = {name: table.c[name] for name in ("uuid", "name", "created_at", "updated_at")}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    names: Collection[str] | None = None,
    uuids: Collection[str] | None = None,
    project_id: str | None = None,
) -> list[DeviceProfileRow]:
    """Return device profiles; execute one statement, or two with a marker.

    Hidden profiles are returned only with ``names`` or ``uuids``. ``project_id`` is the only
    project whose hidden profiles the caller may see, None for all projects.
    """
    query = sa.select(*COLUMNS).where(table.c.attachment_id.is_(None))
    if names is None and uuids is None:
        query = query.where(table.c.context_id.is_(None))
    elif project_id is not None:
        query = query.where(_visible(project_id))
    if names is not None:
        query = query.where(table.c.name.in_(names))
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    query = paging.paginate(connection, query, table, page, SORTABLE)
    return fetch_all(DeviceProfileRow, connection.execute(query))


def get(
    connection: sa.Connection, key: str, project_id: str | None = None
) -> DeviceProfileRow | None:
    """Return the profile with this uuid or, if there is none, with this name; or None.

    ``project_id`` limits the hidden profiles as for ``find``.
    """
    query = (
        sa.select(*COLUMNS)
        .where(sa.or_(table.c.uuid == key, table.c.name == key), table.c.attachment_id.is_(None))
        .order_by(sa.case((table.c.uuid == key, 0), else_=1))
        .limit(1)
    )
    if project_id is not None:
        query = query.where(_visible(project_id))
    return fetch_first(DeviceProfileRow, connection.execute(query))


def _visible(project_id: str) -> sa.ColumnElement[bool]:
    own = sa.select(device_contexts.c.id).where(device_contexts.c.project_id == project_id)
    return sa.or_(table.c.context_id.is_(None), table.c.context_id.in_(own))
