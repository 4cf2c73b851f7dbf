# SPDX-License-Identifier: Apache-2.0
"""The option --watch: a list that is shown again and again until the user quits."""

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from cyborg.cli.common.base import argument
from cyborg.cli.common.errors import CommandError
from cyborg.cli.terminal import live

if TYPE_CHECKING:
    from rich.text import Text

MIN_INTERVAL, DEFAULT_INTERVAL, MAX_INTERVAL = 0.5, 2.0, 3600.0

Listed = tuple[Sequence[str], Iterable[Sequence[Any]]]
"""The column names and the rows of a list."""


def parse_interval(text: str) -> float:
    """Parse a refresh interval in seconds. Raise ArgumentTypeError.

    >>> parse_interval("2")
    2.0
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
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


class Watcher:
    """Shows a list until the user quits.

    ``fetch`` returns the list; ``write`` writes it to a stream as a table of at most the given
    width, or in the format of the command if the width is 0.
    """

    def __init__(
        self, fetch: Callable[[], Listed], write: Callable[[Listed, TextIO, int], None]
    ) -> None:
        self._fetch = fetch
        self._write = write
        self._drawn: tuple[Any, int, list[str]] = (None, 0, [])

    def refresh(self, stdout: TextIO, title: str, interval: float) -> int:
        """Refresh the table in place until q or Ctrl-C, and return the exit status."""
        refresher = live.Refresher(self._fetch, self._fetch(), interval, CommandError)

        def build(
            listed: Listed, error: str | None, seconds: float, width: int, height: int
        ) -> list["Text"]:
            from rich.text import Text

            read_at = datetime.fromtimestamp(time.time() - seconds, UTC)
            head = f"{title}  {read_at:%Y-%m-%dT%H:%M:%SZ}, every {interval:g} s  q quits"
            lines = self._lines(listed, width, stdout.encoding or "ascii")
            if len(lines) > height - 1:
                hidden = len(lines) - max(height - 2, 0)
                lines = [*lines[: max(height - 2, 0)], f"{hidden} more lines"]
            first = (head, "reverse") if error is None else (f"{head}: {error}", "white on red")
            shown = [Text(first[0], first[1], no_wrap=True), *(Text(line) for line in lines)]
            for line in shown:
                line.no_wrap = True
                line.truncate(width)
            return shown

        return live.show_until_quit(stdout, sys.stdin, refresher, build)

    def _lines(self, listed: Listed, width: int, encoding: str) -> list[str]:
        # The view is built several times a second, to follow the size of the terminal.
        if self._drawn[0] is not listed or self._drawn[1] != width:
            out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
            self._write(listed, out, width)
            out.seek(0)
            self._drawn = (listed, width, out.read().splitlines())
        return self._drawn[2]

    def repeat(
        self, stdout: TextIO, interval: float, report: Callable[[CommandError], None]
    ) -> None:
        """Write the list again and again; an error after the first time is only reported."""
        listed: Listed | None = self._fetch()
        while True:
            if listed is not None:
                self._write(listed, stdout, 0)
                stdout.flush()
            time.sleep(interval)
            try:
                listed = self._fetch()
            except CommandError as exc:
                listed = None
                report(exc)
