# SPDX-License-Identifier: Apache-2.0
"""Read jobs, on one host or on many, with their progress."""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.core.jobs.job import JobState
from cyborg.db import paging
from cyborg.db.paging import Page
from cyborg.db.rows import fetch_all
from cyborg.db.schema import job_steps as steps
from cyborg.db.schema import jobs as table


class JobRow(TypedDict):
    """A job; ``progress`` is the number of its steps by state.

    ``activity`` is what the host of an open job does (``core.jobs.activity``), None if unknown.
    """

    uuid: str
    kind: str
    host: str | None
    subject: str
    state: str
    error: str | None
    attempts: int
    created_at: datetime
    updated_at: datetime | None
    progress: dict[str, int]
    activity: Any


class StepRow(TypedDict):
    """A step of a job: one backend on one host."""

    host: str
    backend: str
    state: str
    error: str | None


class JobDetailsRow(JobRow):
    """A job with its steps, ordered by host and backend."""

    steps: list[StepRow]


# Without the arguments: a driver's configuration may contain secrets.
_SHOWN = ("uuid", "kind", "host", "subject", "state", "error", "attempts")
COLUMNS = [
    *(table.c[name] for name in (*_SHOWN, "activity")),
    table.c.created_at,
    table.c.updated_at,
]
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
) -> list[JobRow]:
    """Return jobs; execute two statements, or three with a marker.

    ``host`` selects the jobs on this host, and the jobs that have a step on this host.
    """
    query = sa.select(table.c.id, *COLUMNS)
    if kind is not None:
        query = query.where(table.c.kind == kind)
    if state is not None:
        query = query.where(table.c.state == state)
    if host is not None:
        has_step = sa.exists().where(steps.c.job_id == table.c.id, steps.c.host == host)
        # A job on many hosts has the host "", which is no valid filter.
        same_host = sa.and_(table.c.host == host, table.c.host != "")
        query = query.where(sa.or_(same_host, has_step))
    if subject is not None:
        query = query.where(table.c.subject == subject)
    query = paging.paginate(connection, query, table, page, SORTABLE)
    found = connection.execute(query).mappings().all()
    progress_by_job = _progress(connection, query) if found else {}
    return [_row(row, progress_by_job.get(row["id"], {})) for row in found]


def get(connection: sa.Connection, uuid: str) -> JobDetailsRow | None:
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
    step_rows = fetch_all(StepRow, connection.execute(found))
    return {**_row(row, Counter(step["state"] for step in step_rows)), "steps": step_rows}


def _row(row: Mapping[Any, Any], progress: dict[str, int]) -> JobRow:
    shown = {name: value for name, value in row.items() if name != "id"}
    computed = {
        "host": row["host"] or None,
        "progress": dict(sorted(progress.items())),
        "activity": row["activity"] if row["state"] == JobState.OPEN else None,
    }
    return cast(JobRow, {**shown, **computed})


def _progress(connection: sa.Connection, jobs: sa.Select[Any]) -> dict[int, dict[str, int]]:
    # A join with the query of the page: MariaDB does not allow a LIMIT within IN.
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
