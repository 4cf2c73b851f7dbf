# SPDX-License-Identifier: Apache-2.0
"""Read jobs, on one host or on many, with their progress."""

from collections import Counter
from collections.abc import Collection, Mapping
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
# Row ids are the order of creation and have an index. The other columns have few values.
SORTABLE = {
    **{name: table.c[name] for name in ("uuid", "host", "subject")},
    "created_at": table.c.id,
}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuid: str | None = None,
    kind: str | None = None,
    state: str | None = None,
    host: str | None = None,
    subject: str | None = None,
) -> list[JobRow]:
    """Return jobs; execute two statements, or three with a marker.

    ``host`` selects the jobs on this host, and the jobs that have a step on this host.
    """
    equal = {"uuid": uuid, "kind": kind, "state": state, "subject": subject}
    ids = sa.select(table.c.id).where(
        *(table.c[name] == value for name, value in equal.items() if value is not None)
    )
    if host is not None:
        on_host = _ids_on(host)
        ids = ids.join(on_host, on_host.c.id == table.c.id)
    query = sa.select(table.c.id, *COLUMNS)
    query = paging.paginate_ids(connection, query, ids, table, page, SORTABLE)
    found = connection.execute(query).mappings().all()
    progress_by_job = _progress(connection, [row["id"] for row in found]) if found else {}
    return [_row(row, progress_by_job.get(row["id"], {})) for row in found]


def _ids_on(host: str) -> sa.FromClause:
    """Return the ids of the jobs on a host, and of the jobs that have a step on it.

    A union, because a database uses no index for OR of two tables.
    """
    # A job on many hosts has the host "", which is no valid filter.
    same_host = sa.select(table.c.id).where(table.c.host == host, table.c.host != "")
    has_step = sa.select(steps.c.job_id).where(steps.c.host == host)
    return sa.union(same_host, has_step).subquery("on_host")


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


def _progress(connection: sa.Connection, jobs: Collection[int]) -> dict[int, dict[str, int]]:
    query = (
        sa.select(steps.c.job_id, steps.c.state, sa.func.count().label("n"))
        .where(paging.id_in(steps.c.job_id, jobs))
        .group_by(steps.c.job_id, steps.c.state)
    )
    found: dict[int, dict[str, int]] = {}
    for row in connection.execute(query):
        found.setdefault(row.job_id, {})[row.state] = row.n
    return found
