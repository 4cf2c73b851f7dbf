# SPDX-License-Identifier: Apache-2.0
"""Pagination of lists: a limit, a marker, and a stable order.

A page starts after the marker row, not at an offset, so that rows added or removed between two
requests cause no duplicate or missing rows.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar

import sqlalchemy as sa

from cyborg.core.errors import Invalid
from cyborg.db.rows import fetch_all

Row = Mapping[str, Any]
R = TypeVar("R", bound=Row)


# Maximum of the number of rows of a list: a database needs no longer to count a larger one.
MAX_COUNT = 10_000


@dataclass(slots=True)
class Total:
    """The number of rows of a list on all its pages, at most MAX_COUNT; None if not counted."""

    rows: int | None = None

    def count(
        self, connection: sa.Connection, query: sa.Select[Any], column: sa.ColumnElement[Any]
    ) -> None:
        """Count the rows of a query that has the column, in one statement."""
        values = query.with_only_columns(column.label("counted"))
        # Without the order, which would cost a sort and does not change the number.
        counted = values.order_by(None).limit(MAX_COUNT).subquery()
        self.rows = connection.scalar(sa.select(sa.func.count()).select_from(counted)) or 0


@dataclass(frozen=True, slots=True)
class Page:
    """Limit, marker and order of a list; without a sort key, in the order of creation.

    ``total`` is where to put the number of rows on all pages, None to count none.
    """

    limit: int | None = None
    marker: str | None = None
    sort_key: str | None = None
    sort_dir: str = "asc"
    total: Total | None = None


class NameRow(TypedDict):
    """A name in a list of names, as ``uuid``, which is the marker of the next page."""

    uuid: str


def paginate(
    connection: sa.Connection,
    query: sa.Select[Any],
    table: sa.FromClause,
    page: Page | None,
    sortable: Mapping[str, sa.ColumnElement[Any]],
    identity: sa.ColumnElement[Any] | None = None,
) -> sa.Select[Any]:
    """Return the query with the page's order, marker and limit.

    ``sortable`` maps sort keys to expressions. Rows with equal keys, and rows without a sort key,
    are in the order of ``identity``, which is unique: by default the row id of ``table``. A marker
    costs one statement, to read its position, and a count another one; in the order of uuids the
    marker is any text and costs none. Raise Invalid with the field ``limit``, ``marker``,
    ``sort_key`` or ``sort_dir``.
    """
    page = page or Page()
    key, identity = _columns(page, table, sortable, identity)
    ascending = is_ascending(page)
    if page.total is not None:
        page.total.count(connection, query, identity)
    if page.limit is not None:
        query = query.limit(check_limit(page.limit))
    if page.marker is not None and page.sort_key == "uuid":
        # The text is its own position, so that a page can start at the first digits of a uuid.
        uuid = identity if key is None else key
        query = query.where(uuid > page.marker if ascending else uuid < page.marker)
    elif page.marker is not None:
        position = find_marker(connection, query, table, page.marker, key, identity)
        query = query.where(_after_marker(key, identity, position, ascending))
    return _sort(connection, query, key, identity, ascending)


def paginate_ids(
    connection: sa.Connection,
    query: sa.Select[Any],
    ids: sa.Select[Any],
    table: sa.FromClause,
    page: Page | None,
    sortable: Mapping[str, sa.ColumnElement[Any]],
) -> sa.Select[Any]:
    """Return the query with the page of the rows whose ids ``ids`` selects; see ``paginate``.

    A database then joins and computes columns for the rows of the page only. ``query`` has no
    conditions; ``ids`` joins only tables that its conditions and sort keys need.
    """
    # SELECT ... FROM (joins) JOIN (SELECT id FROM t WHERE ... ORDER BY key, id LIMIT n) AS page
    #     ON page.id = t.id ORDER BY key, id       -- again: a join keeps no order
    chosen = paginate(connection, ids, table, page, sortable).subquery("page")
    page = page or Page()
    key, identity = _columns(page, table, sortable, None)
    joined = query.join(chosen, chosen.c.id == table.c.id)
    return _sort(connection, joined, key, identity, is_ascending(page))


def paginate_rows(rows: Sequence[R], page: Page | None, sortable: Sequence[str]) -> list[R]:
    """Return the page of a list in memory, whose sort values must not be None.

    This is for short lists that are not in a table. Raise Invalid as ``paginate`` does.
    """
    page = page or Page()
    listed = list(rows)
    if page.sort_key is not None:
        key = _check_sort_key(page.sort_key, sortable)
        listed.sort(key=lambda row: row[key])
    if page.total is not None:
        page.total.rows = min(len(listed), MAX_COUNT)
    # Reversed after a stable sort, so that equal rows are in descending order as well.
    if not is_ascending(page):
        listed.reverse()
    if page.marker is not None and page.sort_key == "uuid":
        later = operator.gt if is_ascending(page) else operator.lt
        listed = [row for row in listed if later(row["uuid"], page.marker)]
    elif page.marker is not None:
        starts = [index + 1 for index, row in enumerate(listed) if row["uuid"] == page.marker]
        if not starts:
            raise unknown_marker(page.marker)
        listed = listed[starts[0] :]
    return listed[: None if page.limit is None else check_limit(page.limit)]


def find_names(
    connection: sa.Connection,
    column: sa.ColumnElement[Any],
    condition: sa.ColumnElement[bool],
    page: Page | None,
    sort_key: str,
) -> list[NameRow]:
    """Return a page of the distinct values of a column, in their order.

    ``sort_key`` is the only sort key, and the default. For the marker see ``start_after_name``.
    Raise Invalid as ``paginate`` does.
    """
    page = page or Page()
    if page.sort_key == sort_key:
        # The names are in this order already, and unique: no second sort key is needed.
        page = replace(page, sort_key=None)
    query = sa.select(column.label("name")).where(condition).distinct()
    query, page = start_after_name(query, column, page)
    names = query.subquery("names")
    name = names.c.name
    listed = sa.select(name.label("uuid"))
    listed = paginate(connection, listed, names, page, {sort_key: name}, identity=name)
    return fetch_all(NameRow, connection.execute(listed))


def start_after_name(
    query: sa.Select[Any], column: sa.ColumnElement[Any], page: Page
) -> tuple[sa.Select[Any], Page]:
    """Return the query with the marker of a page of names, and the page without the marker.

    The marker is any text: a page starts with the first name after it. Between two requests a name
    may leave the list, such as that of the failed hosts, and the next page must not fail then.
    """
    if page.marker is None:
        return query, page
    after = column > page.marker if is_ascending(page) else column < page.marker
    return query.where(after), replace(page, marker=None)


def on_page(column: sa.ColumnElement[Any], names: Sequence[NameRow]) -> sa.ColumnElement[bool]:
    """Return the condition that the value of a column is between the ends of a page of names.

    The rows may include names that were not on the page when it was read: see ``sort_by_page``.
    """
    first, last = names[0]["uuid"], names[-1]["uuid"]
    # The first name is the greatest one if the page is in descending order.
    return sa.or_(column.between(first, last), column.between(last, first))


def sort_by_page(
    rows: Sequence[R], names: Sequence[NameRow], key: Callable[[R], tuple[str, str]]
) -> list[R]:
    """Return the rows whose names are on a page, in the order of the page.

    ``key`` returns the name of a row, and the order of rows of the same name. Rows of other names
    appeared after the page was read, and are left out.
    """
    positions = {row["uuid"]: position for position, row in enumerate(names)}
    listed = [row for row in rows if key(row)[0] in positions]

    def sort_key(row: R) -> tuple[int, str]:
        name, order = key(row)
        return positions[name], order

    return sorted(listed, key=sort_key)


def id_in(column: sa.ColumnElement[int], ids: Collection[int]) -> sa.ColumnElement[bool]:
    """Return the condition that the value of a column is in ``ids``, such as those of a page.

    The ids are written into the statement, because they may be too many for bound parameters. This
    is safe, because they are integers from this database. A join with the query of the page would
    execute this query again, and PostgreSQL, which cannot know its rows, would scan tables for it.
    """
    kind = sa.BigInteger()
    return column.in_(
        sa.bindparam("ids", sorted(ids), kind, expanding=True, literal_execute=True, unique=True)
    )


def check_limit(limit: int) -> int:
    """Return the limit of a page. Raise Invalid if it is not positive."""
    if limit < 1:
        raise Invalid(f"limit: found {limit}, expected 1 or more", field="limit")
    return limit


def find_marker(
    connection: sa.Connection,
    query: sa.Select[Any],
    table: sa.FromClause,
    marker: str,
    *columns: sa.ColumnElement[Any] | None,
) -> Sequence[Any]:
    """Return these columns of the marker row, without those that are None.

    Only rows of the list can be markers, so that a marker reveals no row that the caller must not
    see. Raise Invalid if there is no such row.
    """
    position = connection.execute(
        query.with_only_columns(*(column for column in columns if column is not None))
        .where(table.c.uuid == marker)
        .limit(1)
    ).first()
    if position is None:
        raise unknown_marker(marker)
    return tuple(position)


def is_unique(key: sa.ColumnElement[Any]) -> bool:
    """Return whether the values of a column are unique and not null."""
    column = isinstance(key, sa.Column) and not key.nullable
    return column and bool(key.primary_key or key.unique)


def _check_sort_key(sort_key: str | None, sortable: Collection[str]) -> str:
    if sort_key not in sortable:
        raise Invalid(
            f"sort_key: {str(sort_key)[:60]!r} is unknown, "
            f"expected one of {', '.join(sorted(sortable))}",
            field="sort_key",
        )
    return str(sort_key)


def unknown_marker(marker: str) -> Invalid:
    """Return the error for a marker that is not in the list."""
    # Cut: the text is what a caller has sent.
    return Invalid(f"marker: {marker[:60]!r} is not in this list, start without it", field="marker")


def _columns(
    page: Page,
    table: sa.FromClause,
    sortable: Mapping[str, sa.ColumnElement[Any]],
    identity: sa.ColumnElement[Any] | None,
) -> tuple[sa.ColumnElement[Any] | None, sa.ColumnElement[Any]]:
    """Return the sort key and a unique column; the key is None if the column alone is enough."""
    if page.sort_key is None:
        return None, table.c.id if identity is None else identity
    key = sortable[_check_sort_key(page.sort_key, sortable)]
    return (None, key) if is_unique(key) else (key, table.c.id)


def is_ascending(page: Page) -> bool:
    """Return whether the page is in ascending order. Raise Invalid for an unknown order."""
    if page.sort_dir not in ("asc", "desc"):
        raise Invalid(f"sort_dir: {page.sort_dir[:60]!r} is neither asc nor desc", field="sort_dir")
    return page.sort_dir == "asc"


def _after_marker(
    key: sa.ColumnElement[Any] | None,
    identity: sa.ColumnElement[Any],
    position: Sequence[Any],
    ascending: bool,
) -> sa.ColumnElement[bool]:
    """Return the condition that a row follows the marker in the order of ``_sort``.

    ``position`` has the values of the marker row: that of ``key``, if there is one, and that of
    ``identity``.
    """
    *key_values, last = position
    later: sa.ColumnElement[bool] = identity > last if ascending else identity < last
    if key is None:
        return later
    (value,) = key_values
    # Rows without a value are the first ones in ascending order, else the last ones.
    if value is None:
        equal = sa.and_(key.is_(None), later)
        return sa.or_(equal, key.is_not(None)) if ascending else equal
    #     key >= :value AND (key <> :value OR id > :last)
    # equals (key, id) > (:value, :last), for which MariaDB uses no index.
    # An index serves the first term; it does not serve OR, which needs both.
    start = key >= value if ascending else key <= value
    after = sa.and_(start, sa.or_(key != value, later))
    return after if ascending or not _is_nullable(key) else sa.or_(after, key.is_(None))


def _sort(
    connection: sa.Connection,
    query: sa.Select[Any],
    key: sa.ColumnElement[Any] | None,
    identity: sa.ColumnElement[Any],
    ascending: bool,
) -> sa.Select[Any]:
    """Return the query in the order of a key, with nulls first if ascending, else last.

    That is the order of MariaDB and SQLite, so that their indexes serve it.
    """
    if key is not None:
        term = key.asc() if ascending else key.desc()
        if connection.dialect.name == "postgresql" and _is_nullable(key):
            term = term.nulls_first() if ascending else term.nulls_last()
        query = query.order_by(term)
    return query.order_by(identity.asc() if ascending else identity.desc())


def _is_nullable(key: sa.ColumnElement[Any]) -> bool:
    return bool(getattr(key, "nullable", True))
