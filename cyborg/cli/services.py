# SPDX-License-Identifier: Apache-2.0
"""``cyborg service-list``: the daemons of this service and whether they are alive."""

import argparse
from typing import Any

from cliff import columns, lister

from cyborg.cli import shown

PATH = "/services"
SHORT: shown.Columns = (
    ("Service", "binary"),
    ("Host", "host"),
    ("Kind", "kind"),
    ("Status", "status"),
    ("State", "state"),
    ("Last seen", "last_seen_at"),
    ("Down since", "down_since"),
    ("Backends", "backends"),
)


class Backends(columns.FormattableColumn[Any]):
    """The backends of an agent: a line for each, with what is wrong with it."""

    def human_readable(self) -> str:
        """Return the lines."""
        return "\n".join(
            f"{b['name']} ({b['driver']}) {b['status']}" + (f": {b['error']}" if b["error"] else "")
            for b in self._value or ()
        )


class List(lister.Lister):
    """List services: the daemons and, of an agent, its backends."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "--kind", choices=["daemon", "backend"], help="only these; both by default"
        )
        parser.add_argument("--host", help="only the services of this host")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        rows = self.app.rest.rows(PATH, "services", kind=args.kind, host=args.host)
        return shown.table(SHORT, [{**row, "backends": Backends(row["backends"])} for row in rows])
