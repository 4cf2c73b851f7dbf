# SPDX-License-Identifier: Apache-2.0
"""Read services: the daemons of each host, an agent with its backends."""

from collections.abc import Collection
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.backends import read as read_backends
from cyborg.db.backends.read import BackendReference, BackendRow
from cyborg.db.paging import Page, Row
from cyborg.db.rows import fetch_all
from cyborg.db.schema import backends, devices
from cyborg.db.schema import services as table


class ServiceRow(TypedDict):
    """A daemon with its backends, ordered by name; only an agent has any."""

    uuid: str
    binary: str
    host: str
    status: str
    last_seen_at: datetime
    late_at: datetime
    down_at: datetime
    down_since: datetime | None
    created_at: datetime
    backends: list[BackendRow]


class DownServiceRow(TypedDict):
    """A daemon that is down."""

    uuid: str
    binary: str
    host: str
    last_seen_at: datetime


_COLUMNS = (
    *("id", "uuid", "binary", "host", "status"),
    *("last_seen_at", "late_at", "down_at", "down_since", "created_at"),
)
SORTABLE = {
    name: table.c[name]
    for name in ("uuid", "binary", "host", "status", "started_at", "last_seen_at", "created_at")
}


def has_host(connection: sa.Connection, host: str) -> bool:
    """Return whether a host has a daemon or a device."""
    known = sa.union_all(
        sa.select(table.c.id).where(table.c.host == host),
        sa.select(devices.c.id).where(devices.c.host == host),
    )
    return connection.execute(known.limit(1)).first() is not None


def host_names(connection: sa.Connection) -> list[str]:
    """Return the names of the hosts that have a daemon or a device, ordered."""
    known = sa.union(sa.select(table.c.host), sa.select(devices.c.host)).subquery()
    query = sa.select(known.c.host).order_by(known.c.host)
    return [str(host) for host in connection.scalars(query)]


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

    ``functions`` adds the capabilities of each backend, with one statement. ``function`` is the
    name of a capability: it selects the backends that offer the capability, and their agents.
    """
    query = sa.select(*(table.c[name] for name in _COLUMNS))
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if binary is not None:
        query = query.where(table.c.binary == binary)
    if host is not None:
        query = query.where(table.c.host == host)
    if function is not None:
        having = sa.select(backends.c.service_id).where(read_backends.offer(function))
        query = query.where(table.c.id.in_(having))
    query = paging.paginate(connection, query, table, page, SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    rows = _backends(connection, [row["id"] for row in found], function) if found else []
    if functions:
        by_id = {row["id"]: row for row in found}
        references = [_reference(row, by_id[row["service_id"]]) for row in rows]
        offered = read_backends.functions(connection, references, function)
        for row in rows:
            row["functions"] = offered.get(row["id"], [])
    backends_by_service: dict[int, list[BackendRow]] = {}
    for row in rows:
        del row["id"]
        backends_by_service.setdefault(row.pop("service_id"), []).append(cast(BackendRow, row))
    for service in found:
        service["backends"] = backends_by_service.get(service.pop("id"), [])
    return cast(list[ServiceRow], found)


def find_down(connection: sa.Connection, *, now: datetime, limit: int) -> list[DownServiceRow]:
    """Return up to ``limit`` services that are down, those that are down for longest first."""
    columns = (table.c.uuid, table.c.binary, table.c.host, table.c.last_seen_at)
    query = sa.select(*columns).where(table.c.down_at <= now)
    query = query.order_by(table.c.down_at, table.c.id).limit(limit)
    return fetch_all(DownServiceRow, connection.execute(query))


def get(connection: sa.Connection, uuid: str) -> ServiceRow | None:
    """Return one service with its backends, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)


def _backends(
    connection: sa.Connection, services: Collection[int], function: str | None
) -> list[dict[str, Any]]:
    query = (
        sa.select(*read_backends.COLUMNS, backends.c.service_id)
        .where(paging.id_in(backends.c.service_id, services))
        .order_by(backends.c.name, backends.c.id)
    )
    if function is not None:
        query = query.where(read_backends.offer(function))
    return [dict(row) for row in connection.execute(query).mappings()]


def _reference(backend: Row, service: Row) -> BackendReference:
    is_down = service["down_since"] is not None
    return BackendReference(backend["id"], service["host"], backend["name"], is_down)
