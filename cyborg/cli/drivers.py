# SPDX-License-Identifier: Apache-2.0
"""``cyborg driver-*``: which drivers the agents run, and how they do."""

import argparse
from typing import Any

from cliff import columns, lister, show

from cyborg.cli import shown
from cyborg.cli.rest import at

PATH = "/drivers"
FIELDS: shown.Columns = (
    ("Driver", "name"),
    ("UUID", "uuid"),
    ("Version", "version"),
    ("Hosts", "hosts"),
)


class Hosts(columns.FormattableColumn[Any]):
    """Where a driver runs: a line for each backend, with what is wrong with it."""

    def human_readable(self) -> str:
        """Return the lines."""
        return "\n".join(
            f"{h['host']} ({h['backend']}) {h['status']}"
            + ("" if h["state"] == "up" else f", agent {h['state']}")
            + (f": {h['error']}" if h["error"] else "")
            for h in self._value or ()
        )


class List(lister.Lister):
    """List the drivers that any agent has."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the filter."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--host", help="only what is on this host")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        rows = self.app.rest.rows(PATH, "drivers", host=args.host)
        return shown.table(FIELDS, [{**row, "hosts": Hosts(row["hosts"])} for row in rows])


class Show(show.ShowOne):
    """Show one driver."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the driver."""
        parser = super().get_parser(prog_name)
        parser.add_argument("driver", help="name or uuid of the driver")
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        row = self.app.rest.call("GET", at(PATH, args.driver))
        return shown.one(FIELDS, {**row, "hosts": Hosts(row["hosts"])})
