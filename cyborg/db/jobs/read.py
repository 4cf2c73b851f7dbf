# SPDX-License-Identifier: Apache-2.0
"""Read jobs, on one host or on many, with their progress."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.core.jobs.job import JobState
from cyborg.db import paging
from cyborg.db.listing import Listing, columns_of
from cyborg.db.paging import NameRow, Page
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import job_steps as steps
from cyborg.db.schema import jobs as table


class JobRow(TypedDict):
    """A job; ``progress`` is the number of its steps by state.

    ``activity`` is what the host of an open job does (``core.jobs.progress``), None if unknown.
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


_STEPS = sa.select(*row_columns(StepRow, steps))
# Row ids are the order of creation and have an index. The other columns have few values.
SORTABLE = {**columns_of(table, "uuid", "host", "subject"), "created_at": table.c.id}


def _complete(connection: sa.Connection, rows: list[dict[str, Any]]) -> list[JobRow]:
    progress = _progress(connection, [row["id"] for row in rows])
    for row in rows:
        row["progress"] = dict(sorted(progress.get(row.pop("id"), {}).items()))
        # A job on many hosts is stored with the host "": ``drivers.rollouts.enqueue``.
        row["host"] = row["host"] or None
        # What the agent did last says nothing about an ended job.
        row["activity"] = row["activity"] if row["state"] == JobState.OPEN else None
    return cast(list[JobRow], rows)


JOBS = Listing(
    row=JobRow,
    table=table,
    # Without the arguments: a driver's configuration may contain secrets.
    columns=[table.c.id, *(table.c[name] for name in JobRow.__annotations__ if name in table.c)],
    sortable=SORTABLE,
    filters=columns_of(table, "uuid", "kind", "state", "subject"),
    ids_first=True,
    complete=_complete,
)
get = JOBS.get


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    host: str | None = None,
    **criteria: str | None,
) -> list[JobRow]:
    """Return jobs; execute two statements, or three with a marker.

    ``host`` selects the jobs on this host, and the jobs that have a step on this host.
    """
    within = None if host is None else _ids_on(host)
    return JOBS.find(connection, page=page, within=within, **criteria)


def _ids_on(host: str) -> sa.FromClause:
    """Return the ids of the jobs on a host, and of the jobs that have a step on it.

    A union, because a database uses no index for OR of two tables.
    """
    # A job on many hosts has the host "", which is no valid filter.
    same_host = sa.select(table.c.id).where(table.c.host == host, table.c.host != "")
    has_step = sa.select(steps.c.job_id).where(steps.c.host == host)
    return sa.union(same_host, has_step).subquery("on_host")


def find_hosts(
    connection: sa.Connection, uuid: str, *, page: Page | None = None, state: str | None = None
) -> list[NameRow]:
    """Return the hosts of the steps of a job, ordered by name; the marker is any text.

    ``state`` selects the hosts with a step in this state.
    """
    return paging.find_names(connection, steps.c.host, _is_step(uuid, state), page, "host")


def find_steps(
    connection: sa.Connection, uuid: str, hosts: Sequence[NameRow], state: str | None = None
) -> list[StepRow]:
    """Return the steps of a job on a page of hosts, in the order of the hosts, then by backend.

    ``state`` selects the steps in this state.
    """
    if not hosts:
        return []
    query = _STEPS.where(_is_step(uuid, state), paging.on_page(steps.c.host, hosts))
    rows = fetch_all(StepRow, connection.execute(query))
    return paging.sort_by_page(rows, hosts, lambda row: (row["host"], row["backend"]))


def _is_step(uuid: str, state: str | None) -> sa.ColumnElement[bool]:
    job = sa.select(table.c.id).where(table.c.uuid == uuid).scalar_subquery()
    of_job = steps.c.job_id == job
    return of_job if state is None else sa.and_(of_job, steps.c.state == state)


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
