# SPDX-License-Identifier: Apache-2.0
"""The WSME types that several nouns share, and the ways in and out of them.

A WSME type is the one description of a body: what a request may hold is read by it, what an answer
holds is rendered by it, and the documentation is made from it.
"""

import functools
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import wsme.exc
from wsme import types as wtypes
from wsme.rest import json as wsme_json

from cyborg.core.errors import Invalid, NotFound
from cyborg.core.request import parse_uuid

MAX_SHOWN = 60
MOST = 999_999_999  # of what is counted
MAX_WORDS = 1024  # a statement of a database carries no more than a few thousand values
_WHITE = "\n\r\t"


class Link(wtypes.Base):  # type: ignore[misc]
    """Where to go from here."""

    href = wtypes.wsattr(str, mandatory=True)
    rel = wtypes.wsattr(str, mandatory=True)


class Text(wtypes.UserType):  # type: ignore[misc]
    """A string of a bounded length, without control characters.

    With ``lines`` it may have line ends and tabs. A database takes neither a NUL nor half of a
    surrogate pair.
    """

    basetype = str
    name = "string"

    def __init__(self, longest: int = 255, *, shortest: int = 0, lines: bool = False) -> None:
        self.longest = longest
        self.shortest = shortest
        self.lines = lines

    def validate(self, value: Any) -> str:
        """Return the string. Raises ValueError."""
        if not isinstance(value, str):
            raise ValueError("must be a string")
        if len(value) > self.longest:
            raise ValueError(f"has {len(value)} characters, at most {self.longest} are allowed")
        if len(value) < self.shortest:
            raise ValueError(f"has {len(value)} characters, at least {self.shortest} are needed")
        plain = value.translate(dict.fromkeys(map(ord, _WHITE))) if self.lines else value
        if not plain.isprintable():
            raise ValueError("has characters that cannot be printed")
        return value


class Commas(Text):
    """Several strings in one, parted by commas."""

    name = "strings parted by commas"

    def __init__(self, longest: int = 65536) -> None:
        super().__init__(longest)

    def validate(self, value: Any) -> tuple[str, ...]:  # type: ignore[override]
        """Return the strings, without those that are empty. Raises ValueError."""
        words = tuple(part for word in super().validate(value).split(",") if (part := word.strip()))
        if len(words) > MAX_WORDS:
            raise ValueError(f"holds {len(words)} words, at most {MAX_WORDS} are allowed")
        return words


class Uuid(wtypes.UserType):  # type: ignore[misc]
    """A uuid, in any form that the RFC knows; it is passed on in the canonical one."""

    basetype = str
    name = "uuid"

    def validate(self, value: Any) -> str:
        """Return the canonical form. Raises ValueError."""
        try:
            return parse_uuid(value, "uuid")
        except Invalid:
            raise ValueError(f"{str(value)[:MAX_SHOWN]!r} is not a uuid") from None


class Key(Text):
    """A uuid or a name in a path: one that cannot be any is the name of nothing."""

    name = "uuid or name"

    def validate(self, value: Any) -> str:
        """Return the string. Raises NotFound."""
        try:
            return super().validate(value)
        except ValueError:
            raise NotFound(f"nothing is called {value[:MAX_SHOWN]!r}") from None


class Count(wtypes.UserType):  # type: ignore[misc]
    """An integer of at least 1."""

    basetype = str
    name = "integer"

    def validate(self, value: Any) -> int:
        """Return the number. Raises ValueError."""
        if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value)):
            raise ValueError(f"{value[:MAX_SHOWN]!r} is not an integer from 1 to {MOST}")
        return int(value)


class OneOf(wtypes.UserType):  # type: ignore[misc]
    """One of a few words."""

    basetype = str

    def __init__(self, *words: str) -> None:
        self.words = words
        self.name = " or ".join(words)

    def validate(self, value: Any) -> str:
        """Return the word. Raises ValueError."""
        if value not in self.words:
            raise ValueError(f"{str(value)[:MAX_SHOWN]!r} is not {self.name}")
        return str(value)


class Many(wtypes.UserType):  # type: ignore[misc]
    """A parameter that may be given several times; each value is of the inner type."""

    basetype = str
    many = True

    def __init__(self, each: Any) -> None:
        self.each = each
        self.name = f"{each.name}, several times"

    def validate(self, value: Any) -> Any:
        """Return one of the values. Raises ValueError."""
        return self.each.validate(value)


class Checked(wtypes.UserType):  # type: ignore[misc]
    """What a function of core reads: it returns the value, or raises Invalid, naming the field.

    ``like`` is the WSME type that the JSON has, for those who read of it; the function decides.
    """

    # WSME converts nothing to it: the function sees what the JSON held.
    basetype = None

    def __init__(self, name: str, check: Callable[[Any], Any], like: Any = None) -> None:
        self.name = name
        self.like = like
        self._check = check

    def validate(self, value: Any) -> Any:
        """Return what the function makes of the value."""
        return self._check(value)


def load(datatype: Any, value: Any, name: str) -> Any:
    """Return a value of a request as its type has it. Raises Invalid, naming the field."""
    try:
        if wtypes.iscomplex(datatype):
            return _load_object(datatype, value, name)
        return wtypes.validate_value(datatype, value)
    except wsme.exc.InvalidInput as bad:
        raise Invalid(f"{bad.fieldname}: {bad.msg}", field=bad.fieldname) from bad
    except ValueError as bad:
        raise Invalid(f"{name}: {bad}", field=name) from bad


def _load_object(datatype: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    known = {attribute.name: attribute for attribute in wtypes.list_attributes(datatype)}
    if unknown := sorted(set(value) - set(known)):
        shown = unknown[0][:MAX_SHOWN]
        raise Invalid(f"{shown}: unknown field; known are {', '.join(sorted(known))}", field=shown)
    for field, attribute in known.items():
        if attribute.mandatory and value.get(field) is None:
            raise Invalid(f"{field}: missing", field=field)
    return wsme_json.fromjson(datatype, value)


def dump(datatype: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as the JSON object that its type describes; the row may hold more.

    Not by way of WSME's own instances, which check each value again: ten times slower.
    """
    return {name: convert(row[key]) for name, key, convert in _plan(datatype)}


@functools.cache
def _plan(datatype: Any) -> tuple[tuple[str, str, Callable[[Any], Any]], ...]:
    return tuple(
        (a.name, a.key, _moment if a.datatype is datetime else _same)
        for a in wtypes.list_attributes(datatype)
    )


def _same(value: Any) -> Any:
    return value


def _moment(value: datetime | str | None) -> str | None:
    # The database keeps UTC without saying so; what came over the bus is text already.
    if value is None or isinstance(value, str):
        return value
    return value.replace(tzinfo=UTC).isoformat()
