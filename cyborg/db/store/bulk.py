# SPDX-License-Identifier: Apache-2.0
"""Statements over many rows at once: what a row costs is a line of data, not a statement."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

MAX_PARAMETERS = 30_000
"""How many values one statement carries: SQLite takes 32766, PostgreSQL's protocol 65535."""


T = TypeVar("T")


def chunks(values: Collection[T]) -> Iterator[Sequence[T]]:
    """Cut values into as few pieces as one statement each can carry."""
    rest = list(values)
    for start in range(0, len(rest), MAX_PARAMETERS):
        yield rest[start : start + MAX_PARAMETERS]


def insert(tx: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows that all have the same keys; nothing for none."""
    if rows:
        tx.execute(
            sa.insert(table),
            [dict(row) for row in rows],
            execution_options={"insertmanyvalues_page_size": MAX_PARAMETERS},
        )


def update(tx: sa.Connection, table: sa.Table, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write each row's values to the row of its ``id``; all rows have the same keys.

    There is no guard and no row count: the caller holds what keeps others from these rows.
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
    """Delete rows by id and return how many there were."""
    return sum(
        tx.execute(sa.delete(table).where(table.c.id.in_(some))).rowcount for some in chunks(ids)
    )
