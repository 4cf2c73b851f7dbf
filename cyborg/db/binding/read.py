# SPDX-License-Identifier: Apache-2.0
"""Read accelerator requests (ARQs), each with the attach handle that it owns."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.paging import Page
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
    conditions: list[sa.ColumnElement[bool]] = []
    if uuids is not None:
        conditions.append(table.c.uuid.in_(uuids))
    if instance_uuid is not None:
        conditions += (table.c.instance_uuid == instance_uuid, table.c.hidden.is_(False))
    if project_id is not None:
        conditions.append(table.c.project_id == project_id)
    if states is not None:
        conditions.append(table.c.state.in_(states))
    if uuids is None and instance_uuid is None:
        ids = sa.select(table.c.id).where(*conditions)
        query = paging.paginate_ids(connection, _ALL, ids, table, page, SORTABLE)
    else:
        # Few rows, and Nova asks for them often: the plain statement is cheaper.
        query = paging.paginate(connection, _ALL.where(*conditions), table, page, SORTABLE)
    return [_row(row) for row in connection.execute(query).mappings()]


def of_instance(
    connection: sa.Connection, instance: str, project_id: str | None = None
) -> list[ArqRow]:
    """Return what ``find`` returns for an instance, all rows in the order of their creation."""
    query = _OF_INSTANCE if project_id is None else _OF_INSTANCE_SCOPED
    rows = connection.execute(query, {"instance": instance, "scope": project_id})
    return [_row(row) for row in rows.mappings()]


def of_context(connection: sa.Connection, context: str) -> list[ArqRow]:
    """Return the ARQs of a device context, by its uuid, in the order of its groups."""
    context_id = sa.select(contexts.c.id).where(contexts.c.uuid == context).scalar_subquery()
    query = _ALL.where(table.c.context_id == context_id)
    query = query.order_by(table.c.device_profile_group_id, table.c.id)
    return [_row(row) for row in connection.execute(query).mappings()]


def get(connection: sa.Connection, uuid: str, project_id: str | None = None) -> ArqRow | None:
    """Return one ARQ, or None; with a project, only if it belongs to this project."""
    return next(iter(find(connection, uuids=[uuid], project_id=project_id)), None)


def _row(row: sa.RowMapping) -> ArqRow:
    return cast(ArqRow, {**row, "attach_handle_info": row["attach_handle_info"] or {}})
