# SPDX-License-Identifier: Apache-2.0
"""``cyborg discover-services``: tell agents to look at their hardware now."""

import argparse
import time
from typing import Any

from cliff import lister

from cyborg.cli import shown
from cyborg.cli.rest import Refused, at

PATH = "/discoveries"
SHORT: shown.Columns = (
    ("Discovery", "uuid"),
    ("Host", "host"),
    ("Backend", "backend"),
    ("State", "state"),
    ("Error", "error"),
)
PENDING = "IN-PROGRESS"


class Create(lister.Lister):
    """Discover what the backends of one host or of all hosts can see."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add what to discover and whether to wait."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--host", help="only this host")
        parser.add_argument("--driver", help="only the backends of this driver")
        parser.add_argument("--wait", action="store_true", help="wait until all have answered")
        parser.add_argument(
            "--timeout",
            type=float,
            default=120.0,
            metavar="SECONDS",
            help="with --wait, for how long at most (120)",
        )
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Start, wait if asked to, and show."""
        wanted = {"host": args.host, "driver": args.driver}
        made = self.app.rest.call("POST", PATH, {k: v for k, v in wanted.items() if v is not None})
        path = at(PATH, made["uuid"])
        found = self._wait(path, args.timeout) if args.wait else self.app.rest.call("GET", path)
        rows = [{"uuid": made["uuid"], **row} for row in found["backends"]]
        return shown.table(SHORT, rows)

    def _wait(self, path: str, timeout: float) -> dict[str, Any]:
        from rich import console, progress

        end = time.monotonic() + timeout
        bar = progress.Progress(
            *progress.Progress.get_default_columns(),
            console=console.Console(stderr=True),
            transient=True,
        )
        with bar:
            task = bar.add_task("discovering", total=None)
            while True:
                found: dict[str, Any] = self.app.rest.call("GET", path)
                rows = found["backends"]
                done = sum(row["state"] != PENDING for row in rows)
                bar.update(task, completed=done, total=len(rows) or None)
                if found["state"] != PENDING:
                    return found
                if time.monotonic() > end:
                    raise Refused(f"{len(rows) - done} backends are silent after {timeout:g} s")
                time.sleep(0.2)
