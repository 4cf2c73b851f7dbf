# SPDX-License-Identifier: Apache-2.0
"""Read accelerator requests (ARQs), each with the attach handle that it owns."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.db.listing import Listing
from cyborg.db.schema import arqs as table
from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import device_contexts as contexts


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
    attached_at: datetime | None
    attach_error: str | None
    created_at: datetime
    updated_at: datetime | None


COLUMNS = [
    *(table.c[name] for name in ArqRow.__annotations__ if name in table.c),
    sa.func.coalesce(handles.c.type, "").label("attach_handle_type"),
    handles.c.uuid.label("attach_handle_uuid"),
    handles.c.info.label("attach_handle_info"),
]
_WITH_HANDLE = table.outerjoin(handles, handles.c.arq_id == table.c.id)
_ALL = sa.select(*COLUMNS).select_from(_WITH_HANDLE)
# Built once: SQLAlchemy needs more time to build such a statement than a database to run it.
_OF_INSTANCE = _ALL.where(
    table.c.instance_uuid == sa.bindparam("instance", type_=sa.String), table.c.hidden.is_(False)
).order_by(table.c.id)
_OF_INSTANCE_SCOPED = _OF_INSTANCE.where(
    table.c.project_id == sa.bindparam("scope", type_=sa.String)
)
# Only orders that an index has: a cloud has a million ARQs. The order of creation is that of the
# row ids.
SORTABLE: Mapping[str, sa.ColumnElement[Any]] = {"uuid": table.c.uuid, "created_at": table.c.id}


def _of_instance(uuid: str) -> sa.ColumnElement[bool]:
    # Not those that are being attached or detached: Nova attaches the others at the next start.
    return sa.and_(table.c.instance_uuid == uuid, table.c.hidden.is_(False))


def _attach_failed(value: bool) -> sa.ColumnElement[bool]:
    """Return the condition that a running guest lacks the device, or that none does."""
    column = table.c.attach_failed_at
    return column.is_not(None) if value else column.is_(None)


def _complete(connection: sa.Connection, rows: list[dict[str, Any]]) -> list[ArqRow]:
    return [_row(row) for row in rows]


ARQS = Listing(
    row=ArqRow,
    table=table,
    source=_WITH_HANDLE,
    columns=COLUMNS,
    sortable=SORTABLE,
    filters={
        "instance_uuid": _of_instance,
        "project_id": table.c.project_id,
        "states": table.c.state,
        "attach_failed": _attach_failed,
    },
    ids_first=True,
    few=frozenset({"uuids", "instance_uuid"}),  # Nova asks for them often
    complete=_complete,
)
find = ARQS.find
get = ARQS.get


def of_instance(
    connection: sa.Connection, instance: str, project_id: str | None = None
) -> list[ArqRow]:
    """Return what ``find`` returns for an instance, all rows in the order of their creation."""
    query = _OF_INSTANCE if project_id is None else _OF_INSTANCE_SCOPED
    rows = connection.execute(query, {"instance": instance, "scope": project_id})
    return [_row(row) for row in rows.mappings()]


def of_context(connection: sa.Connection, context: str) -> list[ArqRow]:
    """Return the ARQs of a device context, by its uuid, in the order of its groups."""
    # A subquery of one row, so that the index on the context serves the query.
    context_id = sa.select(contexts.c.id).where(contexts.c.uuid == context).scalar_subquery()
    query = _ALL.where(table.c.context_id == context_id)
    query = query.order_by(table.c.device_profile_group_id, table.c.id)
    return [_row(row) for row in connection.execute(query).mappings()]


def _row(row: Mapping[Any, Any]) -> ArqRow:
    return cast(ArqRow, {**row, "attach_handle_info": row["attach_handle_info"] or {}})
