# SPDX-License-Identifier: Apache-2.0
"""Statements that each change many rows, to avoid one statement per row."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

MAX_PARAMETERS = 30_000
"""Maximum values of one statement: SQLite allows 32766, PostgreSQL's protocol 65535."""


T = TypeVar("T")


def chunks(values: Collection[T]) -> Iterator[Sequence[T]]:
    """Split values into as few chunks as possible, each small enough for one statement."""
    items = list(values)
    for start in range(0, len(items), MAX_PARAMETERS):
        yield items[start : start + MAX_PARAMETERS]


def insert(tx: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, which must all have the same keys; do nothing for no rows."""
    if rows:
        tx.execute(
            sa.insert(table),
            [dict(row) for row in rows],
            execution_options={"insertmanyvalues_page_size": MAX_PARAMETERS},
        )


def update(tx: sa.Connection, table: sa.Table, rows: Iterable[Mapping[str, Any]]) -> None:
    """Update rows: ``id`` in each is the row id, the other keys are the new column values.

    All rows must have the same keys. There is no guard and no row count: the caller must hold a
    lock that protects these rows.
    """
    values = [{f"new_{key}": value for key, value in row.items()} for row in rows]
    if not values:
        return
    names = [key.removeprefix("new_") for key in values[0]]
    tx.execute(
        sa.update(table)
        .where(table.c.id == sa.bindparam("new_id"))
        .values({name: sa.bindparam(f"new_{name}") for name in names if name != "id"}),
        values,
    )


def delete(tx: sa.Connection, table: sa.Table, ids: Collection[int]) -> int:
    """Delete rows by id and return how many were deleted."""
    return sum(
        tx.execute(sa.delete(table).where(table.c.id.in_(chunk))).rowcount for chunk in chunks(ids)
    )
