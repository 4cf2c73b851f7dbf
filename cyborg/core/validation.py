# SPDX-License-Identifier: Apache-2.0
"""Checks of plain values from JSON, the bus or a driver: of their type, length and range."""

import re
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

from cyborg.core.errors import Invalid
from cyborg.core.text import abbreviate

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)
MAX_GENERATION = 2**53  # the largest integer that every JSON parser reads exactly
# For the hint in an error: what an operator may have given instead of a uuid.
_ADDRESS = re.compile(r"([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_NAME = re.compile(r"[a-z][a-z0-9]*([-_.][a-z0-9]+)+|[g-z][a-z0-9]{2,}", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def string(value: Any) -> str:
    """Return the value. Raise TypeError if it is not a string."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {type(value).__name__}")
    return value


def integer(value: Any) -> int:
    """Return the value. Raise TypeError if it is not an integer, or is a boolean."""
    # A boolean is an integer for Python, and another type for JSON.
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected an integer, found {type(value).__name__}")
    return value


def number(value: Any) -> float:
    """Return the value. Raise TypeError if it is not a number, or is a boolean."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"expected a number, found {type(value).__name__}")
    return float(value)


def boolean(value: Any) -> bool:
    """Return the value. Raise TypeError if it is not a boolean."""
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {type(value).__name__}")
    return value


def optional(load: Callable[[Any], T], value: Any) -> T | None:
    """Return None for None, the loaded value otherwise."""
    return None if value is None else load(value)


def find_duplicate(values: Iterable[H]) -> H | None:
    """Return the first value that occurs twice, None if there is none."""
    seen: set[H] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


@contextmanager
def malformed(subject: str, field: str) -> Iterator[None]:
    """Raise Invalid for plain values that the block cannot parse, as their shape is wrong."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as exc:
        # Of a missing key, a wrong type, an unknown member of an enumeration or a huge number.
        # Other exceptions are errors of this program, and Invalid says more than this does.
        raise Invalid(f"malformed {subject}: {type(exc).__name__} {exc}", field=field) from exc


def check_text(
    field: str,
    value: Any,
    max_length: int = 255,
    *,
    subject: str | None = None,
    allowed: str = "",
) -> str:
    """Return the value. Raise Invalid unless it is a string of 1 to ``max_length`` characters.

    Each character must be printable or in ``allowed``, and at least one must not be in ``allowed``.
    The error message begins with ``subject``, by default ``field``.
    """
    plain = value if isinstance(value, str) else ""
    # Not stripped: a text of allowed characters alone is refused, and the others are kept as given.
    if allowed:
        plain = plain.translate(dict.fromkeys(map(ord, allowed)))
    if not plain or len(value) > max_length or not plain.isprintable():
        raise Invalid(
            f"{subject or field}: invalid value {abbreviate(value)!r}, expected a string of 1 to "
            f"{max_length} printable characters",
            field=field,
        )
    return str(value)


def check_optional_text(field: str, value: Any) -> str | None:
    """Return the value. Raise Invalid unless it is None, or a text that ``check_text`` accepts."""
    return optional(lambda text: check_text(field, text), value)


def check_integer(
    field: str, value: Any, max_value: int = MAX_GENERATION, *, subject: str | None = None
) -> int:
    """Return the value. Raise Invalid unless it is an integer from 0 to ``max_value``.

    The error message begins with ``subject``, by default ``field``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= max_value:
        raise Invalid(
            f"{subject or field}: invalid value {abbreviate(value)!r}, expected an integer from 0 "
            f"to {max_value}",
            field=field,
        )
    return value


def parse_uuid(value: Any, field: str) -> str:
    """Return the canonical form of a uuid. Raise Invalid with the name of the field."""
    try:
        # uuid.UUID alone accepts signs, underscores and the digits of any script.
        if not isinstance(value, str) or not _UUID.fullmatch(value):
            raise ValueError
        return str(uuid.UUID(value))
    except ValueError:
        raise Invalid(f"{field}: {describe_non_uuid(value)}", field=field) from None


def describe_non_uuid(value: Any) -> str:
    """Return that a value is not a uuid, and what it is instead if that can be seen."""
    kind = ""
    if isinstance(value, str) and _ADDRESS.fullmatch(value):
        kind = " but the address of a device, give its uuid"
    elif isinstance(value, str) and _NAME.fullmatch(value):
        kind = " but a name, give its uuid"
    return f"{abbreviate(value)!r} is not a uuid{kind}"


def parse_future_time(value: Any, field: str, now: datetime, expected: str) -> datetime:
    """Return a time in ISO 8601 as naive UTC; a time without a zone is UTC.

    ``expected`` says what is expected instead of a time in the past. Raise Invalid with the name of
    the field unless the time is later than ``now``, in naive UTC.
    """
    try:
        moment = datetime.fromisoformat(value)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        utc = moment.astimezone(UTC).replace(tzinfo=None)
    except (TypeError, ValueError, OverflowError):
        raise Invalid(
            f"{field}: {abbreviate(value)!r} is not a time in ISO 8601, such as "
            "2030-01-31T12:00:00+00:00",
            field=field,
        ) from None
    if utc <= now:
        raise Invalid(
            f"{field}: {str(value)[:60]} is in the past, expected {expected}", field=field
        )
    return utc
