# SPDX-License-Identifier: Apache-2.0
"""Texts: sanitising, formats of lists, numbers and times, and enumerations with descriptions."""

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

MAX_LENGTH = 4096
_MAX_SHOWN_BITS = 256


def sanitize(text: str, max_length: int = MAX_LENGTH) -> str:
    """Return the text in a form that every database, log and terminal can show.

    Each character that is not printable (control characters, NUL, lone surrogates) becomes a space;
    line ends stay. Text longer than ``max_length`` is cut.
    """
    # Not refused: a host must not lose its report because of one odd byte in a serial number.
    plain = "".join(c if c.isprintable() or c == "\n" else " " for c in text[:max_length])
    return plain.strip(" ") if plain != text else plain


def join_limited(
    texts: Sequence[str],
    limit: int,
    total: int | None = None,
    *,
    separator: str = ", ",
    nouns: str = "",
) -> str:
    """Join the first ``limit`` texts; end with the number of omitted texts: ``a, b, 3 more hosts``.

    ``nouns`` is the last word, here "hosts". ``total`` is the number of all texts if ``texts`` has
    only some of them.
    """
    omitted = max(total or 0, len(texts)) - min(limit, len(texts))
    suffix = [f"{omitted} more {nouns}".rstrip()] if omitted else []
    return separator.join([*texts[:limit], *suffix])


def format_number(value: float) -> str:
    """Return a number as text: a whole number with all its digits, never as 2.14748e+09."""
    # The format g alone would round a number of more than six digits.
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def abbreviate(value: Any, max_length: int = 60) -> str:
    """Return the start of a plain value, or the type of a list, an object or a huge integer."""
    # Python raises ValueError if an integer of more than 4300 digits is converted to text.
    is_plain = value is None or isinstance(value, str | int | float)
    if not is_plain or (isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS):
        return type(value).__name__
    return str(value)[:max_length]


def describe(value: Any) -> str:
    """Return the start of a text, or the type of another value, for an error message."""
    return repr(value[:60]) if isinstance(value, str) else f"of type {type(value).__name__}"


class DescribedEnum(StrEnum):
    """Enumeration with a ``description`` of each member: ``NAME = "value", "A sentence."``."""

    description: str

    # The default is for mypy, which takes the lookup of a value for a call with one argument.
    def __new__(cls, value: str, description: str = "") -> Self:
        """Return a new member. Raise TypeError without a description."""
        if not description:
            raise TypeError(f"{cls.__name__} {value} has no description")
        member = str.__new__(cls, value)
        member._value_ = value
        member.description = description
        return member


def to_iso(moment: datetime) -> str:
    """Format a time as ISO 8601 in UTC: ``2030-01-31T12:00:00.000000+00:00``.

    A time without a zone, as from the database, is UTC. The fraction always has six digits, so all
    times of one answer have one format, and sort as text.
    """
    zoned = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return zoned.isoformat(timespec="microseconds")


def to_text(timestamp: str) -> str:
    """Return a time of ``to_iso`` as texts for people have it: ``2030-01-31T12:00:00Z``."""
    moment = datetime.fromisoformat(timestamp).replace(microsecond=0, tzinfo=None)
    return f"{moment.isoformat()}Z"
