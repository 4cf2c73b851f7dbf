# SPDX-License-Identifier: Apache-2.0
"""Read services (the daemons of each host, an agent with its backends), and hosts.

A host is an agent with the number of its devices and the use of its handles.
"""

from collections.abc import Collection
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.core.hosts import AGENT, Liveness
from cyborg.db import paging
from cyborg.db.backends import read as read_backends
from cyborg.db.backends.read import BackendReference, BackendRow
from cyborg.db.handles import usage as handles
from cyborg.db.handles.usage import ClassUseRow
from cyborg.db.listing import Listing, columns_of
from cyborg.db.paging import Page, Row
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import backends, devices
from cyborg.db.schema import services as table


class DownServiceRow(TypedDict):
    """A daemon that is down."""

    uuid: str
    binary: str
    host: str
    last_seen_at: datetime


class ServiceColumns(DownServiceRow):
    """The columns of a daemon that a list shows, except the time of its creation."""

    status: str
    late_at: datetime
    down_at: datetime
    down_since: datetime | None


class ServiceRow(ServiceColumns):
    """A daemon with its backends, ordered by name; only an agent has any."""

    created_at: datetime
    backends: list[BackendRow]


SORTABLE = columns_of(
    table,
    *("uuid", "binary", "host", "status", "started_at", "last_seen_at", "created_at"),
)


def _offers(function: str) -> sa.ColumnElement[bool]:
    offering = sa.select(backends.c.service_id).where(read_backends.offer(function))
    return table.c.id.in_(offering)


SERVICES = Listing(
    row=ServiceRow,
    table=table,
    columns=[
        table.c.id,
        *(table.c[name] for name in ServiceRow.__annotations__ if name in table.c),
    ],
    sortable=SORTABLE,
    filters={"binary": table.c.binary, "host": table.c.host, "function": _offers},
)


def has_host(connection: sa.Connection, host: str) -> bool:
    """Return whether a host has a daemon or a device."""
    # Not OR of two tables, for which a database uses no index.
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
    functions: bool = False,
    function: str | None = None,
    **criteria: Any,
) -> list[ServiceRow]:
    """Return services with their backends; execute two statements, or three with a marker.

    ``functions`` adds the capabilities of each backend, with one statement. ``function`` is the
    name of a capability: it selects the backends that offer the capability, and their agents.
    """
    services = SERVICES.read_columns(connection, page=page, function=function, **criteria)
    ids = [service["id"] for service in services]
    backend_rows = _backends(connection, ids, function) if ids else []
    if functions:
        by_id = {service["id"]: service for service in services}
        references = [_reference(row, by_id[row["service_id"]]) for row in backend_rows]
        offered = read_backends.functions(connection, references, function)
        for row in backend_rows:
            row["functions"] = offered.get(row["id"], [])
    backends_by_service: dict[int, list[BackendRow]] = {}
    for row in backend_rows:
        del row["id"]
        backends_by_service.setdefault(row.pop("service_id"), []).append(cast(BackendRow, row))
    for service in services:
        service["backends"] = backends_by_service.get(service.pop("id"), [])
    return cast(list[ServiceRow], services)


def find_daemons(
    connection: sa.Connection, *, page: Page | None = None, **criteria: Any
) -> list[ServiceRow]:
    """Return services without their backends; execute one statement, or two with a marker."""
    services = SERVICES.read_columns(connection, page=page, **criteria)
    for service in services:
        del service["id"]
        service["backends"] = []
    return cast(list[ServiceRow], services)


def find_down(connection: sa.Connection, *, now: datetime, limit: int) -> list[DownServiceRow]:
    """Return up to ``limit`` services that are down, those that are down for longest first."""
    query = sa.select(*row_columns(DownServiceRow, table)).where(table.c.down_at <= now)
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


class HostRow(TypedDict):
    """A host; ``uuid`` is that of its agent, which is the marker of the next page."""

    uuid: str
    hostname: str
    status: str
    last_seen_at: datetime
    late_at: datetime
    down_at: datetime
    down_since: datetime | None
    devices: int
    resource_classes: list[ClassUseRow]


HOST_SORTABLE = {"hostname": table.c.host, "last_seen_at": table.c.last_seen_at}


def _complete_hosts(connection: sa.Connection, rows: list[dict[str, Any]]) -> list[HostRow]:
    names = [row["hostname"] for row in rows]
    host = devices.c.host
    counted = sa.select(host, sa.func.count()).where(host.in_(names)).group_by(host)
    numbers = {str(name): int(number) for name, number in connection.execute(counted)}
    classes = handles.of_hosts(connection, names)
    for row in rows:
        row["devices"] = numbers.get(row["hostname"], 0)
        row["resource_classes"] = classes.get(row["hostname"], [])
    return cast(list[HostRow], rows)


HOSTS = Listing(
    row=HostRow,
    table=table,
    columns=[
        *(table.c[name] for name in HostRow.__annotations__ if name in table.c),
        table.c.host.label("hostname"),
    ],
    sortable=HOST_SORTABLE,
    filters={"hostname": table.c.host, "liveness": lambda condition: condition},
    conditions=[table.c.binary == AGENT],
    complete=_complete_hosts,
)


def find_hosts(
    connection: sa.Connection,
    *,
    now: datetime,
    page: Page | None = None,
    hostname: str | None = None,
    state: str | None = None,
) -> list[HostRow]:
    """Return hosts; execute four statements, or five with a marker, and more for a long page.

    ``state`` selects hosts by the liveness of their agents at ``now``.
    """
    # A condition instead of a column: which deadline decides depends on the state.
    liveness = None if state is None else _liveness(now)[Liveness(state)]
    return HOSTS.find(connection, page=page, hostname=hostname, liveness=liveness)


def _liveness(now: datetime) -> dict[Liveness, sa.ColumnElement[bool]]:
    is_down, is_late = table.c.down_at <= now, table.c.late_at <= now
    return {
        Liveness.DOWN: is_down,
        Liveness.LATE: sa.and_(is_late, sa.not_(is_down)),
        Liveness.UP: sa.not_(sa.or_(is_late, is_down)),
    }
