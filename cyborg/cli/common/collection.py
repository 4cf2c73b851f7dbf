# SPDX-License-Identifier: Apache-2.0
"""A collection of the service: its path, its objects, and the columns of its tables."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cyborg.cli.common import formatting, lookup
from cyborg.cli.common.errors import object_path
from cyborg.cli.common.rest import RestClient


@dataclass(frozen=True)
class Collection:
    """A collection; ``format_row`` adds or replaces values of an object for display.

    ``short`` and ``long`` are the columns of lists; one object is shown with ``long``.
    """

    path: str
    short: formatting.Columns
    long: formatting.Columns = ()
    key: str = ""  # of the rows in a response; by default the last segment of the path
    nouns: str = ""  # in messages; by default the key
    format_row: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

    @property
    def rows_key(self) -> str:
        """Return the key of the rows in a response."""
        return self.key or self.path.strip("/")

    def object_path(self, uuid: str) -> str:
        """Return the path of an object."""
        return object_path(self.path, uuid)

    def list_all(self, rest: RestClient, **filters: Any) -> list[dict[str, Any]]:
        """Return all objects that match the filters; a filter with the value None is omitted."""
        return rest.list_all(self.path, self.rows_key, **filters)

    def find_uuids(self, rest: RestClient, texts: Iterable[str], field: str = "uuid") -> list[str]:
        """Return the uuids that begin with the texts, as ``lookup.find_uuids`` does."""
        return lookup.find_uuids(rest, self.path, self.rows_key, texts, field)

    def find_uuid(self, rest: RestClient, text: str, field: str = "uuid") -> str:
        """Return the uuid that begins with ``text``, as ``lookup.find_uuid`` does."""
        return self.find_uuids(rest, [text], field)[0]

    def build_object(self, row: Mapping[str, Any]) -> Any:
        """Return the headings and values of one object."""
        return formatting.build_object(self.long, self.format_row(row))
