# SPDX-License-Identifier: Apache-2.0
"""Write requested discoveries: one row for each backend of each host that must answer.

A row starts IN-PROGRESS. The first outcome is final: the agent's report, the failure to reach the
agent, or the timeout.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import TypedDict

import sqlalchemy as sa

from cyborg.core.hosts.service import AGENT
from cyborg.db import bulk
from cyborg.db.rows import fetch_all
from cyborg.db.schema import backends, discoveries, services

IN_PROGRESS = "IN-PROGRESS"
DONE = "DONE"
FAILED = "FAILED"


class TargetRow(TypedDict):
    """A backend to discover."""

    host: str
    backend: str
    driver: str


def targets(tx: sa.Connection, host: str | None, driver: str | None) -> list[TargetRow]:
    """Return the backends of a host and a driver; None selects all.

    ``driver`` is the name of a driver or of a backend.
    """
    query = (
        sa.select(services.c.host, backends.c.name.label("backend"), backends.c.driver)
        .join(services, services.c.id == backends.c.service_id)
        .where(services.c.binary == AGENT)
        .order_by(services.c.host, backends.c.name)
    )
    if host is not None:
        query = query.where(services.c.host == host)
    if driver is not None:
        query = query.where(sa.or_(backends.c.driver == driver, backends.c.name == driver))
    return fetch_all(TargetRow, tx.execute(query))


def add(tx: sa.Connection, uuid: str, targets: Iterable[tuple[str, str]]) -> None:
    """Record that a discovery was requested from these (host, backend) pairs."""
    bulk.insert(
        tx,
        discoveries,
        [
            {"uuid": uuid, "host": host, "backend": backend, "state": IN_PROGRESS}
            for host, backend in targets
        ],
    )


def record_outcomes(
    tx: sa.Connection, uuid: str, host: str, outcomes: Iterable[tuple[str, str, str | None]]
) -> None:
    """Record outcomes, each (backend, state, error); a final state does not change."""
    rows = [
        {"new_backend": name, "new_state": state, "new_error": error}
        for name, state, error in sorted(outcomes)
    ]
    if not rows:
        return
    tx.execute(
        sa.update(discoveries)
        .where(
            discoveries.c.uuid == uuid,
            discoveries.c.host == host,
            discoveries.c.backend == sa.bindparam("new_backend"),
            discoveries.c.state == IN_PROGRESS,
        )
        .values(state=sa.bindparam("new_state"), error=sa.bindparam("new_error")),
        rows,
    )


def fail_host(tx: sa.Connection, uuid: str, host: str, error: str) -> int:
    """Record that a host could not be reached; return the number of its failed backends."""
    return tx.execute(
        sa.update(discoveries)
        .where(
            discoveries.c.uuid == uuid,
            discoveries.c.host == host,
            discoveries.c.state == IN_PROGRESS,
        )
        .values(state=FAILED, error=error)
    ).rowcount


def purge(tx: sa.Connection, cutoff: datetime, limit: int) -> int:
    """Delete up to ``limit`` rows created before ``cutoff``; return their number."""
    ids = tx.scalars(
        sa.select(discoveries.c.id)
        .where(discoveries.c.created_at < cutoff)
        .order_by(discoveries.c.id)
        .limit(limit)
    ).all()
    return bulk.delete(tx, discoveries, ids)


def fail_older(tx: sa.Connection, cutoff: datetime, error: str) -> int:
    """Fail the rows created before ``cutoff`` that are still in progress; return their number."""
    return tx.execute(
        sa.update(discoveries)
        .where(discoveries.c.state == IN_PROGRESS, discoveries.c.created_at < cutoff)
        .values(state=FAILED, error=error)
    ).rowcount
