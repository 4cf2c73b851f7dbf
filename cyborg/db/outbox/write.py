# SPDX-License-Identifier: Apache-2.0
"""Write the outbox: messages to other services, added in the transaction of the related change.

A row is ``pending`` until its delivery, which deletes it. After too many failures it is ``dead``
and remains, with its error, for the operator. A lease names the conductor that delivers the row;
after its end any conductor may lease it. The messages of one subject are delivered in the order in
which they were written: a row is not leased before all older rows of its subject.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import sqlalchemy as sa

from cyborg import tracing
from cyborg.db import bulk
from cyborg.db.old_rows import DEAD
from cyborg.db.outbox.read import MessageRow
from cyborg.db.rows import fetch_all
from cyborg.db.schema import outbox

PENDING = "pending"


class Message(NamedTuple):
    """A message of a kind about a subject, such as an instance or the uuid of an object."""

    kind: str
    subject: str
    payload: Mapping[str, Any]


class LeasedMessageRow(MessageRow):
    """A message to deliver; ``older`` is the number of older messages of its subject."""

    id: int
    owner: str | None
    lease_until: datetime | None
    trace_context: str | None
    older: int


_other = outbox.alias("other")
# The number of older pending messages of the same subject and kind.
_OLDER = (
    sa.select(sa.func.count())
    .where(
        _other.c.subject == outbox.c.subject,
        _other.c.kind == outbox.c.kind,
        _other.c.state == PENDING,
        _other.c.id < outbox.c.id,
    )
    .scalar_subquery()
    .label("older")
)
# Built once: SQLAlchemy needs more time to build such a statement than a database to run it.
#
# SELECT outbox.*, (SELECT count(*) ... older ones of the subject) AS older FROM outbox
#  WHERE kind = :kind AND state = 'pending'
#    AND next_try_at <= :now AND (lease_until IS NULL OR lease_until < :now)
#  ORDER BY next_try_at, id LIMIT :max_messages FOR UPDATE SKIP LOCKED
_PENDING = (
    sa.select(outbox, _OLDER)
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
    .limit(sa.bindparam("max_messages", type_=sa.Integer))
)
# The same without the times: also messages that are not due yet, of subjects with a due one.
_LOCK_WHOLE = _PENDING.where(
    outbox.c.subject.in_(sa.bindparam("subjects", expanding=True))
).order_by(outbox.c.id)

_IDS: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_LEASE = (
    sa.update(outbox)
    .where(outbox.c.id.in_(_IDS))
    .values(
        owner=sa.bindparam("new_owner", type_=sa.String),
        lease_until=sa.bindparam("until", type_=outbox.c.lease_until.type),
    )
)
# The owner is the guard: after its lease another conductor may deliver the message again.
_DELETE_DELIVERED = sa.delete(outbox).where(
    outbox.c.id.in_(_IDS), outbox.c.owner == sa.bindparam("leased_by", type_=sa.String)
)


def add_all(tx: sa.Connection, messages: Iterable[Message]) -> None:
    """Add messages of any kinds in one statement; do nothing if there are no messages."""
    context = tracing.current_context()
    trace = {} if context is None else {"trace_context": context}
    rows = [
        {
            "uuid": str(uuid4()),
            "kind": kind,
            "subject": subject,
            "payload": dict(payload),
            **trace,
        }
        for kind, subject, payload in messages
    ]
    bulk.insert(tx, outbox, rows)


def lease(
    tx: sa.Connection, kind: str, *, owner: str, now: datetime, until: datetime, limit: int
) -> list[LeasedMessageRow]:
    """Lease due messages, the longest due first, approximately ``limit``; return their rows.

    The rows are in the order of writing. The lease of a due message includes the older messages of
    its subject, due or not. Skip messages that another owner has leased, and later messages of
    their subjects. ``owner`` must be unique to each call, to distinguish the rows from the rows of
    an earlier lease of the same conductor.
    """
    values = {"kind": kind, "now": now, "max_messages": limit}
    due = _by_subject(fetch_all(LeasedMessageRow, tx.execute(_LOCK_DUE, values)))
    ready = {subject: _ready(rows, now) for subject, rows in due.items()}
    # The limit may have separated messages of one subject, and older ones may not be due yet.
    truncated = sum(map(len, due.values())) == limit
    incomplete = sorted(s for s, rows in due.items() if truncated or len(ready[s]) < len(rows))
    if incomplete:
        values = {"kind": kind, "subjects": incomplete}
        whole = _by_subject(fetch_all(LeasedMessageRow, tx.execute(_LOCK_WHOLE, values)))
        ready |= {subject: _ready(whole.get(subject, ()), now) for subject in incomplete}
    # A subject whose due messages come after one of another owner has nothing to lease now.
    chosen = [rows for rows in ready.values() if any(row["next_try_at"] <= now for row in rows)]
    leased = sorted(itertools.chain.from_iterable(chosen), key=lambda row: row["id"])
    if leased:
        values = {"ids": [row["id"] for row in leased], "new_owner": owner, "until": until}
        tx.execute(_LEASE, values)
    return leased


def _by_subject(rows: Iterable[LeasedMessageRow]) -> dict[str, list[LeasedMessageRow]]:
    ordered = sorted(rows, key=lambda row: (row["subject"], row["id"]))
    groups = itertools.groupby(ordered, key=lambda row: row["subject"])
    return {subject: list(group) for subject, group in groups}


def _ready(rows: Iterable[LeasedMessageRow], now: datetime) -> list[LeasedMessageRow]:
    """Return the messages of a subject, sorted by id, before the first message that must wait."""
    ready: list[LeasedMessageRow] = []
    for row in rows:
        # Otherwise an older message of the subject is not among the rows.
        has_all_older = row["older"] == len(ready)
        if not has_all_older or (row["lease_until"] or datetime.min) >= now:
            break
        ready.append(row)
    return ready


def delete_delivered(tx: sa.Connection, owner: str, ids: Collection[int]) -> int:
    """Delete delivered messages that ``owner`` still has leased; return their number."""
    return tx.execute(_DELETE_DELIVERED, {"ids": sorted(ids), "leased_by": owner}).rowcount


def record_failure(
    tx: sa.Connection, owner: str, delays: Mapping[int, float | None], error: str, now: datetime
) -> int:
    """Record a failed delivery; return how many rows ``owner`` still had leased.

    ``delays`` maps row ids to the seconds until the next try, None for dead letters.
    """
    next_tries = {id_: now + timedelta(seconds=d) for id_, d in delays.items() if d is not None}
    dead = sorted(set(delays) - set(next_tries))
    values: dict[str, Any] = {
        "attempts": outbox.c.attempts + 1,
        "owner": None,
        "lease_until": None,
        "error": error,
    }
    if dead:
        # One UPDATE for both outcomes, with a CASE for the rows of each.
        values["state"] = sa.case((outbox.c.id.in_(dead), DEAD), else_=outbox.c.state)
    if next_tries:
        values["next_try_at"] = sa.case(next_tries, value=outbox.c.id, else_=outbox.c.next_try_at)
    return tx.execute(
        sa.update(outbox)
        .where(outbox.c.id.in_(sorted(delays)), outbox.c.owner == owner)
        .values(**values)
    ).rowcount


def release(tx: sa.Connection, owner: str, ids: Collection[int] | None = None) -> int:
    """End the lease of these rows, or of all rows of ``owner``, early; return their number."""
    leased = outbox.c.owner == owner
    if ids is not None:
        leased = sa.and_(leased, outbox.c.id.in_(sorted(ids)))
    return tx.execute(sa.update(outbox).where(leased).values(owner=None, lease_until=None)).rowcount


def retry(tx: sa.Connection, uuid: str, now: datetime) -> bool:
    """Make a dead letter pending and due, reset its failures; return whether it was dead."""
    dead = sa.and_(outbox.c.uuid == uuid, outbox.c.state == DEAD)
    # Only a dead one: a pending message may be in delivery now.
    values = {"state": PENDING, "attempts": 0, "next_try_at": now}
    return tx.execute(sa.update(outbox).where(dead).values(values)).rowcount == 1


def delete(tx: sa.Connection, uuid: str) -> bool:
    """Delete a dead letter; return whether it was dead."""
    dead = sa.and_(outbox.c.uuid == uuid, outbox.c.state == DEAD)
    return tx.execute(sa.delete(outbox).where(dead)).rowcount == 1
