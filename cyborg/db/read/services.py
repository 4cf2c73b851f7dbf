# SPDX-License-Identifier: Apache-2.0
"""Reading services: the daemons of each host, an agent's with its backends.

Rows: uuid, binary, host, epoch, endpoint, status, digest, generation, versions, started_at,
last_seen_at, down_since, identity, created_at, updated_at and backends: a list of {uuid, name,
driver, status, error, created_at, updated_at} in the order of their names.
"""

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

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
) -> list[Row]:
    """Return services with their backends, in two statements; a marker adds one."""
    query = sa.select(table)
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if binary is not None:
        query = query.where(table.c.binary == binary)
    if host is not None:
        query = query.where(table.c.host == host)
    query = paging.cut(connection, query, table, page, SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    held = _backends(connection, query) if found else {}
    for row in found:
        row["backends"] = held.get(row.pop("id"), [])
    return list(found)


def get(connection: sa.Connection, uuid: str) -> Row | None:
    """Return one service with its backends, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)


def _backends(connection: sa.Connection, services: sa.Select[Any]) -> dict[int, list[Row]]:
    # Joined to the query of the page, not to a list of its ids, which may be longer than a
    # statement can carry; MariaDB takes no LIMIT within IN.
    chosen = services.with_only_columns(table.c.id).subquery()
    query = (
        sa.select(backends)
        .join(chosen, chosen.c.id == backends.c.service_id)
        .order_by(backends.c.name, backends.c.id)
    )
    held: dict[int, list[Row]] = {}
    for row in connection.execute(query).mappings():
        values = dict(row)
        del values["id"]
        held.setdefault(values.pop("service_id"), []).append(values)
    return held
