# SPDX-License-Identifier: Apache-2.0
"""Pagination of lists: a limit, a marker, and a stable order.

A page starts after the marker row, not at an offset, so that rows added or removed between two
requests cause no duplicate or missing rows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

from cyborg.core.errors import Invalid

Row = Mapping[str, Any]
R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class Page:
    """Limit, marker and order of a list; without a sort key, in the order of creation."""

    limit: int | None = None
    marker: str | None = None
    sort_key: str | None = None
    sort_dir: str = "asc"


def paginate(
    connection: sa.Connection,
    query: sa.Select[Any],
    table: sa.FromClause,
    page: Page | None,
    sortable: Mapping[str, sa.ColumnElement[Any]],
) -> sa.Select[Any]:
    """Return the query with the page's order, marker and limit.

    ``sortable`` maps sort keys to expressions. A marker costs one statement, to read its position.
    Raise Invalid with the field ``limit``, ``marker``, ``sort_key`` or ``sort_dir``.
    """
    page = page or Page()
    identity = table.c.id
    key = _key(page, sortable)
    ascending = _is_ascending(page)
    if page.limit is not None:
        if page.limit < 1:
            raise Invalid(f"limit: found {page.limit}, expected 1 or more", field="limit")
        query = query.limit(page.limit)
    if page.marker is not None:
        position = _marker_position(connection, query, table, page.marker, key)
        query = query.where(_after_marker(key, identity, position, ascending))
    order = [identity] if key is None else [*_nulls_first(key), key, identity]
    return query.order_by(*(term.asc() if ascending else term.desc() for term in order))


def paginate_rows(rows: Sequence[R], page: Page | None, sortable: Sequence[str]) -> list[R]:
    """Return the page of a list in memory, whose sort values must not be None.

    This is for short lists that are not in a table. Raise Invalid as ``paginate`` does.
    """
    page = page or Page()
    found = list(rows)
    if page.sort_key is not None:
        key = _check_sort_key(page.sort_key, sortable)
        found.sort(key=lambda row: row[key])
    if not _is_ascending(page):
        found.reverse()
    if page.marker is not None:
        positions = [n for n, row in enumerate(found, 1) if row["uuid"] == page.marker]
        if not positions:
            raise _unknown_marker(page.marker)
        found = found[positions[0] :]
    if page.limit is not None and page.limit < 1:
        raise Invalid(f"limit: found {page.limit}, expected 1 or more", field="limit")
    return found[: page.limit]


def _check_sort_key(sort_key: str | None, sortable: Collection[str]) -> str:
    if sort_key not in sortable:
        raise Invalid(
            f"sort_key: {str(sort_key)[:60]!r} is unknown, "
            f"expected one of {', '.join(sorted(sortable))}",
            field="sort_key",
        )
    return str(sort_key)


def _unknown_marker(marker: str) -> Invalid:
    return Invalid(f"marker: {marker[:60]!r} is not in this list", field="marker")


def _key(page: Page, sortable: Mapping[str, sa.ColumnElement[Any]]) -> sa.ColumnElement[Any] | None:
    if page.sort_key is None:
        return None
    return sortable[_check_sort_key(page.sort_key, sortable)]


def _is_ascending(page: Page) -> bool:
    if page.sort_dir not in ("asc", "desc"):
        raise Invalid(f"sort_dir: {page.sort_dir[:60]!r} is neither asc nor desc", field="sort_dir")
    return page.sort_dir == "asc"


def _marker_position(
    connection: sa.Connection,
    query: sa.Select[Any],
    table: sa.FromClause,
    marker: str,
    key: sa.ColumnElement[Any] | None,
) -> Sequence[Any]:
    # From the rows of the list, so that the marker reveals no row that the caller must not see.
    columns = [table.c.id] if key is None else [table.c.id, key]
    found = connection.execute(
        query.with_only_columns(*columns).where(table.c.uuid == marker).limit(1)
    ).first()
    if found is None:
        raise _unknown_marker(marker)
    return tuple(found)


def _after_marker(
    key: sa.ColumnElement[Any] | None,
    identity: sa.ColumnElement[Any],
    position: Sequence[Any],
    ascending: bool,
) -> sa.ColumnElement[bool]:
    later: sa.ColumnElement[bool] = identity > position[0] if ascending else identity < position[0]
    if key is None:
        return later
    value = position[1]
    if value is None:
        equal = sa.and_(key.is_(None), later)
        return sa.or_(equal, key.is_not(None)) if ascending else equal
    after = sa.or_(key > value if ascending else key < value, sa.and_(key == value, later))
    return after if ascending or not _is_nullable(key) else sa.or_(after, key.is_(None))


def _nulls_first(key: sa.ColumnElement[Any]) -> list[sa.ColumnElement[Any]]:
    """Return sort terms that put nulls first on every database; none if the column has no nulls."""
    return [sa.case((key.is_(None), 0), else_=1)] if _is_nullable(key) else []


def _is_nullable(key: sa.ColumnElement[Any]) -> bool:
    return bool(getattr(key, "nullable", True))
