# SPDX-License-Identifier: Apache-2.0
"""Pages of a list: a limit, the row to go on after, and an order that no page can disturb.

A page starts behind a row, not at a count of rows, so that rows that come or go between two pages
make no other row appear twice or never.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from cyborg.core.errors import Invalid

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list, in which order; without a sort key, in the order of creation."""

    limit: int | None = None
    marker: str | None = None
    sort_key: str | None = None
    sort_dir: str = "asc"


def cut(
    connection: sa.Connection,
    query: sa.Select[Any],
    table: sa.FromClause,
    page: Page | None,
    sortable: Mapping[str, sa.ColumnElement[Any]],
) -> sa.Select[Any]:
    """Return the query ordered and cut to the page; ``sortable`` maps sort keys to expressions.

    A marker costs one statement, for its place in the order. Raises Invalid, naming ``limit``,
    ``marker``, ``sort_key`` or ``sort_dir``.
    """
    page = page or Page()
    identity = table.c.id
    key = _key(page, sortable)
    up = _is_up(page)
    if page.limit is not None:
        if page.limit < 1:
            raise Invalid(f"limit: {page.limit} is not at least 1", field="limit")
        query = query.limit(page.limit)
    if page.marker is not None:
        place = _place(connection, query, table, page.marker, key)
        query = query.where(_behind(key, identity, place, up))
    order = [identity] if key is None else [*_ranks(key), key, identity]
    return query.order_by(*(term.asc() if up else term.desc() for term in order))


def pick(rows: Sequence[Row], page: Page | None, sortable: Sequence[str]) -> list[Row]:
    """Return the page of a list that is in memory already, in whose order nothing is null.

    For the few rows that no table has. Raises Invalid as ``cut`` does.
    """
    page = page or Page()
    found = list(rows)
    if page.sort_key is not None:
        key = _known(page.sort_key, sortable)
        found.sort(key=lambda row: row[key])
    if not _is_up(page):
        found.reverse()
    if page.marker is not None:
        places = [n for n, row in enumerate(found, 1) if row["uuid"] == page.marker]
        if not places:
            raise _no_row(page.marker)
        found = found[places[0] :]
    if page.limit is not None and page.limit < 1:
        raise Invalid(f"limit: {page.limit} is not at least 1", field="limit")
    return found[: page.limit]


def _known(sort_key: str | None, sortable: Collection[str]) -> str:
    if sort_key not in sortable:
        raise Invalid(
            f"sort_key: {str(sort_key)[:60]!r} is none of {', '.join(sorted(sortable))}",
            field="sort_key",
        )
    return str(sort_key)


def _no_row(marker: str) -> Invalid:
    return Invalid(f"marker: {marker[:60]!r} is no row of this list", field="marker")


def _key(page: Page, sortable: Mapping[str, sa.ColumnElement[Any]]) -> sa.ColumnElement[Any] | None:
    if page.sort_key is None:
        return None
    return sortable[_known(page.sort_key, sortable)]


def _is_up(page: Page) -> bool:
    if page.sort_dir not in ("asc", "desc"):
        raise Invalid(f"sort_dir: {page.sort_dir[:60]!r} is neither asc nor desc", field="sort_dir")
    return page.sort_dir == "asc"


def _place(
    connection: sa.Connection,
    query: sa.Select[Any],
    table: sa.FromClause,
    marker: str,
    key: sa.ColumnElement[Any] | None,
) -> Sequence[Any]:
    # From the very rows of the list, so that nobody learns of a row that is not theirs to see.
    columns = [table.c.id] if key is None else [table.c.id, key]
    found = connection.execute(
        query.with_only_columns(*columns).where(table.c.uuid == marker).limit(1)
    ).first()
    if found is None:
        raise _no_row(marker)
    return tuple(found)


def _behind(
    key: sa.ColumnElement[Any] | None,
    identity: sa.ColumnElement[Any],
    place: Sequence[Any],
    up: bool,
) -> sa.ColumnElement[bool]:
    later: sa.ColumnElement[bool] = identity > place[0] if up else identity < place[0]
    if key is None:
        return later
    value = place[1]
    if value is None:
        equal = sa.and_(key.is_(None), later)
        return sa.or_(equal, key.is_not(None)) if up else equal
    further = sa.or_(key > value if up else key < value, sa.and_(key == value, later))
    return further if up or not _is_nullable(key) else sa.or_(further, key.is_(None))


def _ranks(key: sa.ColumnElement[Any]) -> list[sa.ColumnElement[Any]]:
    """Put nulls first on every database, where the column may hold any."""
    return [sa.case((key.is_(None), 0), else_=1)] if _is_nullable(key) else []


def _is_nullable(key: sa.ColumnElement[Any]) -> bool:
    return bool(getattr(key, "nullable", True))
