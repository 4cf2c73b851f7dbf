# SPDX-License-Identifier: Apache-2.0
"""Read device profiles.

The hidden profile of a device context is found by its uuid or exact name only, and only in the
scope of the project of the context. The hidden profile of an attachment is never found.
"""

from collections.abc import Collection
from datetime import datetime
from typing import TypedDict

import sqlalchemy as sa

from cyborg.db.listing import Listing, columns_of
from cyborg.db.paging import Page
from cyborg.db.rows import fetch_first, row_columns
from cyborg.db.schema import device_contexts
from cyborg.db.schema import device_profiles as table


class NewProfileRow(TypedDict):
    """A device profile as it is inserted."""

    uuid: str
    name: str
    description: str | None
    groups: list[dict[str, str]]
    created_at: datetime


class DeviceProfileRow(NewProfileRow):
    """A device profile with its groups."""

    updated_at: datetime | None


COLUMNS = row_columns(DeviceProfileRow, table)
SORTABLE = columns_of(table, "uuid", "name", "created_at", "updated_at")


def _visible(project_id: str) -> sa.ColumnElement[bool]:
    own = sa.select(device_contexts.c.id).where(device_contexts.c.project_id == project_id)
    return sa.or_(table.c.context_id.is_(None), table.c.context_id.in_(own))


def _in_context(value: bool) -> sa.ColumnElement[bool]:
    return table.c.context_id.is_not(None) if value else table.c.context_id.is_(None)


PROFILES = Listing(
    row=DeviceProfileRow,
    table=table,
    columns=COLUMNS,
    sortable=SORTABLE,
    filters={"names": table.c.name, "project_id": _visible, "in_context": _in_context},
    conditions=[table.c.attachment_id.is_(None)],
)


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
    if names is None and uuids is None:
        return PROFILES.find(connection, page=page, in_context=False)
    return PROFILES.find(connection, page=page, names=names, uuids=uuids, project_id=project_id)


def get(
    connection: sa.Connection, key: str, project_id: str | None = None
) -> DeviceProfileRow | None:
    """Return the profile with this uuid or, if there is none, with this name; or None.

    ``project_id`` limits the hidden profiles as for ``find``.
    """
    query = (
        sa.select(*COLUMNS)
        .where(sa.or_(table.c.uuid == key, table.c.name == key), table.c.attachment_id.is_(None))
        # A name may look like the uuid of another profile: the uuid takes precedence.
        .order_by(sa.case((table.c.uuid == key, 0), else_=1))
        .limit(1)
    )
    if project_id is not None:
        query = query.where(_visible(project_id))
    return fetch_first(DeviceProfileRow, connection.execute(query))
