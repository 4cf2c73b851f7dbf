# SPDX-License-Identifier: Apache-2.0
"""``cyborg discover-services``: tell agents to look at their hardware now."""

import argparse
from functools import partial
from typing import Any

from cliff import lister

from cyborg.cli import seconds, shown
from cyborg.cli.answers import at
from cyborg.cli.waiting import Progress, wait

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
            # Not --timeout: that is a global option, for one call.
            "--within",
            type=seconds.parse,
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
        found = self._wait(path, args.within) if args.wait else self.app.rest.call("GET", path)
        rows = [{"uuid": made["uuid"], **row} for row in found["backends"]]
        return shown.table(SHORT, rows)

    def _wait(self, path: str, within: float) -> dict[str, Any]:
        def look(found: dict[str, Any]) -> Progress:
            rows = found["backends"]
            done = sum(row["state"] != PENDING for row in rows)
            late = f"{len(rows) - done} backends are silent"
            return Progress(done, len(rows), late if found["state"] == PENDING else None)

        ask = partial(self.app.rest.call, "GET", path)
        return wait(ask, look, "discovering", within=within, pause=0.2)
