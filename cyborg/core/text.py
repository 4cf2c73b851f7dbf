# SPDX-License-Identifier: Apache-2.0
"""Sanitising of free text from drivers and hardware, and formatting of lists and numbers."""

from collections.abc import Sequence

MAX_LENGTH = 4096


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
    return str(int(value)) if float(value).is_integer() else f"{value:g}"
