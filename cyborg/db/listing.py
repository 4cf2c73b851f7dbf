# SPDX-License-Identifier: Apache-2.0
"""Lists that the API filters, sorts and pages: each is declared by its columns, filters and keys.

::

    SELECT columns FROM source WHERE conditions AND filters                   few rows, small tables
    SELECT columns FROM source JOIN (SELECT id ... LIMIT n) AS page USING id  ``ids_first``

A list with ``complete`` adds what other tables have in a fixed number of statements for the whole
page, never in one statement for each row.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.paging import Page

R = TypeVar("R")

# A column that has the value, or one of the values if it is a collection; or a condition of it.
Filter = sa.ColumnElement[Any] | Callable[[Any], sa.ColumnElement[bool]]


def columns_of(table: sa.FromClause, *names: str) -> dict[str, sa.ColumnElement[Any]]:
    """Return columns of a table by their names, as sort keys or filters of the same names."""
    return {name: table.c[name] for name in names}


@dataclass(frozen=True, kw_only=True, eq=False)
class Listing(Generic[R]):
    """A list of rows of ``table``, whose uuids are the markers of pages.

    ``row`` is the TypedDict of a row; ``details`` are columns that only ``get`` reads, because they
    are large. ``source`` has the joins of the columns. ``conditions`` always hold.
    """

    row: Callable[..., R]
    table: sa.Table
    columns: Sequence[sa.ColumnElement[Any]]
    sortable: Mapping[str, sa.ColumnElement[Any]]
    filters: Mapping[str, Filter]
    details: Sequence[sa.ColumnElement[Any]] = ()
    source: sa.FromClause | None = None
    conditions: Sequence[sa.ColumnElement[bool]] = ()
    # The ids of the page are selected first, so that joins and computed columns cost no more in a
    # large table. A plain statement is cheaper for the few rows of a filter in ``few``. The ids
    # need the joins of ``source`` only for the filters and sort keys in ``joined``.
    ids_first: bool = False
    few: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    # From the columns of a page to its rows.
    complete: Callable[[sa.Connection, list[dict[str, Any]]], list[R]] | None = None

    def find(
        self,
        connection: sa.Connection,
        *,
        page: Page | None = None,
        within: sa.FromClause | None = None,
        **criteria: Any,
    ) -> list[R]:
        """Return rows; execute one statement and those of ``complete``, one more with a marker.

        ``criteria`` are values of filters; None selects all. ``within`` has the ids of the only
        rows to select; it needs ``ids_first``, and no filter of ``few``. Raise Invalid as
        ``paging.paginate`` does.
        """
        columns = self.read_columns(connection, page=page, within=within, **criteria)
        return self._complete(connection, columns)

    def read_columns(
        self,
        connection: sa.Connection,
        *,
        page: Page | None = None,
        within: sa.FromClause | None = None,
        **criteria: Any,
    ) -> list[dict[str, Any]]:
        """Return the columns of the rows, for a list that completes them by its criteria."""
        selected = {name: value for name, value in criteria.items() if value is not None}
        conditions = [*self.conditions, *(self._condition(*item) for item in selected.items())]
        query = sa.select(*self.columns).select_from(self._source())
        if self.ids_first and not self.few & selected.keys():
            needs_joins = self.joined & {*selected, page.sort_key if page else None}
            ids = sa.select(self.table.c.id).where(*conditions)
            ids = ids.select_from(self._source() if needs_joins else self.table)
            if within is not None:
                ids = ids.join(within, within.c.id == self.table.c.id)
            query = paging.paginate_ids(connection, query, ids, self.table, page, self.sortable)
        else:
            query = query.where(*conditions)
            query = paging.paginate(connection, query, self.table, page, self.sortable)
        return [dict(row) for row in connection.execute(query).mappings()]

    def get(self, connection: sa.Connection, uuid: str, project_id: str | None = None) -> R | None:
        """Return one row with its details, or None; with a project, only if it belongs to it."""
        query = sa.select(*self.columns, *self.details).select_from(self._source())
        query = query.where(self.table.c.uuid == uuid, *self.conditions)
        if project_id is not None:
            query = query.where(self._condition("project_id", project_id))
        columns = [dict(row) for row in connection.execute(query).mappings()]
        return next(iter(self._complete(connection, columns)), None)

    def _source(self) -> sa.FromClause:
        return self.table if self.source is None else self.source

    def _complete(self, connection: sa.Connection, columns: list[dict[str, Any]]) -> list[R]:
        if self.complete is None:
            return [self.row(**row) for row in columns]
        # No statement for an empty page.
        return self.complete(connection, columns) if columns else []

    def _condition(self, name: str, value: Any) -> sa.ColumnElement[bool]:
        choice = self.table.c.uuid if name == "uuids" else self.filters[name]
        if not isinstance(choice, sa.ColumnElement):
            return choice(value)
        is_collection = isinstance(value, Collection) and not isinstance(value, str)
        return choice.in_(value) if is_collection else choice == value
