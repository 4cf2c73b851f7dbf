# SPDX-License-Identifier: Apache-2.0
"""Pages of a collection, as clients ask for them and as they are told of the next one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from cyborg.api.types import Count, OneOf, Text
from cyborg.db.read.paging import Page, Row

PARAMETERS: Mapping[str, Any] = {
    "limit": Count(),
    "marker": Text(),
    "sort_key": Text(),
    "sort_dir": OneOf("asc", "desc"),
}


class Asked:
    """The part of a collection that a request asks for; without a limit it is every row."""

    def __init__(self, values: Mapping[str, Any], most: int) -> None:
        limit = values.get("limit")
        self._limit = None if limit is None else min(limit, most)
        self._marker = values.get("marker")
        self._sort_key = values.get("sort_key")
        self._sort_dir = values.get("sort_dir") or "asc"

    def read(self, find: Callable[[Page], list[Row]]) -> tuple[list[Row], str | None]:
        """Return the rows and, if there are more, the marker of the next page."""
        limit = self._limit
        # One more than asked for, by which a page knows that it is not the last.
        more = None if limit is None else limit + 1
        rows = find(Page(more, self._marker, self._sort_key, self._sort_dir))
        if limit is None or len(rows) <= limit:
            return rows, None
        return rows[:limit], str(rows[limit - 1]["uuid"])


def links(url: str, query: Sequence[tuple[str, str]], marker: str) -> list[dict[str, str]]:
    """Return the links of a page behind which there is another."""
    kept = [(key, value) for key, value in query if key != "marker"]
    return [{"rel": "next", "href": f"{url}?{urlencode([*kept, ('marker', marker)])}"}]
