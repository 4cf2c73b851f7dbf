# SPDX-License-Identifier: Apache-2.0
"""Read services: the daemons of each host, an agent with its backends."""

from collections.abc import Collection
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.paging import Page, Row
from cyborg.db.read import backends as read_backends
from cyborg.db.read.backends import BackendReference, BackendRow
from cyborg.db.schema import backends
from cyborg.db.schema import services as table


class ServiceRow(TypedDict):
    """A daemon with its backends, ordered by name; only an agent has any."""

    uuid: str
    binary: str
    host: str
    epoch: str
    endpoint: str | None
    status: str
    digest: str | None
    generation: int
    versions: dict[str, Any]
    started_at: datetime
    last_seen_at: datetime
    late_at: datetime
    down_at: datetime
    down_since: datetime | None
    identity: dict[str, Any]
    drivers_digest: str | None
    boot_id: str | None
    desired_generation: int
    created_at: datetime
    updated_at: datetime | None
    backends: list[BackendRow]


SORTABLE = {
    name: table.c[name]
    for name in ("uuid", "binary", "host", "status", "started_at", "last_seen_at", "created_at")
}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuids: Collection[str] | None = None,
    binary: str | None = None,
    host: str | None = None,
    functions: bool = False,
    function: str | None = None,
) -> list[ServiceRow]:
    """Return services with their backends; execute two statements, or three with a marker.

    ``functions`` adds the capabilities of each backend, with four statements. ``function`` is the
    name of a capability: it selects the backends that offer the capability, and their agents, with
    one statement more.
    """
    query = sa.select(table)
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if binary is not None:
        query = query.where(table.c.binary == binary)
    if host is not None:
        query = query.where(table.c.host == host)
    offering = None if function is None else read_backends.ids_offering(connection, function)
    if offering is not None:
        having = sa.select(backends.c.service_id).where(paging.id_in(backends.c.id, offering))
        query = query.where(table.c.id.in_(having))
    query = paging.paginate(connection, query, table, page, SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    rows = _backends(connection, [row["id"] for row in found], offering) if found else []
    if functions:
        by_id = {row["id"]: row for row in found}
        references = [_reference(row, by_id[row["service_id"]]) for row in rows]
        offered = read_backends.functions(connection, references, function)
        rows = [{**row, "functions": offered.get(row["id"], [])} for row in rows]
    backends_by_service: dict[int, list[BackendRow]] = {}
    for row in rows:
        backends_by_service.setdefault(row["service_id"], []).append(_shown(row))
    for service in found:
        service["backends"] = backends_by_service.get(service.pop("id"), [])
    return cast(list[ServiceRow], found)


def get(connection: sa.Connection, uuid: str) -> ServiceRow | None:
    """Return one service with its backends, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)


def _backends(
    connection: sa.Connection, services: Collection[int], ids: Collection[int] | None
) -> list[Row]:
    query = (
        sa.select(backends)
        .where(paging.id_in(backends.c.service_id, services))
        .order_by(backends.c.name, backends.c.id)
    )
    return [
        dict(row) for row in connection.execute(query).mappings() if ids is None or row["id"] in ids
    ]


def _reference(backend: Row, service: Row) -> BackendReference:
    is_down = service["down_since"] is not None
    return BackendReference(backend["id"], service["host"], backend["name"], is_down)


def _shown(backend: Row) -> BackendRow:
    shown = {name: value for name, value in backend.items() if name not in ("id", "service_id")}
    return cast(BackendRow, shown)
