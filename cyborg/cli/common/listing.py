# SPDX-License-Identifier: Apache-2.0
"""Base of the list commands: short tables that fit the terminal, and complete long tables."""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from cliff import columns, lister

from cyborg.cli.common import base, formatting

MIN_COLUMN_WIDTH = 8  # characters that a truncated column keeps
_STRUCTURED = ("json", "yaml")  # formats that show an empty list


class Lister(base.Command, lister.Lister):
    """Base class of list commands.

    Without ``--long`` the table has the short columns of the collection, abbreviated uuids, and one
    line per row: on a terminal, cells that do not fit are truncated with an ellipsis. Output to a
    pipe or a file is never truncated. ``-c`` accepts all long columns. ``UNCUT_COLUMNS`` are never
    truncated.
    """

    UNCUT_COLUMNS: Sequence[str] = ("State", "Status")
    OPTIONS: Sequence[base.Argument] = (
        base.argument(
            "--long",
            action="store_true",
            help="show all fields and full uuids, without truncation to the terminal width",
        ),
    )

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the arguments; ``long`` is False in a command that has no option --long."""
        parser = super().get_parser(prog_name)
        parser.set_defaults(long=False)
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Return the table."""
        return self.build_rows(args, self.read_rows(args))

    def read_rows(self, args: argparse.Namespace) -> list[dict[str, Any]]:
        """Return the objects that match the arguments."""
        return self.COLLECTION.list_all(self.app.rest, **self.read_fields(args))

    def build_rows(
        self,
        args: argparse.Namespace,
        rows: Iterable[Mapping[str, Any]],
        short: formatting.Columns = (),
        long: formatting.Columns = (),
    ) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Return headings and cells; ``short`` and ``long`` override the collection's columns."""
        collection = self.COLLECTION
        short, long = (
            short or collection.short,
            long or collection.long or short or collection.short,
        )
        shown = long if args.long or args.columns else short
        objects = [collection.format_row(row) for row in rows]
        columns = []
        for _, key in shown:
            values = [row.get(key) for row in objects]
            digits = formatting.UUID_LENGTH if args.long else formatting.uuid_digits(values)
            columns.append([formatting.to_cell(value, digits) for value in values])
        return tuple(heading for heading, _ in shown), list(zip(*columns, strict=True))

    def produce_output(
        self,
        parsed_args: argparse.Namespace,
        column_names: Sequence[str],
        data: Iterable[Sequence[Any]],
    ) -> int:
        """Print the rows; without rows print a message on stderr."""
        rows = [tuple(row) for row in data]
        # Reject an unknown column even without rows.
        self._generate_columns_and_selector(parsed_args, column_names)
        if not rows and parsed_args.formatter not in _STRUCTURED:
            self.app.stderr.write(f"no {self.COLLECTION.nouns or self.COLLECTION.rows_key}\n")
            # cliff would print an empty line for a table.
            if not getattr(parsed_args, "print_empty", False) and parsed_args.formatter == "table":
                return 0
        if parsed_args.formatter == "table" and not parsed_args.long and rows:
            rows = self._fit_rows(parsed_args, column_names, rows)
        return int(super().produce_output(parsed_args, column_names, rows))

    def _fit_rows(
        self, args: argparse.Namespace, names: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, ...]]:
        width = args.max_width if args.max_width > 0 else terminal_width(self.app.stdout)
        _, selector = self._generate_columns_and_selector(args, names)
        visible = [bool(flag) for flag in selector] if selector else [True] * len(names)
        elastic = [name not in self.UNCUT_COLUMNS for name in names]
        return fit_table(names, rows, visible, elastic, width, _ellipsis(self.app.stdout))


def terminal_width(stdout: TextIO) -> int | None:
    """Return the width of the terminal in characters; None if the output is not a terminal.

    The environment variable COLUMNS takes precedence.
    """
    text = os.environ.get("COLUMNS", "")
    if text.isdigit() and int(text) > 0:
        return int(text)
    try:
        return os.get_terminal_size(stdout.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None


def fit_table(
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    visible: Sequence[bool],
    elastic: Sequence[bool],
    width: int | None,
    ellipsis: str = "…",
) -> list[tuple[Any, ...]]:
    """Truncate rows to one line each, so that the table is at most ``width`` wide if possible.

    The widest ``elastic`` columns are truncated first, to at least MIN_COLUMN_WIDTH. Uuids and
    times are never truncated. With the width None nothing is truncated.
    """
    texts = [[_one_line(value) for value in row] for row in rows]
    widths = [
        max(len(name), *(len(row[number]) for row in texts)) for number, name in enumerate(names)
    ]
    truncatable = [
        number
        for number, shows in enumerate(visible)
        if shows and elastic[number] and not any(_is_fixed(row[number]) for row in rows)
    ]
    # A column takes its text, two blanks and a border; the table has one more border.
    excess = sum(widths[n] + 3 for n, shows in enumerate(visible) if shows) + 1 - (width or 0)
    limits = list(widths)
    while width and excess > 0 and truncatable:
        widest = max(truncatable, key=lambda number: limits[number])
        if limits[widest] <= max(MIN_COLUMN_WIDTH, len(names[widest])):
            break
        limits[widest] -= 1
        excess -= 1
    return [
        tuple(
            _truncate(value, text, limit, ellipsis)
            for value, text, limit in zip(row, line, limits, strict=True)
        )
        for row, line in zip(rows, texts, strict=True)
    ]


def _one_line(value: Any) -> str:
    text = value.human_readable() if isinstance(value, columns.FormattableColumn) else str(value)
    return ", ".join(line.strip() for line in text.splitlines())


def _is_fixed(value: Any) -> bool:
    if isinstance(value, formatting.Time):
        return True
    raw = value.machine_readable() if isinstance(value, columns.FormattableColumn) else value
    return isinstance(raw, str) and formatting.UUID.fullmatch(raw) is not None


def _truncate(value: Any, text: str, limit: int, ellipsis: str) -> Any:
    if len(text) > limit:
        text = text[: limit - len(ellipsis)].rstrip() + ellipsis
    elif not isinstance(value, columns.FormattableColumn) or "\n" not in value.human_readable():
        return value
    raw = value.machine_readable() if isinstance(value, columns.FormattableColumn) else value
    return formatting.Text(raw, text)


def _ellipsis(stdout: TextIO) -> str:
    try:
        "…".encode(getattr(stdout, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return "~"
    return "…"
