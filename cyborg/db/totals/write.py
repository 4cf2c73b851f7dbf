# SPDX-License-Identifier: Apache-2.0
"""Write the self-heal counters, in the transaction of each action, and the counts of objects."""

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.schema import object_counts
from cyborg.db.schema import self_heal_counters as table
from cyborg.db.totals.read import COUNTS_NAME, StoredCounts, dump_counts


def increment(tx: sa.Connection, kind: CorrectiveAction, n: int, now: datetime) -> None:
    """Add ``n`` corrective actions to a counter, in one statement; do nothing for 0."""
    if n <= 0:
        return
    values: dict[str, Any] = {
        "kind": str(kind),
        "count": n,
        "last_at": now,
        "created_at": now,
        "updated_at": now,
    }
    # An upsert: of two transactions that insert the first count, one would fail otherwise.
    if tx.dialect.name == "mysql":
        upsert = mysql.insert(table).values(values)
        new: Any = upsert.inserted
        tx.execute(upsert.on_duplicate_key_update(_sum(new)))
        return
    insert = postgresql.insert if tx.dialect.name == "postgresql" else sqlite.insert
    query = insert(table).values(values)
    tx.execute(query.on_conflict_do_update(index_elements=["kind"], set_=_sum(query.excluded)))


def acquire_turn(
    tx: sa.Connection, kind: CorrectiveAction, cutoff: datetime, now: datetime
) -> bool:
    """Count an action, unless the last action was counted after ``cutoff``.

    Return whether the action was counted. Several conductors use this to do an action only once in
    a period. Raise oslo.db's DBDuplicateEntry if two conductors insert the counter concurrently:
    the other conductor has the turn.
    """
    # The UPDATE first: of two conductors only one changes the row, and has the turn.
    if tx.execute(
        sa.update(table)
        .where(table.c.kind == kind, table.c.last_at <= cutoff)
        .values(count=table.c.count + 1, last_at=now)
    ).rowcount:
        return True
    if tx.scalar(sa.select(table.c.id).where(table.c.kind == kind)) is not None:
        return False
    tx.execute(sa.insert(table).values(kind=kind, count=1, last_at=now))
    return True


def save_counts(tx: sa.Connection, counted: StoredCounts) -> None:
    """Store counts, unless newer ones are stored.

    Raise oslo.db's DBDuplicateEntry if two conductors store the first ones concurrently.
    """
    values = {
        "counted_at": counted.counted_at,
        "seconds": counted.seconds,
        "counts": dump_counts(counted.counts),
    }
    row = object_counts.c
    is_older = (row.name == COUNTS_NAME, row.counted_at <= counted.counted_at)
    if tx.execute(sa.update(object_counts).where(*is_older).values(**values)).rowcount:
        return
    if tx.scalar(sa.select(row.id).where(row.name == COUNTS_NAME)) is None:
        tx.execute(sa.insert(object_counts).values(name=COUNTS_NAME, **values))


def _sum(new: Any) -> dict[str, Any]:
    return {
        "count": table.c.count + new["count"],
        "last_at": new["last_at"],
        "updated_at": new["updated_at"],
    }
