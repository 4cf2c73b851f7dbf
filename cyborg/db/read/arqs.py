# SPDX-License-Identifier: Apache-2.0
"""Read accelerator requests (ARQs), each with the attach handle that it owns."""

from collections.abc import Collection
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.paging import Page
from cyborg.db.schema import arqs as table
from cyborg.db.schema import attach_handles as handles


class ArqRow(TypedDict):
    """An ARQ and its handle; for an ARQ without a handle these fields are "", None and {}."""

    uuid: str
    state: str
    device_profile_name: str
    device_profile_group_id: int
    resource_class: str
    group: dict[str, str]
    project_id: str | None
    hostname: str | None
    device_rp_uuid: str | None
    instance_uuid: str | None
    attach_handle_type: str
    attach_handle_uuid: str | None
    attach_handle_info: dict[str, Any]
    created_at: datetime
    updated_at: datetime | None


_HIDDEN = (
    *("id", "profile_id", "context_id", "attachment_id", "instance_slot", "job_id"),
    *("owner_verified", "orphan_since", "hidden"),
)
COLUMNS = [
    *(c for c in table.c if c.name not in _HIDDEN and not c.name.startswith("label_")),
    sa.func.coalesce(handles.c.type, "").label("attach_handle_type"),
    handles.c.uuid.label("attach_handle_uuid"),
    handles.c.info.label("attach_handle_info"),
]
_ALL = sa.select(*COLUMNS).select_from(table).outerjoin(handles, handles.c.arq_id == table.c.id)
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
) -> list[ArqRow]:
    """Return ARQs; execute one statement, or two with a marker.

    The ARQs of an instance are those that Nova attaches to it at its next start, in the order of
    their creation. ARQs that are being attached or detached are not among them.
    """
    query = _ALL
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if instance_uuid is not None:
        query = query.where(table.c.instance_uuid == instance_uuid, table.c.hidden.is_(False))
    if project_id is not None:
        query = query.where(table.c.project_id == project_id)
    if states is not None:
        query = query.where(table.c.state.in_(states))
    query = paging.paginate(connection, query, table, page, SORTABLE)
    return [_row(row) for row in connection.execute(query).mappings()]


def get(connection: sa.Connection, uuid: str, project_id: str | None = None) -> ArqRow | None:
    """Return one ARQ, or None; with a project, only if it belongs to this project."""
    return next(iter(find(connection, uuids=[uuid], project_id=project_id)), None)


def _row(row: sa.RowMapping) -> ArqRow:
    return cast(ArqRow, {**row, "attach_handle_info": row["attach_handle_info"] or {}})
