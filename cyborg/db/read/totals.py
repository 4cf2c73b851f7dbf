# SPDX-License-Identifier: Apache-2.0
"""How much there is of everything, in a fixed number of statements: for metrics and operators."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.core.device import Health
from cyborg.core.job import JobState
from cyborg.core.states import RequestState
from cyborg.db.read import deeds
from cyborg.db.read.paging import Row
from cyborg.db.schema import (
    attach_handles,
    devices,
    jobs,
    outbox,
    providers,
    requests,
    services,
)

MAX_UNHEALTHY = 1000
"""Devices that are named one by one: those that have been unhealthy for longest."""


@dataclass(frozen=True, slots=True)
class Totals:
    """One look at the database. Ages are for the caller to tell from the moments.

    ``handles`` counts by ``free`` (whatever the state of its device), ``owned``, ``dirty`` (its
    owner left and a job must clean it) and ``draining``. ``outbox`` and ``jobs`` have rows of kind,
    state, count and oldest (when the first of them was promised); of jobs only the open ones, with
    overdue, those past their deadline. ``unhealthy`` has host, address and health_since of up to
    MAX_UNHEALTHY devices. ``deeds`` has the rows of ``cyborg.db.read.deeds``.
    """

    requests: dict[str, int]
    orphans_suspected: int
    oldest_bind_started: datetime | None
    owners_unknown: int
    handles: dict[str, int]
    devices: dict[tuple[str, str], int]
    unhealthy: list[Row]
    services: dict[tuple[str, str], int]
    hosts_closed: int
    outbox: list[Row]
    jobs: list[Row]
    providers: int
    providers_stale: int
    providers_failing: int
    oldest_stale: datetime | None
    deeds: list[Row]


def read(
    connection: sa.Connection, *, now: datetime, late_before: datetime, down_before: datetime
) -> Totals:
    """Count, in nine statements.

    A service that spoke last at one of the two moments or before is late or down.
    """
    r = requests.c
    arqs = _all(
        connection,
        sa.select(
            r.state,
            sa.func.count().label("count"),
            sa.func.count(r.orphan_since).label("suspected"),
            _number(sa.not_(r.owner_known)).label("unowned"),
            sa.func.min(sa.func.coalesce(r.updated_at, r.created_at)).label("oldest"),
        ).group_by(r.state),
    )
    started = [row["oldest"] for row in arqs if row["state"] == RequestState.BIND_STARTED]
    p = providers.c
    changed = sa.case((sa.not_(p.audited), p.stale_since))
    (published,) = _all(
        connection,
        sa.select(
            sa.func.count().label("count"),
            # Those that are only compared again count as published.
            sa.func.count(changed).label("stale"),
            sa.func.count(p.error).label("failing"),
            sa.func.min(changed).label("oldest"),
        ).select_from(providers),
    )
    d = devices.c
    cards = _all(
        connection,
        sa.select(d.status, d.health, sa.func.count().label("count")).group_by(d.status, d.health),
    )
    daemons = _services(connection, late_before, down_before)
    return Totals(
        requests={row["state"]: row["count"] for row in arqs},
        orphans_suspected=sum(row["suspected"] for row in arqs),
        oldest_bind_started=started[0] if started else None,
        owners_unknown=sum(row["unowned"] for row in arqs),
        handles=_handles(connection),
        devices={(row["status"], row["health"]): row["count"] for row in cards},
        unhealthy=_unhealthy(connection),
        services={(row["binary"], row["liveness"]): row["count"] for row in daemons},
        hosts_closed=sum(row["closed"] for row in daemons),
        outbox=_outbox(connection),
        jobs=_jobs(connection, now),
        providers=published["count"],
        providers_stale=published["stale"],
        providers_failing=published["failing"],
        oldest_stale=published["oldest"],
        deeds=deeds.find(connection),
    )


def _handles(connection: sa.Connection) -> dict[str, int]:
    h = attach_handles.c
    use = sa.case(
        (h.request_id.is_not(None), "owned"),
        (h.prepared, "dirty"),
        (h.draining, "draining"),
        else_="free",
    ).label("use")
    rows = _all(connection, sa.select(use, sa.func.count().label("count")).group_by("use"))
    return {row["use"]: row["count"] for row in rows}


def _unhealthy(connection: sa.Connection) -> list[Row]:
    d = devices.c
    query = sa.select(d.host, d.address, d.health_since).where(d.health == Health.UNHEALTHY)
    return _all(connection, query.order_by(d.health_since, d.id).limit(MAX_UNHEALTHY))


def _services(connection: sa.Connection, late_before: datetime, down_before: datetime) -> list[Row]:
    s = services.c
    state = sa.case(
        (s.last_seen_at <= down_before, "down"),
        (s.last_seen_at <= late_before, "late"),
        else_="up",
    ).label("liveness")
    query = sa.select(
        s.binary,
        state,
        sa.func.count().label("count"),
        sa.func.count(s.down_since).label("closed"),
    )
    return _all(connection, query.group_by(s.binary, "liveness"))


def _outbox(connection: sa.Connection) -> list[Row]:
    o = outbox.c
    return _all(
        connection,
        sa.select(
            o.kind,
            o.state,
            sa.func.count().label("count"),
            sa.func.min(o.created_at).label("oldest"),
        )
        .group_by(o.kind, o.state)
        .order_by(o.kind, o.state),
    )


def _jobs(connection: sa.Connection, now: datetime) -> list[Row]:
    j = jobs.c
    return _all(
        connection,
        sa.select(
            j.kind,
            sa.func.count().label("count"),
            _number(sa.func.coalesce(j.deadline < now, sa.false())).label("overdue"),
            sa.func.min(j.created_at).label("oldest"),
        )
        .where(j.state == JobState.OPEN)
        .group_by(j.kind)
        .order_by(j.kind),
    )


def _number(condition: sa.ColumnElement[bool]) -> Any:
    """Return how many rows of a group fulfil a condition."""
    return sa.func.count(sa.case((condition, 1)))


def _all(connection: sa.Connection, query: sa.Executable) -> list[Row]:
    return [dict(row) for row in connection.execute(query).mappings()]
