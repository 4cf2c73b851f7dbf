# SPDX-License-Identifier: Apache-2.0
"""Reading jobs: what takes time, on one host or on many, and how far it is.

Rows of ``find``: uuid, kind, host (None for a job of many hosts), subject, state, error, attempts,
created_at, updated_at and progress: how many of its steps are in which state. ``get`` adds steps:
a list of {host, backend, state, error} in the order of host and backend.
"""

from collections import Counter
from typing import Any

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import job_steps as steps
from cyborg.db.schema import jobs as table

# Not its arguments: a driver's configuration may hold what not everybody should read.
_SHOWN = ("uuid", "kind", "host", "subject", "state", "error", "attempts")
COLUMNS = [*(table.c[name] for name in _SHOWN), table.c.created_at, table.c.updated_at]
SORTABLE = {
    **{name: table.c[name] for name in _SHOWN if name != "error"},
    **{name: table.c[name] for name in ("created_at", "updated_at")},
}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    kind: str | None = None,
    state: str | None = None,
    host: str | None = None,
    subject: str | None = None,
) -> list[Row]:
    """Return jobs, in two statements; a marker adds one.

    ``host`` is that of the job or of one of its steps.
    """
    query = sa.select(table.c.id, *COLUMNS)
    if kind is not None:
        query = query.where(table.c.kind == kind)
    if state is not None:
        query = query.where(table.c.state == state)
    if host is not None:
        there = sa.exists().where(steps.c.job_id == table.c.id, steps.c.host == host)
        # A job of many hosts has none of its own, which is no host to ask for.
        own = sa.and_(table.c.host == host, table.c.host != "")
        query = query.where(sa.or_(own, there))
    if subject is not None:
        query = query.where(table.c.subject == subject)
    query = paging.cut(connection, query, table, page, SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    counted = _progress(connection, query) if found else {}
    return [_row(row, counted.get(row.pop("id"), {})) for row in found]


def get(connection: sa.Connection, uuid: str) -> Row | None:
    """Return one job with its steps, in two statements, or None."""
    query = sa.select(table.c.id, *COLUMNS).where(table.c.uuid == uuid)
    row = connection.execute(query).mappings().first()
    if row is None:
        return None
    found = (
        sa.select(steps.c.host, steps.c.backend, steps.c.state, steps.c.error)
        .where(steps.c.job_id == row["id"])
        .order_by(steps.c.host, steps.c.backend)
    )
    parts = [dict(part) for part in connection.execute(found).mappings()]
    shown = _row(dict(row), Counter(part["state"] for part in parts))
    del shown["id"]
    return {**shown, "steps": parts}


def _row(row: Row, progress: dict[str, int]) -> dict[str, Any]:
    return {**row, "host": row["host"] or None, "progress": dict(sorted(progress.items()))}


def _progress(connection: sa.Connection, jobs: sa.Select[Any]) -> dict[int, dict[str, int]]:
    # Joined to the query of the page, which MariaDB would not take within IN for its LIMIT.
    chosen = jobs.with_only_columns(table.c.id).subquery()
    query = (
        sa.select(steps.c.job_id, steps.c.state, sa.func.count().label("n"))
        .join(chosen, chosen.c.id == steps.c.job_id)
        .group_by(steps.c.job_id, steps.c.state)
    )
    found: dict[int, dict[str, int]] = {}
    for row in connection.execute(query):
        found.setdefault(row.job_id, {})[row.state] = row.n
    return found
