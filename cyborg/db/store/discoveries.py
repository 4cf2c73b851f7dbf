# SPDX-License-Identifier: Apache-2.0
"""Writing discoveries that were asked for: one row for each backend of each host that must answer.

A row starts IN-PROGRESS and is decided once, by whoever comes first: the agent's word, the failure
to reach it, or the sweep of those that never came to an end.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime

import sqlalchemy as sa

from cyborg.db.schema import backends, discoveries, services
from cyborg.db.store import bulk
from cyborg.db.store.services import AGENT

IN_PROGRESS = "IN-PROGRESS"
DONE = "DONE"
FAILED = "FAILED"


def targets(tx: sa.Connection, host: str | None, driver: str | None) -> Sequence[sa.RowMapping]:
    """Return host, backend and driver of every backend that is meant; ``driver`` names either."""
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
    return tx.execute(query).mappings().all()


def add(tx: sa.Connection, uuid: str, meant: Iterable[tuple[str, str]]) -> None:
    """Record that a discovery has been asked of these (host, backend) pairs."""
    bulk.insert(
        tx,
        discoveries,
        [
            {"uuid": uuid, "host": host, "backend": backend, "state": IN_PROGRESS}
            for host, backend in meant
        ],
    )


def decide(
    tx: sa.Connection, uuid: str, host: str, outcomes: Iterable[tuple[str, str, str | None]]
) -> None:
    """Record outcomes, each a backend, its state and its error; what is decided stays."""
    rows = [
        {"which": name, "outcome": state, "text": error} for name, state, error in sorted(outcomes)
    ]
    if not rows:
        return
    tx.execute(
        sa.update(discoveries)
        .where(
            discoveries.c.uuid == uuid,
            discoveries.c.host == host,
            discoveries.c.backend == sa.bindparam("which"),
            discoveries.c.state == IN_PROGRESS,
        )
        .values(state=sa.bindparam("outcome"), error=sa.bindparam("text")),
        rows,
    )


def fail_host(tx: sa.Connection, uuid: str, host: str, error: str) -> int:
    """Record that a host could not be asked; return how many of its backends were undecided."""
    return tx.execute(
        sa.update(discoveries)
        .where(
            discoveries.c.uuid == uuid,
            discoveries.c.host == host,
            discoveries.c.state == IN_PROGRESS,
        )
        .values(state=FAILED, error=error)
    ).rowcount


def purge(tx: sa.Connection, before: datetime, limit: int) -> int:
    """Forget parts that were asked for before this moment; return how many."""
    ids = tx.scalars(
        sa.select(discoveries.c.id)
        .where(discoveries.c.created_at < before)
        .order_by(discoveries.c.id)
        .limit(limit)
    ).all()
    return bulk.delete(tx, discoveries, ids)


def fail_older(tx: sa.Connection, before: datetime, error: str) -> int:
    """Record that whatever began before this moment never came to an end; return how many."""
    return tx.execute(
        sa.update(discoveries)
        .where(discoveries.c.state == IN_PROGRESS, discoveries.c.created_at < before)
        .values(state=FAILED, error=error)
    ).rowcount
