# SPDX-License-Identifier: Apache-2.0
"""Paging of collections: the parameters of a request and the read of one page."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cyborg.api.types import Enum, PositiveInt, Text
from cyborg.db.paging import Page, Row, Total

R = TypeVar("R", bound=Row)
PARAMETERS: Mapping[str, Any] = {
    "limit": PositiveInt(),
    "marker": Text(),
    "sort_key": Text(),
    "sort_dir": Enum("asc", "desc"),
}
WITH_COUNT = "with_count"
"""The parameter of a list that adds the number of its rows on all pages to the answer."""
COUNT_SINCE = (2, 6)


class PageRequest:
    """The page that a request asks for; ``max_limit`` is the default and maximum page size."""

    def __init__(self, values: Mapping[str, Any], max_limit: int) -> None:
        limit = values.get("limit")
        self._unlimited = limit is None
        self._limit = max_limit if limit is None else min(limit, max_limit)
        self._marker = values.get("marker")
        self._sort_key = values.get("sort_key")
        self._sort_dir = values.get("sort_dir") or "asc"
        self._total = Total() if values.get(WITH_COUNT) == "true" else None

    @property
    def is_whole(self) -> bool:
        """Return whether the request has no paging parameter: the whole list in its usual order."""
        given = (self._marker, self._sort_key, self._total)
        return self._unlimited and given == (None, None, None) and self._sort_dir == "asc"

    @property
    def count(self) -> int | None:
        """Return the number of rows on all pages, None if the request does not ask for it."""
        return None if self._total is None else self._total.rows

    def read(
        self, find: Callable[[Page], list[R]], *, whole: bool = False
    ) -> tuple[list[R], str | None]:
        """Return the rows and the marker of the next page, None on the last page.

        With ``whole``, a request without a limit gets all rows: for short lists that a client needs
        in one response.
        """
        limit = None if whole and self._unlimited else self._limit
        # One extra row shows whether there is a next page.
        fetch_limit = None if limit is None else limit + 1
        rows = find(Page(fetch_limit, self._marker, self._sort_key, self._sort_dir, self._total))
        if limit is None or len(rows) <= limit:
            return rows, None
        return rows[:limit], str(rows[limit - 1]["uuid"])
