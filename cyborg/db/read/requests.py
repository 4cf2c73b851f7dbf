# SPDX-License-Identifier: Apache-2.0
"""Reading accelerator requests, each with the attach handle that it owns.

Rows: uuid, state, device_profile_name, device_profile_group_id, resource_class, group, project_id,
hostname, device_rp_uuid, instance_uuid, attach_handle_type, attach_handle_uuid,
attach_handle_info, created_at, updated_at. Without a handle its type is "", its uuid None and its
info {}.
"""

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import requests as table

_HIDDEN = ("id", "profile_id", "instance_slot", "job_id", "owner_known", "orphan_since")
COLUMNS = [
    *(c for c in table.c if c.name not in _HIDDEN and not c.name.startswith("label_")),
    sa.func.coalesce(handles.c.type, "").label("attach_handle_type"),
    handles.c.uuid.label("attach_handle_uuid"),
    handles.c.info.label("attach_handle_info"),
]
_ALL = sa.select(*COLUMNS).select_from(table).outerjoin(handles, handles.c.request_id == table.c.id)
SORTABLE = {
    name: table.c[name]
    for name in (
        "uuid",
        "state",
        "device_profile_name",
        "hostname",
        "device_rp_uuid",
        "instance_uuid",
        "project_id",
        "created_at",
        "updated_at",
    )
}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuids: Collection[str] | None = None,
    instance_uuid: str | None = None,
    project_id: str | None = None,
    states: Collection[str] | None = None,
) -> list[Row]:
    """Return requests, in one statement; a marker adds one."""
    query = _ALL
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if instance_uuid is not None:
        query = query.where(table.c.instance_uuid == instance_uuid)
    if project_id is not None:
        query = query.where(table.c.project_id == project_id)
    if states is not None:
        query = query.where(table.c.state.in_(states))
    query = paging.cut(connection, query, table, page, SORTABLE)
    return [_row(row) for row in connection.execute(query).mappings()]


def get(connection: sa.Connection, uuid: str, project_id: str | None = None) -> Row | None:
    """Return one request, or None; with a project, only if it is that project's."""
    return next(iter(find(connection, uuids=[uuid], project_id=project_id)), None)


def _row(row: sa.RowMapping) -> dict[str, Any]:
    return {**row, "attach_handle_info": row["attach_handle_info"] or {}}
