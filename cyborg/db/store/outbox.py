# SPDX-License-Identifier: Apache-2.0
"""What neighbours must be told: written with the state that calls for it, delivered later.

A row is ``pending`` until it is delivered, which deletes it, or ``dead`` after too many failures,
which keeps it with its error for the operator. A lease says who delivers it now; when the lease
ends, anyone may.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.db.schema import outbox

PENDING = "pending"
DEAD = "dead"


def add(tx: sa.Connection, kind: str, messages: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Promise messages, each a subject and a payload, in the transaction that calls for them."""
    rows = [
        {"uuid": str(uuid4()), "kind": kind, "subject": subject, "payload": dict(payload)}
        for subject, payload in messages
    ]
    if rows:
        tx.execute(sa.insert(outbox), rows)


def lease(
    tx: sa.Connection, kind: str, *, owner: str, now: datetime, until: datetime, limit: int
) -> Sequence[sa.RowMapping]:
    """Take up to ``limit`` messages that are due, the longest due first; return their rows.

    What another owner leases is left alone until the lease ends. ``owner`` must be new at each
    call: it is how the rows are told from those of an earlier lease of the same conductor.
    """
    due = sa.and_(
        outbox.c.kind == kind,
        outbox.c.state == PENDING,
        outbox.c.next_try_at <= now,
        sa.or_(outbox.c.lease_until.is_(None), outbox.c.lease_until < now),
    )
    ids = tx.scalars(
        sa.select(outbox.c.id)
        .where(due)
        .order_by(outbox.c.next_try_at, outbox.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    if not ids:
        return []
    taken = sa.update(outbox).where(outbox.c.id.in_(sorted(ids)), due)
    tx.execute(taken.values(owner=owner, lease_until=until))
    mine = sa.select(outbox).where(outbox.c.owner == owner, outbox.c.id.in_(ids))
    return tx.execute(mine.order_by(outbox.c.id)).mappings().all()


def done(tx: sa.Connection, owner: str, ids: Collection[int]) -> int:
    """Delete what has been delivered, unless the lease has passed to another."""
    return tx.execute(
        sa.delete(outbox).where(outbox.c.id.in_(sorted(ids)), outbox.c.owner == owner)
    ).rowcount


def failed(
    tx: sa.Connection, owner: str, delays: Mapping[int, float | None], error: str, now: datetime
) -> int:
    """Record a failed delivery: by row id, try again after so many seconds, or never (None)."""
    again = {id_: now + timedelta(seconds=d) for id_, d in delays.items() if d is not None}
    dead = sorted(set(delays) - set(again))
    values: dict[str, Any] = {
        "attempts": outbox.c.attempts + 1,
        "owner": None,
        "lease_until": None,
        "error": error,
    }
    if dead:
        values["state"] = sa.case((outbox.c.id.in_(dead), DEAD), else_=outbox.c.state)
    if again:
        values["next_try_at"] = sa.case(again, value=outbox.c.id, else_=outbox.c.next_try_at)
    return tx.execute(
        sa.update(outbox)
        .where(outbox.c.id.in_(sorted(delays)), outbox.c.owner == owner)
        .values(**values)
    ).rowcount


def give_back(tx: sa.Connection, owner: str) -> int:
    """End a lease early: what it covers and was not tried is anyone's at once."""
    return tx.execute(
        sa.update(outbox).where(outbox.c.owner == owner).values(owner=None, lease_until=None)
    ).rowcount
