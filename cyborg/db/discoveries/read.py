# SPDX-License-Identifier: Apache-2.0
"""Read the discoveries that operators requested."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.paging import NameRow, Page
from cyborg.db.rows import equal, fetch_all, row_columns
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


_BACKENDS = sa.select(*row_columns(BackendRow, table)).order_by(table.c.host, table.c.backend)
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
    uuid: str | None = None,
    host: str | None = None,
    state: str | None = None,
) -> list[SummaryRow]:
    """Return discoveries; execute one statement, one more with a marker, and one with ``host``.

    An index has all of it: the rows of the backends, of which a discovery has some for each host,
    are counted and not read.

    Fields: uuid, state (IN-PROGRESS while a backend is in progress, else FAILED if a backend
    failed), created_at, updated_at (the last change) and progress: the number of backends by
    state. ``host`` selects the discoveries that include this host.
    """
    query = _SUMMARY.where(*equal({table.c.uuid: uuid}))
    if host is not None:
        on_host = sa.select(table.c.uuid).where(table.c.host == host).distinct()
        # A list: MariaDB would join the rows of all discoveries with those of the host.
        query = query.where(table.c.uuid.in_(connection.scalars(on_host).all()))
    # The state of a discovery follows from its rows: it can be compared only after the grouping.
    grouped = query.subquery()
    listed = sa.select(grouped).where(*equal({grouped.c.state: state}))
    sortable = {name: grouped.c[name] for name in SUMMARY_SORTABLE}
    listed = paging.paginate(connection, listed, grouped, page, sortable)
    return [_summary(dict(row)) for row in connection.execute(listed).mappings()]


def _summary(row: dict[str, Any]) -> SummaryRow:
    del row["id"]
    total, waiting, failed = (int(row.pop(k)) for k in ("total", "in_progress", "failed"))
    counts = {"DONE": total - waiting - failed, "FAILED": failed, "IN-PROGRESS": waiting}
    progress = {name: count for name, count in counts.items() if count}
    return cast(SummaryRow, {**row, "progress": progress})


def get(connection: sa.Connection, uuid: str) -> SummaryRow | None:
    """Return one discovery as in the list, or None."""
    return next(iter(find_summaries(connection, uuid=uuid)), None)


def find_hosts(connection: sa.Connection, uuid: str, *, page: Page | None = None) -> list[NameRow]:
    """Return the hosts of a discovery, ordered by name; the marker is any text."""
    return paging.find_names(connection, table.c.host, table.c.uuid == uuid, page, "host")


def find_backends(
    connection: sa.Connection, uuid: str, hosts: Sequence[NameRow]
) -> list[BackendRow]:
    """Return the backends of a page of hosts, in the order of the hosts, then by name."""
    if not hosts:
        return []
    query = _BACKENDS.where(table.c.uuid == uuid, paging.on_page(table.c.host, hosts))
    rows = fetch_all(BackendRow, connection.execute(query))
    return paging.sort_by_page(rows, hosts, lambda row: (row["host"], row["backend"]))
