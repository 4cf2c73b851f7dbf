# SPDX-License-Identifier: Apache-2.0
"""Base of the list commands: short tables that fit the terminal, and complete long tables.

With ``--watch`` a list is shown again and again until the user quits.
"""

import argparse
import functools
import io
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from cliff import columns, lister

from cyborg.cli.common import base, formatting
from cyborg.cli.common.base import argument
from cyborg.cli.common.rest import CommandError, Row
from cyborg.cli.terminal import live, tables

if TYPE_CHECKING:
    from rich.text import Text

MIN_INTERVAL, DEFAULT_INTERVAL, MAX_INTERVAL = 0.5, 2.0, 3600.0

# The column names and the rows of a list.
Listed = tuple[Sequence[str], Iterable[Sequence[Any]]]


def parse_interval(text: str) -> float:
    """Parse a refresh interval in seconds. Raise ArgumentTypeError.

    >>> parse_interval("2")
    2.0
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0  # rejected below
    if not MIN_INTERVAL <= value <= MAX_INTERVAL:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from {MIN_INTERVAL:g} to {MAX_INTERVAL:g}"
        )
    return value


WATCH = argument(
    "--watch",
    nargs="?",
    type=parse_interval,
    const=DEFAULT_INTERVAL,
    metavar="SECONDS",
    help=f"show the list again every SECONDS, {DEFAULT_INTERVAL:g} by default, until Ctrl-C; on a "
    "terminal it is refreshed in place, and q quits",
)


class _Drawn(NamedTuple):
    """What was drawn last."""

    listed: Listed
    width: int
    lines: list[str]


@dataclass
class Watcher:
    """Shows a list until the user quits.

    ``fetch`` returns the list; ``write`` writes it to a stream as a table of at most the given
    width, or in the format of the command if the width is 0.
    """

    fetch: Callable[[], Listed]
    write: Callable[[Listed, TextIO, int], None]
    _drawn: _Drawn | None = None

    def refresh(self, stdout: TextIO, title: str, interval: float) -> int:
        """Refresh the table in place until q or Ctrl-C, and return the exit status."""
        # The first fetch is not in the thread: its error ends the command, with its message.
        refresher = live.Refresher(self.fetch, self.fetch(), interval, CommandError)

        def build(
            listed: Listed, error: str | None, age: float, width: int, height: int
        ) -> list["Text"]:
            from rich.text import Text

            read_at = datetime.fromtimestamp(time.time() - age, UTC)
            head = f"{title}  {read_at:%Y-%m-%dT%H:%M:%SZ}, every {interval:g} s  q quits"
            lines = self._lines(listed, width, stdout.encoding or "ascii")
            if len(lines) > height - 1:
                # Less the title and the line about the hidden ones.
                room = max(height - 2, 0)
                lines = [*lines[:room], f"{len(lines) - room} more lines"]
            if error is None:
                title_line = Text(head, "reverse")
            else:
                title_line = Text(f"{head}: {error}", "white on red")
            shown = [title_line, *(Text(line) for line in lines)]
            for line in shown:
                line.no_wrap = True
                line.truncate(width)
            return shown

        return live.show_until_quit(stdout, sys.stdin, refresher, build)

    def _lines(self, listed: Listed, width: int, encoding: str) -> list[str]:
        # The view is built several times a second, to follow the size of the terminal.
        drawn = self._drawn
        if drawn is None or drawn.listed is not listed or drawn.width != width:
            out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
            self.write(listed, out, width)
            out.seek(0)
            drawn = self._drawn = _Drawn(listed, width, out.read().splitlines())
        return drawn.lines

    def repeat(
        self, stdout: TextIO, interval: float, report: Callable[[CommandError], None]
    ) -> None:
        """Write the list again and again; an error after the first time is only reported."""
        listed: Listed | None = self.fetch()
        while True:
            if listed is not None:
                self.write(listed, stdout, 0)
                stdout.flush()
            time.sleep(interval)
            try:
                listed = self.fetch()
            except CommandError as exc:
                listed = None
                report(exc)


MIN_COLUMN_WIDTH = 8  # characters that a truncated column keeps


LONG = base.flag(
    "--long", "show all fields and full uuids, with a table for each object if they do not fit"
)


class Lister(base.Command, lister.Lister):
    """Base class of list commands.

    Without ``--long`` the table has the short columns of the collection, abbreviated uuids, and one
    line per row; cells that do not fit the terminal are truncated with an ellipsis. With
    ``--long`` nothing is truncated: a table that is too wide is shown as one table for each object.
    JSON and YAML have the long columns; ``-c`` accepts all of them. ``UNCUT_COLUMNS`` are never
    truncated.
    """

    UNCUT_COLUMNS: Sequence[str] = ("State", "Status")
    OPTIONS: Sequence[base.Argument] = (LONG, WATCH)

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the arguments; ``long`` is False in a command that has no option --long."""
        parser = super().get_parser(prog_name)
        parser.set_defaults(long=False, watch=None)
        for action in parser._actions:
            if action.dest == "sort_columns":
                action.help = "sort by this column; repeat the option for more columns"
        return parser

    def run(self, parsed_args: argparse.Namespace) -> int:
        """Run the command; with --watch until the user quits."""
        if parsed_args.watch is None:
            return int(super().run(parsed_args))
        watcher = Watcher(
            lambda: self.take_action(parsed_args), functools.partial(self._write, parsed_args)
        )
        stdout = self.app.stdout
        if parsed_args.formatter == "table" and live.is_interactive(stdout):
            return watcher.refresh(stdout, f"{self.app.NAME} {self.cmd_name}", parsed_args.watch)
        # A pipe or a file, and any other format, gets the list again and again.
        watcher.repeat(stdout, parsed_args.watch, self.app.LOG.error)
        return 0

    def _write(
        self, parsed_args: argparse.Namespace, listed: Listed, out: TextIO, max_width: int
    ) -> None:
        """Write a list to a stream.

        A view has a ``max_width``, and its stream also gets the messages about the list. It is 0
        for other output.
        """
        # A copy: produce_output changes the arguments, and the next view needs them unchanged.
        args = argparse.Namespace(**vars(parsed_args))
        args.max_width = max_width or parsed_args.max_width
        formatter: Any = self._formatter_plugins[args.formatter].obj
        # A new choice for each write: produce_output may have replaced the formatter.
        self.formatter = formatter
        streams = self.app.stdout, self.app.stderr
        self.app.stdout = out
        # On the alternate screen a message on stderr would break the view.
        if max_width:
            self.app.stderr = out
        try:
            self.produce_output(args, *listed)
        finally:
            self.app.stdout, self.app.stderr = streams

    def take_action(self, args: argparse.Namespace) -> Any:
        """Return the table."""
        return self.build_rows(args, self.read_rows(args))

    def read_rows(self, args: argparse.Namespace) -> list[dict[str, Any]]:
        """Return the objects that match the arguments."""
        return self.COLLECTION.list_all(self.app.rest, **self.read_fields(args))

    def build_rows(
        self,
        args: argparse.Namespace,
        rows: Iterable[Row],
        short: formatting.Columns = (),
        long: formatting.Columns = (),
    ) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Return headings and cells; ``short`` and ``long`` override the collection's columns."""
        collection = self.COLLECTION
        short = short or collection.short
        long = long or collection.long or short
        # Scripts that name columns, or read JSON, must not lose fields by the width of a terminal.
        is_long = args.long or args.columns or args.formatter in tables.STRUCTURED
        shown = long if is_long else short
        objects = [collection.format_row(row) for row in rows]
        cells_by_column = []
        for _, key in shown:
            values = [formatting.read_value(row, key) for row in objects]
            # JSON has the whole uuid in any case: what a person reads is abbreviated.
            digits = formatting.UUID_LENGTH if args.long else formatting.uuid_digits(values)
            cells_by_column.append([formatting.to_cell(value, digits) for value in values])
        return tuple(heading for heading, _ in shown), list(zip(*cells_by_column, strict=True))

    def produce_output(
        self,
        parsed_args: argparse.Namespace,
        column_names: Sequence[str],
        data: Iterable[Sequence[Any]],
    ) -> int:
        """Print the rows; without rows print a message on stderr."""
        rows = [tuple(row) for row in data]
        parsed_args.sort_columns = [
            find_column(column_names, name) for name in parsed_args.sort_columns or ()
        ]
        self.formatter = tables.choose_formatter(parsed_args, self.formatter)
        # Reject an unknown column even without rows.
        _, selector = self._generate_columns_and_selector(parsed_args, column_names)
        if not rows and parsed_args.formatter not in tables.STRUCTURED:
            self.app.stderr.write(f"no {self.COLLECTION.nouns or self.COLLECTION.rows_key}\n")
            # cliff would print an empty line for a table.
            if not getattr(parsed_args, "print_empty", False) and parsed_args.formatter == "table":
                return 0
        if parsed_args.formatter == "table" and rows:
            visible = selector or [True] * len(column_names)
            width = tables.limit_width(parsed_args, self.app.stdout)
            if not parsed_args.long:
                elastic = [name not in self.UNCUT_COLUMNS for name in column_names]
                ellipsis = _ellipsis(self.app.stdout)
                truncated = fit_table(column_names, rows, visible, elastic, width, ellipsis)
                # Whole cells if even these do not fit: a table for each object has room for them.
                rows = truncated if table_width(column_names, truncated, visible) <= width else rows
            if table_width(column_names, rows, visible) > width:
                by_object: Any = tables.ObjectFormatter(self.formatter)
                self.formatter = by_object
        return int(super().produce_output(parsed_args, column_names, rows))


