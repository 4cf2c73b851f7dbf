# SPDX-License-Identifier: Apache-2.0
"""Counting what the conductors put right, in the transaction that does it."""

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from cyborg.core.deed import Deed
from cyborg.db.schema import deeds


def add(tx: sa.Connection, kind: Deed, n: int, now: datetime) -> None:
    """Count ``n`` deeds, in one statement; none for 0."""
    if n <= 0:
        return
    values: dict[str, Any] = {
        "kind": str(kind),
        "count": n,
        "last_at": now,
        "created_at": now,
        "updated_at": now,
    }
    if tx.dialect.name == "mysql":
        maria = mysql.insert(deeds).values(values)
        new: Any = maria.inserted
        tx.execute(maria.on_duplicate_key_update(_sum(new)))
        return
    insert = postgresql.insert if tx.dialect.name == "postgresql" else sqlite.insert
    other = insert(deeds).values(values)
    tx.execute(other.on_conflict_do_update(index_elements=["kind"], set_=_sum(other.excluded)))


def take_turn(tx: sa.Connection, kind: Deed, before: datetime, now: datetime) -> bool:
    """Count a deed whose last one was not after ``before``; tell whether this call did.

    That is how conductors take turns. Raises oslo.db's DBDuplicateEntry when two do it for the
    first time at once: the other one has the turn.
    """
    if tx.execute(
        sa.update(deeds)
        .where(deeds.c.kind == kind, deeds.c.last_at <= before)
        .values(count=deeds.c.count + 1, last_at=now)
    ).rowcount:
        return True
    if tx.scalar(sa.select(deeds.c.id).where(deeds.c.kind == kind)) is not None:
        return False
    tx.execute(sa.insert(deeds).values(kind=kind, count=1, last_at=now))
    return True


def _sum(new: Any) -> dict[str, Any]:
    return {
        "count": deeds.c.count + new["count"],
        "last_at": new["last_at"],
        "updated_at": new["updated_at"],
    }
