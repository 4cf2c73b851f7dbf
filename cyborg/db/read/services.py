# SPDX-License-Identifier: Apache-2.0
"""Reading services: the daemons of each host, an agent's with its backends.

Rows: uuid, binary, host, epoch, endpoint, status, digest, generation, versions, started_at,
last_seen_at, down_since, identity, created_at, updated_at and backends: a list of {uuid, name,
driver, status, error, created_at, updated_at} in the order of their names, and with ``functions``,
where these are asked for, as ``cyborg.db.read.backends`` has them.
"""

from collections.abc import Collection

import sqlalchemy as sa

from cyborg.db.read import backends as read_backends
from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import backends
from cyborg.db.schema import services as table

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
) -> list[Row]:
    """Return services with their backends, in two statements; a marker adds one.

    ``functions`` adds two, and has each backend say what it offers. ``function`` adds one, and
    leaves alone the backends that offer this one, and the agents that have such a backend.
    """
    query = sa.select(table)
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if binary is not None:
        query = query.where(table.c.binary == binary)
    if host is not None:
        query = query.where(table.c.host == host)
    some = None if function is None else read_backends.offering(connection, function)
    if some is not None:
        having = sa.select(backends.c.service_id).where(read_backends.among(backends.c.id, some))
        query = query.where(table.c.id.in_(having))
    query = paging.cut(connection, query, table, page, SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    # The query of the page, not a list of its ids, which may be longer than a statement can carry;
    # it is joined, for MariaDB takes no LIMIT within IN.
    chosen = query.with_only_columns(table.c.id).subquery()
    held = _backends(connection, chosen, some) if found else {}
    if functions and held:
        joined = backends.c.service_id == chosen.c.id
        offered = read_backends.functions(connection, joined, chosen, function)
        held = {
            service: [{**row, "functions": offered.get(row["id"], [])} for row in rows]
            for service, rows in held.items()
        }
    for row in found:
        row["backends"] = [_shown(one) for one in held.get(row.pop("id"), ())]
    return list(found)


def get(connection: sa.Connection, uuid: str) -> Row | None:
    """Return one service with its backends, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)


def _backends(
    connection: sa.Connection, chosen: sa.FromClause, some: Collection[int] | None
) -> dict[int, list[Row]]:
    query = (
        sa.select(backends)
        .join(chosen, chosen.c.id == backends.c.service_id)
        .order_by(backends.c.name, backends.c.id)
    )
    held: dict[int, list[Row]] = {}
    for row in connection.execute(query).mappings():
        if some is None or row["id"] in some:
            held.setdefault(row["service_id"], []).append(dict(row))
    return held


def _shown(backend: Row) -> Row:
    return {name: value for name, value in backend.items() if name not in ("id", "service_id")}
