# SPDX-License-Identifier: Apache-2.0
"""A collection of the service: its path, its objects, and the columns of its tables.

An object may be given by the abbreviated uuid that the tables show.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cyborg.cli.common import formatting
from cyborg.cli.common.rest import CommandError, RestClient, object_path

# At least four digits: a shorter word such as "bad" is probably a name.
_FULL = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SHORT = re.compile(r"[0-9a-f]{4,8}|[0-9a-f]{8}-[0-9a-f-]{0,27}")


@dataclass(frozen=True)
class Collection:
    """A collection; ``format_row`` adds or replaces values of an object for display.

    ``short`` and ``long`` are the columns of lists; one object is shown with ``long``. ``filters``
    returns the parameters of the list that select the objects that a text names.
    """

    path: str
    short: formatting.Columns
    long: formatting.Columns = ()
    key: str = ""  # of the rows in a response; by default the last segment of the path
    nouns: str = ""  # in messages; by default the key
    format_row: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    object_key: str = ""  # of the object in the response for one object; by default it is the body
    has_objects: bool = True  # whether the service has a path for one object
    has_names: bool = False  # whether the path for one object also takes its name
    filters: Callable[[str], Mapping[str, Any]] | None = None
    expected: str = ""  # besides the uuid, in messages: what ``filters`` takes

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
        return self._plural.removesuffix("s")

    def read_page(self, rest: RestClient, **params: Any) -> list[dict[str, Any]]:
        """Return the rows of one page, without parameters that are None.

        There are none if no object can match: a text cannot be a name, or objects have no names in
        this version of the service.
        """
        try:
            return list(rest.call("GET", self.path, params=params)[self.rows_key])
        except CommandError as exc:
            if exc.status != 400:
                raise
            return []

    def read_one(self, rest: RestClient, key: str) -> Mapping[str, Any]:
        """Return an object by its uuid or name. Raise CommandError."""
        if not self.has_objects:
            # In the order of uuids, 16 of them at most differ from this one in the last digit only.
            rows = self.read_page(rest, sort_key="uuid", marker=key[:-1], limit=16)
            found = next((row for row in rows if row["uuid"] == key), None)
            if found is None:
                raise CommandError(f"no {self.noun} {key}")
            return found
        body: Mapping[str, Any] = rest.call("GET", self.object_path(key))
        return body[self.object_key] if self.object_key else body

    def read_each(self, rest: RestClient, keys: Iterable[str]) -> list[Mapping[str, Any]]:
        """Return objects by their uuids or names. Raise CommandError if one does not exist."""
        return [self.read_one(rest, key) for key in keys]

    def find_uuids(self, rest: RestClient, texts: Iterable[str], field: str = "uuid") -> list[str]:
        """Return for each text the uuid that ``find_uuid`` returns."""
        return [self.find_uuid(rest, text, field) for text in texts]

    def find_uuid(self, rest: RestClient, text: str, field: str = "uuid") -> str:
        """Return the uuid that a text names, or begins; ``field`` is the key of the uuid in a row.

        A whole uuid is returned unchanged. With ``filters``, a text may be a name, which precedes
        the beginning of a uuid. Without them, a text that begins no uuid, or is the name of an
        object, is returned unchanged; the service validates it. Raise CommandError if several
        objects have the name or the beginning, or if none has the name.
        """
        if _FULL.fullmatch(text.lower()):
            return text
        # A name precedes the beginning of a uuid: an object may be called "bad1".
        filters = self.filters(text) if self.filters and field == "uuid" else None
        if filters and (rows := self.read_page(rest, **filters, limit=2)):
            return self._only(text, [row["uuid"] for row in rows], "give the uuid")
        if _SHORT.fullmatch(text.lower()):
            found = self._find_beginning(rest, text.lower(), field)
            if found and not (self.has_names and self._find_by_name(rest, text)):
                return self._only(text, found, "add more digits")
        elif self.filters and field == "uuid":
            raise CommandError(
                f"none of the {self._plural} is {text!r}: give the uuid, its beginning, or "
                f"{self.expected}, as the list shows them"
            )
        return text

    def _find_beginning(self, rest: RestClient, text: str, field: str) -> list[str]:
        """Return up to two uuids that begin with a text."""
        if field == "uuid":
            # In the order of uuids, a page can start after any text.
            rows = self.read_page(rest, sort_key="uuid", marker=text, limit=2)
        else:
            # Only in the order of uuids can a page start after any text.
            rows = self.list_all(rest)
        uuids = {str(row[field]) for row in rows if row.get(field)}
        return sorted(uuid for uuid in uuids if uuid.startswith(text))[:2]

    def _find_by_name(self, rest: RestClient, text: str) -> bool:
        try:
            return self.read_one(rest, text).get("name") == text
        except CommandError as exc:
            # 400: the text cannot be a name.
            if exc.status not in (400, 404):
                raise
            return False

    def _only(self, text: str, uuids: Sequence[str], remedy: str) -> str:
        if len(uuids) > 1:
            named = " and ".join(uuids)
            raise CommandError(
                f"{text} is ambiguous, it names several {self._plural} such as {named}: {remedy}"
            )
        return uuids[0]

    @property
    def _plural(self) -> str:
        return (self.nouns or self.rows_key).replace("_", " ")

    def build_object(self, row: Mapping[str, Any]) -> Any:
        """Return the headings and values of one object."""
        return formatting.build_object(self.long, self.format_row(row))
