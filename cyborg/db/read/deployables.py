# SPDX-License-Identifier: Apache-2.0
"""Reading deployables, each with the uuids of what it belongs to.

Rows: uuid, parent_uuid and root_uuid (None for a root), device_uuid, hostname, driver_name (the
backend that found the device), address, name, rp_uuid, resource_class, traits, attributes (the
agent's, and over them the operator's), bitstream_id, num_accelerators, draining (of the part or its
device), created_at, updated_at; and of its resource provider stale (Placement was last brought to
an older revision, or never to any), stale_since and error.
"""

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import attributes, devices, providers
from cyborg.db.schema import deployables as table

_parents = table.alias("parents")
_roots = table.alias("roots")
_HIDDEN = ("device_id", "parent_id", "root_id", "job_id", "draining")
COLUMNS = [
    *(column for column in table.c if column.name not in _HIDDEN),
    _parents.c.uuid.label("parent_uuid"),
    _roots.c.uuid.label("root_uuid"),
    devices.c.uuid.label("device_uuid"),
    devices.c.host.label("hostname"),
    devices.c.backend.label("driver_name"),
    sa.or_(table.c.draining, devices.c.draining).label("draining"),
    sa.func.coalesce(providers.c.published < providers.c.revision, sa.true()).label("stale"),
    providers.c.stale_since,
    providers.c.error,
]
SORTABLE = {
    "hostname": devices.c.host,
    **{
        name: table.c[name]
        for name in (
            "uuid",
            "name",
            "rp_uuid",
            "resource_class",
            "num_accelerators",
            "created_at",
            "updated_at",
        )
    },
}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuids: Collection[str] | None = None,
    device_uuid: str | None = None,
    hostname: str | None = None,
    rp_uuid: str | None = None,
) -> list[Row]:
    """Return deployables, in two statements; a marker adds one."""
    query = (
        sa.select(*COLUMNS)
        .select_from(table)
        .join(devices, devices.c.id == table.c.device_id)
        .outerjoin(_parents, _parents.c.id == table.c.parent_id)
        .outerjoin(_roots, _roots.c.id == table.c.root_id)
        .outerjoin(providers, providers.c.uuid == table.c.rp_uuid)
    )
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if device_uuid is not None:
        query = query.where(devices.c.uuid == device_uuid)
    if hostname is not None:
        query = query.where(devices.c.host == hostname)
    if rp_uuid is not None:
        query = query.where(table.c.rp_uuid == rp_uuid)
    query = paging.cut(connection, query, table, page, SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    of_operators = _attributes(connection, query) if found else {}
    for row in found:
        row["attributes"] = row["attributes"] | of_operators.get(row.pop("id"), {})
        row["draining"], row["stale"] = bool(row["draining"]), bool(row["stale"])
    return list(found)


def get(connection: sa.Connection, uuid: str) -> Row | None:
    """Return one deployable, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)


def _attributes(connection: sa.Connection, found: sa.Select[Any]) -> dict[int, dict[str, str]]:
    chosen = found.with_only_columns(table.c.id).subquery()
    query = (
        sa.select(attributes.c.deployable_id, attributes.c.key, attributes.c.value)
        .join(chosen, chosen.c.id == attributes.c.deployable_id)
        .order_by(attributes.c.id)
    )
    held: dict[int, dict[str, str]] = {}
    for deployable, key, value in connection.execute(query):
        held.setdefault(deployable, {})[key] = value
    return held
