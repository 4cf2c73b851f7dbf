# SPDX-License-Identifier: Apache-2.0
"""A collection of the service: its path, its objects, and the columns of its tables.

An object may be given by the abbreviated uuid that the tables show.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cyborg.cli.common import formatting
from cyborg.cli.common.errors import CommandError, object_path
from cyborg.cli.common.rest import RestClient
from cyborg.core.text import join_limited

MAX_NAMED = 3  # candidates in an error message
# At least four digits: a shorter word such as "bad" is probably a name.
_SHORT = re.compile(r"[0-9a-f]{4,8}|[0-9a-f]{8}-[0-9a-f-]{0,27}")


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
    object_key: str = ""  # of the object in the response for one object; by default it is the body
    has_objects: bool = True  # whether the service has a path for one object

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

    @property
    def noun(self) -> str:
        """Return the name of one object, such as ``device profile``."""
        return (self.nouns or self.rows_key).replace("_", " ").removesuffix("s")

    def read_one(self, rest: RestClient, key: str) -> Mapping[str, Any]:
        """Return an object by its uuid or name. Raise CommandError."""
        body: Mapping[str, Any] = rest.call("GET", self.object_path(key))
        return body[self.object_key] if self.object_key else body

    def read_each(self, rest: RestClient, keys: Iterable[str]) -> list[Mapping[str, Any]]:
        """Return objects by their uuids or names. Raise CommandError if one does not exist."""
        if self.has_objects:
            return [self.read_one(rest, key) for key in keys]
        by_uuid = {row["uuid"]: row for row in self.list_all(rest)}
        if missing := [key for key in keys if key not in by_uuid]:
            raise CommandError(f"no {self.noun} {missing[0]}")
        return [by_uuid[key] for key in keys]

    def find_uuids(self, rest: RestClient, texts: Iterable[str], field: str = "uuid") -> list[str]:
        """Return for each text the uuid that begins with it; list the objects once if needed.

        ``field`` is the key of the uuid in a row. A text that is not an abbreviation, matches no
        uuid, or is the name of an object is returned unchanged; the service validates it. Raise
        CommandError if several uuids begin with a text.
        """
        names_or_uuids = list(texts)
        if not any(map(_is_short, names_or_uuids)):
            return names_or_uuids
        rows = self.list_all(rest)
        names = {row.get("name") for row in rows}
        uuids = sorted({str(row[field]) for row in rows if row.get(field)})
        return [
            self._complete(text, uuids) if _is_short(text) and text not in names else text
            for text in names_or_uuids
        ]

    def find_uuid(self, rest: RestClient, text: str, field: str = "uuid") -> str:
        """Return the uuid that begins with ``text``, as ``find_uuids`` does."""
        return self.find_uuids(rest, [text], field)[0]

    def _complete(self, text: str, uuids: Iterable[str]) -> str:
        matches = [uuid for uuid in uuids if uuid.startswith(text.lower())]
        if len(matches) > 1:
            named = join_limited(matches, MAX_NAMED)
            noun = self.rows_key.replace("_", " ")
            raise CommandError(
                f"{text} is ambiguous: {len(matches)} {noun} match ({named}); add more digits"
            )
        return matches[0] if matches else text

    def build_object(self, row: Mapping[str, Any]) -> Any:
        """Return the headings and values of one object."""
        return formatting.build_object(self.long, self.format_row(row))


def _is_short(text: str) -> bool:
    lower = text.lower()
    return _SHORT.fullmatch(lower) is not None and formatting.UUID.fullmatch(lower) is None
