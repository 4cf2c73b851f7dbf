# SPDX-License-Identifier: Apache-2.0
"""``cyborg service-list``: the daemons, whether they are alive, and what their backends offer."""

import argparse
from collections.abc import Mapping
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
    """The backends of an agent: a line for each, with what is wrong, and one for each function."""

    def human_readable(self) -> str:
        """Return the lines."""
        return "\n".join(line for backend in self._value or () for line in _lines(backend))


def _lines(backend: Mapping[str, Any]) -> list[str]:
    wrong = f": {backend['error']}" if backend["error"] else ""
    return [
        f"{backend['name']} ({backend['driver']}) {backend['status']}{wrong}",
        *(
            f"  {one['function']}: {one['used']} of {one['total']} used, {one['free']} free"
            for one in backend.get("functions") or ()
        ),
    ]


class List(lister.Lister):
    """List services: the daemons and, of an agent, its backends with the functions they offer."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "--kind", choices=["daemon", "backend"], help="only these; both by default"
        )
        parser.add_argument("--host", help="only the services of this host")
        parser.add_argument(
            "--function",
            help="only backends that offer this, such as crypto.ipsec, and what they have of it",
        )
        return parser

    def take_action(self, args: argparse.Namespace) -> Any:
        """Ask and show."""
        rows = self.app.rest.rows(
            PATH, "services", kind=args.kind, host=args.host, function=args.function
        )
        return shown.table(SHORT, [{**row, "backends": Backends(row["backends"])} for row in rows])
