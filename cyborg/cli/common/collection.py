# SPDX-License-Identifier: Apache-2.0
"""A collection of the service: its path, its objects, and the columns of its tables.

An object may be given by the abbreviated uuid that the tables show.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cyborg.cli.common import formatting
from cyborg.cli.common.errors import CommandError, object_path
from cyborg.cli.common.rest import RestClient
from cyborg.core.text import join_limited

MAX_NAMED = 3  # candidates in an error message
# At least four digits: a shorter word such as "bad" is probably a name.
_FULL = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SHORT = re.compile(r"[0-9a-f]{4,8}|[0-9a-f]{8}-[0-9a-f-]{0,27}")


@dataclass(frozen=True)
class Collection:
    """A collection; ``format_row`` adds or replaces values of an object for display.

    ``short`` and ``long`` are the columns of lists; one object is shown with ``long``. ``labels``
    returns other texts by which an object can be given, such as its name.
    """

    path: str
    short: formatting.Columns
    long: formatting.Columns = ()
    key: str = ""  # of the rows in a response; by default the last segment of the path
    nouns: str = ""  # in messages; by default the key
    format_row: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    object_key: str = ""  # of the object in the response for one object; by default it is the body
    has_objects: bool = True  # whether the service has a path for one object
    labels: Callable[[Mapping[str, Any]], Iterable[str | None]] | None = None
    expected: str = ""  # besides the uuid, in messages: what ``labels`` returns

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
        uuid, or is the name of an object is returned unchanged; the service validates it. With
        ``labels``, a text may be one of them, which precede abbreviations. Raise CommandError if
        several uuids begin with a text, or if several objects or none have a label.
        """
        names_or_uuids = list(texts)
        labels = self.labels if field == "uuid" else None
        if not any(map(_is_short if labels is None else _is_no_uuid, names_or_uuids)):
            return names_or_uuids
        rows = self.list_all(rest)
        if labels is not None:
            by_label: dict[str, list[str]] = {}
            for row in rows:
                for label in labels(row):
                    by_label.setdefault(label or "", []).append(str(row["uuid"]))
            names_or_uuids = [self._find_label(text, by_label) for text in names_or_uuids]
        names = {row.get("name") for row in rows}
        uuids = sorted({str(row[field]) for row in rows if row.get(field)})
        return [
            self._complete(text, uuids) if _is_short(text) and text not in names else text
            for text in names_or_uuids
        ]

    def find_uuid(self, rest: RestClient, text: str, field: str = "uuid") -> str:
        """Return the uuid that begins with ``text``, as ``find_uuids`` does."""
        return self.find_uuids(rest, [text], field)[0]

    def _find_label(self, text: str, by_label: Mapping[str, Sequence[str]]) -> str:
        """Return the uuid of the object with a label; a uuid or its beginning unchanged."""
        if not _is_no_uuid(text):
            return text
        noun = (self.nouns or self.rows_key).replace("_", " ")
        uuids = by_label.get(text, ()) if text else ()
        if len(uuids) > 1:
            named = join_limited(uuids, MAX_NAMED)
            raise CommandError(f"{text} is ambiguous: {len(uuids)} {noun} ({named}); give the uuid")
        if not uuids and not _is_short(text):
            raise CommandError(
                f"none of the {noun} is {text!r}: give the uuid, its beginning, or "
                f"{self.expected}, as the list shows them"
            )
        return uuids[0] if uuids else text

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


def _is_no_uuid(text: str) -> bool:
    return _FULL.fullmatch(text.lower()) is None


def _is_short(text: str) -> bool:
    lower = text.lower()
    return _SHORT.fullmatch(lower) is not None and formatting.UUID.fullmatch(lower) is None
