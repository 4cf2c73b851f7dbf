# SPDX-License-Identifier: Apache-2.0
"""Read the discoveries that operators requested."""

from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.paging import Page
from cyborg.db.rows import fetch_all
from cyborg.db.schema import discoveries as table


class BackendRow(TypedDict):
    """One backend of one host that must answer a discovery."""

    uuid: str
    host: str
    backend: str
    state: str
    error: str | None
    created_at: datetime
    updated_at: datetime | None


class SummaryRow(TypedDict):
    """A discovery; ``progress`` is the number of its backends by state."""

    uuid: str
    state: str
    progress: dict[str, int]
    created_at: datetime
    updated_at: datetime | None


class DiscoveryRow(TypedDict):
    """A discovery with its backends, ordered by host and backend."""

    uuid: str
    created_at: datetime
    updated_at: datetime | None
    backends: list[BackendRow]


_BACKENDS = sa.select(*(column for column in table.c if column.name != "id")).order_by(
    table.c.host, table.c.backend
)
_IN_PROGRESS, _FAILED = (
    sa.func.sum(sa.case((table.c.state == state, 1), else_=0))
    for state in ("IN-PROGRESS", "FAILED")
)
_SUMMARY = sa.select(
    sa.func.min(table.c.id).label("id"),
    table.c.uuid,
    sa.case((_IN_PROGRESS > 0, "IN-PROGRESS"), (_FAILED > 0, "FAILED"), else_="DONE").label(
        "state"
    ),
    sa.func.count().label("total"),
    _IN_PROGRESS.label("in_progress"),
    _FAILED.label("failed"),
    sa.func.min(table.c.created_at).label("created_at"),
    sa.func.max(table.c.updated_at).label("updated_at"),
).group_by(table.c.uuid)
SUMMARY_SORTABLE = ("uuid", "state", "created_at", "updated_at")


def find_summaries(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    host: str | None = None,
    state: str | None = None,
) -> list[SummaryRow]:
    """Return discoveries; execute one statement, or two with a marker.

    Fields: uuid, state (IN-PROGRESS while a backend is in progress, else FAILED if a backend
    failed), created_at, updated_at (the last change) and progress: the number of backends by
    state. ``host`` selects the discoveries that include this host.
    """
    query = _SUMMARY
    if host is not None:
        on_host = sa.select(table.c.uuid).where(table.c.host == host)
        query = query.where(table.c.uuid.in_(on_host))
    grouped = query.subquery()
    listed = sa.select(grouped)
    if state is not None:
        listed = listed.where(grouped.c.state == state)
    sortable = {name: grouped.c[name] for name in SUMMARY_SORTABLE}
    listed = paging.paginate(connection, listed, grouped, page, sortable)
    return [_summary(dict(row)) for row in connection.execute(listed).mappings()]


def _summary(row: dict[str, Any]) -> SummaryRow:
    del row["id"]
    total, waiting, failed = (int(row.pop(k)) for k in ("total", "in_progress", "failed"))
    counts = {"DONE": total - waiting - failed, "FAILED": failed, "IN-PROGRESS": waiting}
    progress = {name: count for name, count in counts.items() if count}
    return cast(SummaryRow, {**row, "progress": progress})


def get(connection: sa.Connection, uuid: str) -> DiscoveryRow | None:
    """Return one discovery: uuid, created_at, updated_at (the last change) and backends; or None.

    ``backends`` are ordered by host and backend.
    """
    query = _BACKENDS.where(table.c.uuid == uuid)
    backends = fetch_all(BackendRow, connection.execute(query))
    if not backends:
        return None
    changes = [row["updated_at"] for row in backends if row["updated_at"] is not None]
    return {
        "uuid": uuid,
        "created_at": min(row["created_at"] for row in backends),
        "updated_at": max(changes, default=None),
        "backends": backends,
    }