def find_column(names: Sequence[str], text: str) -> str:
    """Return the column for ``--sort-column``. Raise CommandError, where cliff only logs.

    >>> find_column(["UUID", "Last seen"], "last_seen")
    'Last seen'
    """
    # The key in JSON is accepted as well as the heading.
    plain = text.lower().replace("_", " ")
    for name in names:
        if plain == name.lower():
            return name
    known = ", ".join(names)
    raise CommandError(f"--sort-column: unknown column {text!r}, expected one of {known}")


def table_width(
    names: Sequence[str], rows: Sequence[Sequence[Any]], visible: Sequence[bool]
) -> int:
    """Return the width of a table, in columns of the terminal."""
    widths = (
        max(
            tables.text_width(line)
            for text in (name, *(cell_text(row[number]) for row in rows))
            for line in text.splitlines() or ("",)  # an empty cell has no line
        )
        for number, name in enumerate(names)
        if visible[number]
    )
    # A column takes its text, two blanks and a border; the table has one more border.
    return sum(width + 3 for width in widths) + 1


def fit_table(
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    visible: Sequence[bool],
    elastic: Sequence[bool],
    width: int,
    ellipsis: str = "…",
) -> list[tuple[Any, ...]]:
    """Truncate rows to one line each, so that the table is at most ``width`` wide if possible.

    The widest ``elastic`` columns are truncated first, to at least MIN_COLUMN_WIDTH. Uuids and
    times are never truncated.
    """
    texts = [[_one_line(value) for value in row] for row in rows]
    # The limit of each column begins with the width of its longest text.
    limits = [
        max(tables.text_width(text) for text in (name, *(row[number] for row in texts)))
        for number, name in enumerate(names)
    ]
    truncatable = [
        number
        for number, shows in enumerate(visible)
        if shows and elastic[number] and not any(_is_fixed(row[number]) for row in rows)
    ]
    # A column has a border and two spaces, and the table one more border.
    excess = sum(limits[n] + 3 for n, shows in enumerate(visible) if shows) + 1 - width
    # One character at a time from the widest: the columns come out as equal as possible.
    while excess > 0 and truncatable:
        widest = max(truncatable, key=lambda number: limits[number])
        # A heading is never cut: it is the name that -c takes.
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


def cell_text(value: Any) -> str:
    """Return the text of a cell, which can have several lines."""
    return value.human_readable() if isinstance(value, columns.FormattableColumn) else str(value)


def _one_line(value: Any) -> str:
    return ", ".join(line.strip() for line in cell_text(value).splitlines())


def _is_fixed(value: Any) -> bool:
    if isinstance(value, formatting.Time):
        return True
    raw = value.machine_readable() if isinstance(value, columns.FormattableColumn) else value
    return isinstance(raw, str) and formatting.UUID.fullmatch(raw) is not None


def _truncate(value: Any, text: str, limit: int, ellipsis: str) -> Any:
    if tables.text_width(text) > limit:
        while tables.text_width(text) > limit - len(ellipsis):
            text = text[:-1]
        text = text.rstrip() + ellipsis
    elif "\n" not in cell_text(value):
        return value
    raw = value.machine_readable() if isinstance(value, columns.FormattableColumn) else value
    return formatting.Text(raw, text)


def _ellipsis(stdout: TextIO) -> str:
    try:
        "…".encode(getattr(stdout, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return "~"
    return "…"
