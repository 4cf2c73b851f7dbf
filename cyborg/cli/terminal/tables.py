# SPDX-License-Identifier: Apache-2.0
"""Tables that fit the terminal, and values as text for the formats without types."""

import argparse
import json
import os
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from cliff import columns, show

# Width of a table that is not written to a terminal, in characters.
DEFAULT_WIDTH = 80
# Formats that keep the types of values.
STRUCTURED = ("json", "yaml")


def terminal_width(stdout: TextIO) -> int:
    """Return the width of the terminal in characters, DEFAULT_WIDTH for other output.

    The environment variable COLUMNS takes precedence.
    """
    text = os.environ.get("COLUMNS", "")
    if text.isdigit() and int(text) > 0:
        return int(text)
    try:
        # 0 columns: a terminal without a size, such as a serial console.
        return os.get_terminal_size(stdout.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError, AttributeError):
        return DEFAULT_WIDTH


def is_terminal(stream: TextIO) -> bool:
    """Return whether an output is a terminal; an output without a file is none."""
    try:
        return os.isatty(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def text_width(text: str) -> int:
    r"""Return how many columns of a terminal a text takes.

    >>> [text_width(text) for text in ("abc", "\u5361", "e\u0301")]
    [3, 2, 1]
    """
    if text.isascii():
        return len(text)
    # W and F: a wide character, such as a Chinese one, takes two columns.
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def limit_width(args: argparse.Namespace, stdout: TextIO) -> int:
    """Set the maximum width of the table of a command to the terminal's, and return it.

    The option --max-width takes precedence.
    """
    if args.max_width < 1:
        args.max_width = terminal_width(stdout)
    return int(args.max_width)


def to_plain(value: Any) -> Any:
    """Return a value for a format without types: an empty text for None, JSON for an object.

    >>> [to_plain(value) for value in (None, True, 1, "a", {"a": None})]
    ['', 'true', 1, 'a', '{"a": null}']
    """
    raw = value.machine_readable() if isinstance(value, columns.FormattableColumn) else value
    if raw is None:
        return ""
    return json.dumps(raw) if isinstance(raw, bool | dict | list | tuple) else raw


class PlainFormatter:
    """A formatter whose values are those of ``to_plain``."""

    def __init__(self, formatter: Any) -> None:
        self._formatter = formatter

    def emit_list(self, names: Sequence[str], rows: Iterable[Iterable[Any]], *more: Any) -> None:
        """Write a list of objects."""
        self._formatter.emit_list(names, (list(map(to_plain, row)) for row in rows), *more)

    def emit_one(self, names: Sequence[str], values: Iterable[Any], *more: Any) -> None:
        """Write one object."""
        self._formatter.emit_one(names, tuple(map(to_plain, values)), *more)


class ObjectFormatter:
    """A formatter of a list that writes a table for each object."""

    def __init__(self, formatter: Any) -> None:
        self._formatter = formatter

    def emit_list(self, names: Sequence[str], rows: Iterable[Sequence[Any]], *more: Any) -> None:
        """Write a list of objects."""
        for row in rows:
            self._formatter.emit_one(names, row, *more)


def choose_formatter(args: argparse.Namespace, formatter: Any) -> Any:
    """Return the formatter for a command, given that of cliff for its format."""
    # The table shows cells by their own texts.
    has_types = args.formatter == "table" or args.formatter in STRUCTURED
    return formatter if has_types else PlainFormatter(formatter)


class ShowOne(show.ShowOne):
    """Base of the commands that show one object; the table wraps long values."""

    def produce_output(
        self, parsed_args: argparse.Namespace, column_names: Sequence[str], data: Iterable[Any]
    ) -> int:
        """Print the object."""
        if parsed_args.formatter == "table":
            limit_width(parsed_args, self.app.stdout)
        self.formatter = choose_formatter(parsed_args, self.formatter)
        return int(super().produce_output(parsed_args, column_names, tuple(data)))
