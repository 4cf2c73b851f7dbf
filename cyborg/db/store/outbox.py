# SPDX-License-Identifier: Apache-2.0
"""What neighbours must be told: written with the state that calls for it, delivered later.

A row is ``pending`` until it is delivered, which deletes it, or ``dead`` after too many failures,
which keeps it with its error for the operator. A lease says who delivers it now; when the lease
ends, anyone may. What is told of one subject is told in the order in which it was written: nobody
gets a row before he has those of its subject that are older.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.db.schema import outbox

PENDING = "pending"
DEAD = "dead"

Message = tuple[str, str, Mapping[str, Any]]
"""A kind, a subject and a payload."""

_alike = outbox.alias("alike")
_OLDER = (
    sa.select(sa.func.count())
    .where(
        _alike.c.subject == outbox.c.subject,
        _alike.c.kind == outbox.c.kind,
        _alike.c.state == PENDING,
        _alike.c.id < outbox.c.id,
    )
    .scalar_subquery()
    .label("older")
)
"""How many messages of the subject wait before this one."""
# Built once: SQLAlchemy takes longer to build such a statement than a database to answer it.
_PENDING = (
    sa.select(
        outbox.c.id,
        outbox.c.uuid,
        outbox.c.subject,
        outbox.c.payload,
        outbox.c.attempts,
        outbox.c.next_try_at,
        outbox.c.lease_until,
        _OLDER,
    )
    .where(outbox.c.kind == sa.bindparam("kind", type_=sa.String), outbox.c.state == PENDING)
    .with_for_update(skip_locked=True)
)
_NOW = sa.bindparam("now", type_=outbox.c.next_try_at.type)
_LOCK_DUE = (
    _PENDING.where(
        outbox.c.next_try_at <= _NOW,
        sa.or_(outbox.c.lease_until.is_(None), outbox.c.lease_until < _NOW),
    )
    .order_by(outbox.c.next_try_at, outbox.c.id)
    .limit(sa.bindparam("most", type_=sa.Integer))
)
_LOCK_WHOLE = _PENDING.where(
    outbox.c.subject.in_(sa.bindparam("subjects", expanding=True))
).order_by(outbox.c.id)


def add(tx: sa.Connection, kind: str, messages: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Promise messages, each a subject and a payload, in the transaction that calls for them."""
    add_all(tx, [(kind, subject, payload) for subject, payload in messages])


def add_all(tx: sa.Connection, messages: Iterable[Message]) -> None:
    """Promise messages of any kinds in one statement, or none in no statement."""
    rows = [
        {"uuid": str(uuid4()), "kind": kind, "subject": subject, "payload": dict(payload)}
        for kind, subject, payload in messages
    ]
    if rows:
        tx.execute(sa.insert(outbox), rows)


def lease(
    tx: sa.Connection, kind: str, *, owner: str, now: datetime, until: datetime, limit: int
) -> Sequence[sa.RowMapping]:
    """Take about ``limit`` messages that are due, the longest due first; return their rows.

    Keys: id, uuid, subject, payload, attempts, next_try_at, lease_until, older (of the subject).
    The rows are in the order of writing. A message that is due brings those of its subject along
    that are older, due or not. What another owner leases is left alone until the lease ends, and
    so is what was written after it. ``owner`` must be new at each call: it is how the rows are told
    from those of an earlier lease of the same conductor.
    """
    values = {"kind": kind, "now": now, "most": limit}
    due = _by_subject(tx.execute(_LOCK_DUE, values).mappings())
    ready = {subject: _ready(rows, now) for subject, rows in due.items()}
    # The limit may have come between messages of one subject.
    cut = sum(map(len, due.values())) == limit
    torn = sorted(s for s, rows in due.items() if cut or len(ready[s]) < len(rows))
    if torn:
        values = {"kind": kind, "subjects": torn}
        whole = _by_subject(tx.execute(_LOCK_WHOLE, values).mappings())
        ready |= {subject: _ready(whole.get(subject, ()), now) for subject in torn}
    chosen = [rows for rows in ready.values() if any(row["next_try_at"] <= now for row in rows)]
    taken = sorted(itertools.chain.from_iterable(chosen), key=lambda row: int(row["id"]))
    if taken:
        mine = outbox.c.id.in_([row["id"] for row in taken])
        tx.execute(sa.update(outbox).where(mine).values(owner=owner, lease_until=until))
    return taken


def _by_subject(rows: Iterable[sa.RowMapping]) -> dict[str, list[sa.RowMapping]]:
    ordered = sorted(rows, key=lambda row: (str(row["subject"]), int(row["id"])))
    groups = itertools.groupby(ordered, key=lambda row: str(row["subject"]))
    return {subject: list(group) for subject, group in groups}


def _ready(rows: Iterable[sa.RowMapping], now: datetime) -> list[sa.RowMapping]:
    """Return a subject's messages, by id, up to the first that has to wait for an older one."""
    ready: list[sa.RowMapping] = []
    for row in rows:
        if row["older"] != len(ready) or (row["lease_until"] or datetime.min) >= now:
            break
        ready.append(row)
    return ready


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


def give_back(tx: sa.Connection, owner: str, ids: Collection[int] | None = None) -> int:
    """End a lease early, of these rows or of all: each is anyone's when it is due."""
    mine = outbox.c.owner == owner
    if ids is not None:
        mine = sa.and_(mine, outbox.c.id.in_(sorted(ids)))
    return tx.execute(sa.update(outbox).where(mine).values(owner=None, lease_until=None)).rowcount


def retry(tx: sa.Connection, uuid: str, now: datetime) -> bool:
    """Make a dead message pending and due, as if it had never failed; tell whether it was dead."""
    dead = sa.and_(outbox.c.uuid == uuid, outbox.c.state == DEAD)
    values = {"state": PENDING, "attempts": 0, "next_try_at": now}
    return tx.execute(sa.update(outbox).where(dead).values(values)).rowcount == 1


def delete(tx: sa.Connection, uuid: str) -> bool:
    """Forget a dead message; tell whether it was dead."""
    dead = sa.and_(outbox.c.uuid == uuid, outbox.c.state == DEAD)
    return tx.execute(sa.delete(outbox).where(dead)).rowcount == 1


def state_of(tx: sa.Connection, uuid: str) -> str | None:
    """Return the state of a message, None when there is none."""
    return tx.scalar(sa.select(outbox.c.state).where(outbox.c.uuid == uuid))


def purge(tx: sa.Connection, before: datetime, limit: int) -> int:
    """Forget messages that have been dead since before ``before``; return how many."""
    old = sa.and_(outbox.c.state == DEAD, outbox.c.updated_at < before)
    ids = tx.scalars(sa.select(outbox.c.id).where(old).limit(limit)).all()
    if not ids:
        return 0
    return tx.execute(sa.delete(outbox).where(outbox.c.id.in_(ids), old)).rowcount
