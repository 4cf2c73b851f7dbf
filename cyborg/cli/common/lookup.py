# SPDX-License-Identifier: Apache-2.0
"""Lookup of objects by the abbreviated uuids that the tables show."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from cyborg.cli.common.errors import CommandError
from cyborg.cli.common.formatting import UUID
from cyborg.core.text import join_limited

MAX_NAMED = 3  # candidates in an error message
# At least four digits: a shorter word such as "bad" is probably a name.
_SHORT = re.compile(r"[0-9a-f]{4,8}|[0-9a-f]{8}-[0-9a-f-]{0,27}")


class CollectionReader(Protocol):
    """The method of ``RestClient`` that a lookup calls."""

    def list_all(self, path: str, key: str, /) -> Sequence[Mapping[str, Any]]:
        """Return all rows of a collection."""


def find_uuid(rest: CollectionReader, path: str, key: str, text: str, field: str = "uuid") -> str:
    """Return the uuid of the object whose uuid begins with ``text``.

    ``path`` is the path of the collection, ``key`` the key of its rows, and ``field`` the key of
    the uuid. A text that is not an abbreviation, matches no uuid, or is the name of an object is
    returned unchanged; the service validates it. Raise CommandError if several uuids match.
    """
    return find_uuids(rest, path, key, [text], field)[0]


def find_uuids(
    rest: CollectionReader, path: str, key: str, texts: Iterable[str], field: str = "uuid"
) -> list[str]:
    """Return the uuid of each text as ``find_uuid`` does, with at most one request."""
    names_or_uuids = list(texts)
    if not any(_is_short(text) for text in names_or_uuids):
        return names_or_uuids
    rows = rest.list_all(path, key)
    names = {row.get("name") for row in rows}
    uuids = sorted({str(row[field]) for row in rows if row.get(field)})
    return [
        _resolve(text, uuids, key) if _is_short(text) and text not in names else text
        for text in names_or_uuids
    ]


def _is_short(text: str) -> bool:
    lower = text.lower()
    return _SHORT.fullmatch(lower) is not None and UUID.fullmatch(lower) is None


def _resolve(text: str, uuids: Iterable[str], key: str) -> str:
    matches = [uuid for uuid in uuids if uuid.startswith(text.lower())]
    if len(matches) > 1:
        named = join_limited(matches, MAX_NAMED)
        noun = key.replace("_", " ")
        raise CommandError(
            f"{text} is ambiguous: {len(matches)} {noun} match ({named}); add more digits"
        )
    return matches[0] if matches else text
