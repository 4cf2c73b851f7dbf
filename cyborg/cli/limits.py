# SPDX-License-Identifier: Apache-2.0
"""``cyborg limits-show``: the limits of a project and their usage."""

import argparse
from typing import Any

from cyborg.cli.common import formatting, listing
from cyborg.cli.common.base import field_argument
from cyborg.cli.common.collection import Collection
from cyborg.cli.common.projects import find_project
from cyborg.cli.common.watch import WATCH
from cyborg.core.arq.limits import UNLIMITED

COUNTED = {
    "accelerator_requests": "accelerator requests",
    "attachments": "attachments",
    "device_contexts": "device contexts",
}
COLUMNS = formatting.columns_of("resource_class=Resource, limit, used, bound")
LIMITS = Collection("/limits", COLUMNS, COLUMNS, nouns="limits")


class Show(listing.Lister, of=LIMITS):
    """Show the limits of a project and their usage, by resource class.

    The first rows have the numbers of accelerator requests, attachments and device contexts.
    """

    OPTIONS = (WATCH,)
    ARGUMENTS = (
        field_argument(
            "--project",
            to="project_id",
            lookup=find_project,
            help="id or name of the project, for administrators; by default that of the token",
        ),
    )

    def read_rows(self, args: argparse.Namespace) -> list[dict[str, Any]]:
        """Return the rows of the counted objects, and one for each resource class."""
        limits = self.app.rest.call("GET", LIMITS.path, params=self.read_fields(args))
        counted = [
            {"resource_class": name, "bound": None, **limits[key]} for key, name in COUNTED.items()
        ]
        return [{**row, "limit": _limit(row["limit"])} for row in (*counted, *limits["resources"])]


def _limit(limit: int) -> formatting.Text:
    return formatting.Text(limit, "unlimited" if limit == UNLIMITED else str(limit))
