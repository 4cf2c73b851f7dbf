# SPDX-License-Identifier: Apache-2.0
"""``cyborg top``: the state of the cloud, refreshed until the user quits."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from cyborg.cli.common import base
from cyborg.cli.common.base import argument
from cyborg.cli.common.errors import CommandError
from cyborg.cli.common.watch import DEFAULT_INTERVAL, parse_interval
from cyborg.cli.terminal import live
from cyborg.cli.views import output
from cyborg.cli.views.status import Snapshot, build_lines, fetch_snapshot
from cyborg.cli.views.text import Glyphs, build_line, choose_glyphs, format_age

if TYPE_CHECKING:
    from rich.text import Text


class Top(base.Command):
    """Show hosts, resource classes, alarms and work under way, and refresh until q is pressed.

    If the output is no terminal, or with --once, the state is printed once. For administrators.
    """

    ARGUMENTS = (
        argument(
            "--interval",
            type=parse_interval,
            default=DEFAULT_INTERVAL,
            metavar="SECONDS",
            help="seconds between two refreshes, 2 by default",
        ),
        argument("--once", action="store_true", help="print the state once"),
        output.FORMAT,
    )

    def run(self, parsed_args: argparse.Namespace) -> int:
        """Run the command and return the exit status."""
        self._status = 0
        return super().run(parsed_args) or self._status

    def take_action(self, args: argparse.Namespace) -> None:
        """Show the state."""
        stdout, rest = self.app.stdout, self.app.rest
        # Fetched once before the screen changes: most errors are those of the first request.
        first = fetch_snapshot(rest)
        if args.format == "json":
            stdout.write(json.dumps(first.to_document(), indent=2) + "\n")
        elif args.once or not live.is_interactive(stdout):
            output.write_lines(stdout, build_lines(first, *output.size_of(stdout)))
        else:
            glyphs, interval = choose_glyphs(stdout), args.interval

            def build(
                found: Snapshot, error: str | None, seconds: float, width: int, height: int
            ) -> list["Text"]:
                title = build_title(found, error, seconds, interval, width, glyphs)
                return [title, *build_lines(found, width, glyphs, height - 1)]

            refresher = live.Refresher(lambda: fetch_snapshot(rest), first, interval, CommandError)
            stdin: Any = getattr(self.app, "stdin", None) or sys.stdin
            self._status = live.show_until_quit(stdout, stdin, refresher, build)


def build_title(
    found: Snapshot, error: str | None, seconds: float, interval: float, width: int, glyphs: Glyphs
) -> "Text":
    """Return the first line: the time of the data, or the error of the last refresh."""
    read_at = found.summary["read_at"][:19]
    if error is not None:
        age = format_age(seconds)
        return build_line(width, glyphs, (f"data of {age} ago: {error}", "bold white on red"))
    counted = found.summary["count_age"]
    note = f", counts {format_age(counted)} old" if counted else ""
    text = f"cyborg top  {read_at}Z, every {interval:g} s{note}  q quits"
    return build_line(width, glyphs, (text, "reverse"))
