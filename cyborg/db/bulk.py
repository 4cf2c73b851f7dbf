# SPDX-License-Identifier: Apache-2.0
"""Statements that each change many rows, to avoid one statement per row."""

import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import sqlalchemy as sa

from cyborg.core.life_cycle import Transition

# Maximum values of one statement: SQLite allows 32766, PostgreSQL's protocol 65535.
MAX_PARAMETERS = 30_000

# Maximum rows of a table that is a parameter: MariaDB accepts statements of 16 MiB by default.
MAX_ROWS = 5000

T = TypeVar("T")


def chunks(values: Collection[T]) -> Iterator[Sequence[T]]:
    """Split values into as few chunks as possible, each small enough for one statement."""
    items = list(values)
    for start in range(0, len(items), MAX_PARAMETERS):
        yield items[start : start + MAX_PARAMETERS]


def insert(tx: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, which must all have the same keys; do nothing for no rows."""
    if tx.dialect.name == "mysql" and len(rows) > 1:
        # PyMySQL sends an INSERT for each row if one of the values is a function, such as the time
        # of the default of ``created_at``.
        columns = {name: table.c[name] for name in rows[0]}
        for source in make_tables(tx, columns, rows):
            tx.execute(sa.insert(table).from_select(list(columns), sa.select(source)))
    elif rows:
        tx.execute(_insert_into(table), [dict(row) for row in rows])


def insert_row(tx: sa.Connection, table: sa.Table, **values: Any) -> int:
    """Insert one row and return its row id."""
    key = tx.execute(sa.insert(table).values(**values)).inserted_primary_key
    if key is None:
        raise AssertionError("an INSERT of one row must return its primary key")
    return int(key[0])


@functools.cache
def _insert_into(table: sa.Table) -> sa.Insert:
    # Built once: SQLAlchemy needs more time to build such a statement than a database to run it.
    return sa.insert(table).execution_options(insertmanyvalues_page_size=MAX_PARAMETERS)


def update(tx: sa.Connection, table: sa.Table, rows: Iterable[Mapping[str, Any]]) -> None:
    """Update rows: ``id`` in each is the row id, the other keys are the new column values.

    All rows must have the same keys. There is no guard and no row count: the caller must hold a
    lock that protects these rows.
    """
    changes = list(rows)
    if not changes:
        return
    columns = {name: table.c[name] for name in changes[0]}
    for source in make_tables(tx, columns, changes):
        values = {name: source.c[name] for name in columns if name != "id"}
        tx.execute(sa.update(table).where(table.c.id == source.c.id).values(values))


def make_tables(
    tx: sa.Connection, columns: Mapping[str, sa.Column[Any]], rows: Sequence[Mapping[str, Any]]
) -> Iterator[sa.Subquery]:
    """Yield tables with the given rows, as parameters of statements; each has up to MAX_ROWS.

    A statement that joins such a table changes many rows, each with values of its own.
    ``columns`` has a column of the same type for each key of the rows. The rows are one JSON
    parameter, so that the text of the statement does not depend on their number. Alternatives not
    taken: executemany, which drivers send as one statement for each row; and CASE, which the server
    evaluates for each pair of rows.
    """
    dialect = tx.dialect
    build_query = _SOURCES[dialect.name]
    processors = {
        key: column.type.dialect_impl(dialect).bind_processor(dialect)
        for key, column in columns.items()
    }
    text = build_query({key: _type_name(column.type, dialect) for key, column in columns.items()})
    typed_columns = [sa.column(key, column.type) for key, column in columns.items()]
    for start in range(0, len(rows), MAX_ROWS):
        values = [
            {
                key: processor(row[key]) if processor else row[key]
                for key, processor in processors.items()
            }
            for row in rows[start : start + MAX_ROWS]
        ]
        document = json.dumps(values, default=_format_time)
        yield sa.text(text).bindparams(rows=document).columns(*typed_columns).subquery("given")


def _mysql_source(types: Mapping[str, str]) -> str:
    # Without ERROR, a value that does not fit would become NULL.
    columns = ", ".join(
        f"`{name}` {kind} PATH '$.{name}' ERROR ON ERROR" for name, kind in types.items()
    )
    return f"SELECT * FROM JSON_TABLE(:rows, '$[*]' COLUMNS ({columns})) AS r"  # noqa: S608 - names of columns


def _postgresql_source(types: Mapping[str, str]) -> str:
    columns = ", ".join(
        f"CAST(r ->> '{name}' AS {kind}) AS \"{name}\"" for name, kind in types.items()
    )
    return f"SELECT {columns} FROM json_array_elements(CAST(:rows AS json)) AS r"  # noqa: S608


def _sqlite_source(types: Mapping[str, str]) -> str:
    # No CAST: json_extract returns numbers and texts as such, and a column of SQLite takes both.
    columns = ", ".join(f"json_extract(r.value, '$.{name}') AS \"{name}\"" for name in types)
    return f"SELECT {columns} FROM json_each(:rows) AS r"  # noqa: S608


_SOURCES = {"mysql": _mysql_source, "postgresql": _postgresql_source, "sqlite": _sqlite_source}


def _type_name(kind: sa.types.TypeEngine[Any], dialect: sa.Dialect) -> str:
    """Return the type of a column of the given table.

    A text has no maximum length here: the server would truncate a longer one without an error. The
    column that it is written to still has its maximum length.
    """
    if isinstance(kind, sa.String) or (dialect.name == "mysql" and isinstance(kind, sa.JSON)):
        # MariaDB stores JSON as text; from a column of type JSON it would return a quoted text.
        return "LONGTEXT" if dialect.name == "mysql" else "TEXT"
    return kind.dialect_impl(dialect).compile(dialect)


def _format_time(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat(" ")
    raise TypeError(f"found {type(value).__name__}, expected a value that a column can have")


def update_where(
    tx: sa.Connection,
    column: sa.Column[Any],
    chosen: Collection[Any],
    *conditions: sa.ColumnElement[bool],
    **values: Any,
) -> int:
    """Give all rows whose column has a chosen value the same values; return their number."""
    # In chunks: the values would be too many for the parameters of one statement.
    change = sa.update(column.table).values(**values)
    return sum(
        tx.execute(change.where(column.in_(chunk), *conditions)).rowcount
        for chunk in chunks(chosen)
    )


def delete_where(
    tx: sa.Connection,
    column: sa.Column[Any],
    chosen: Collection[Any],
    *conditions: sa.ColumnElement[bool],
) -> int:
    """Delete the rows whose column has a chosen value; return their number."""
    query = sa.delete(column.table)
    return sum(
        tx.execute(query.where(column.in_(chunk), *conditions)).rowcount for chunk in chunks(chosen)
    )


def delete(tx: sa.Connection, table: sa.Table, ids: Collection[int]) -> int:
    """Delete rows by id and return how many were deleted."""
    return delete_where(tx, table.c.id, ids)


def change_state(
    tx: sa.Connection,
    table: sa.Table,
    transition: Transition[Any, Any],
    *conditions: sa.ColumnElement[bool],
    **values: Any,
) -> int:
    """Apply a transition to the rows that meet the conditions; return how many were changed.

    ``values`` are the columns that change with the state.
    """
    # Not a SELECT before the UPDATE: another transaction can change the state in between, also if
    # this one holds no lock on the row.
    guard = table.c.state.in_(transition.sources)
    change = sa.update(table).where(guard, *conditions).values(state=transition.target, **values)
    return tx.execute(change).rowcount
