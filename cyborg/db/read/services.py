# SPDX-License-Identifier: Apache-2.0
"""Read services: the daemons of each host, an agent with its backends."""

from collections.abc import Collection
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.paging import Page, Row
from cyborg.db.read import backends as read_backends
from cyborg.db.read.backends import BackendRow
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

    ``functions`` adds the capabilities of each backend, with three statements. ``function`` is the
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
        having = sa.select(backends.c.service_id).where(
            read_backends.id_in(backends.c.id, offering)
        )
        query = query.where(table.c.id.in_(having))
    query = paging.paginate(connection, query, table, page, SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    # The query of the page instead of a list of its ids, which may exceed the limit of a statement;
    # a join, because MariaDB does not allow a LIMIT within IN.
    chosen = query.with_only_columns(table.c.id).subquery()
    backends_by_service = _backends(connection, chosen, offering) if found else {}
    if functions and backends_by_service:
        joined = backends.c.service_id == chosen.c.id
        offered = read_backends.functions(connection, joined, chosen, function)
        backends_by_service = {
            service: [{**row, "functions": offered.get(row["id"], [])} for row in rows]
            for service, rows in backends_by_service.items()
        }
    for row in found:
        row["backends"] = [
            _shown(backend) for backend in backends_by_service.get(row.pop("id"), ())
        ]
    return cast(list[ServiceRow], found)


def get(connection: sa.Connection, uuid: str) -> ServiceRow | None:
    """Return one service with its backends, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)


def _backends(
    connection: sa.Connection, chosen: sa.FromClause, ids: Collection[int] | None
) -> dict[int, list[Row]]:
    query = (
        sa.select(backends)
        .join(chosen, chosen.c.id == backends.c.service_id)
        .order_by(backends.c.name, backends.c.id)
    )
    by_service: dict[int, list[Row]] = {}
    for row in connection.execute(query).mappings():
        if ids is None or row["id"] in ids:
            by_service.setdefault(row["service_id"], []).append(dict(row))
    return by_service


def _shown(backend: Row) -> BackendRow:
    shown = {name: value for name, value in backend.items() if name not in ("id", "service_id")}
    return cast(BackendRow, shown)
