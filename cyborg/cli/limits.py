# SPDX-License-Identifier: Apache-2.0
"""``cyborg limits-show``: the limits of a project and their usage."""

from typing import Any
from urllib.parse import quote

from cyborg.cli.common import formatting, listing
from cyborg.cli.common.base import Arguments, field_argument
from cyborg.cli.common.listing import WATCH
from cyborg.cli.common.rest import Collection, CommandError, RestClient
from cyborg.core.binding.limits import UNLIMITED

COUNTED = ("accelerator_requests", "attachments", "device_contexts")
COLUMNS = formatting.columns_of("resource_class=Resource, limit, used, bound")
LIMITS = Collection("/limits", COLUMNS, COLUMNS, nouns="limits")
IDENTITY = "identity"


def find_project(rest: RestClient, text: str) -> str:
    """Return the id of the project with this id or name. Raise CommandError if there is none.

    The text is returned unchanged if the cloud has no keystone, or it does not show the projects to
    the caller: then the service decides.
    """
    from keystoneauth1 import exceptions

    try:
        keystone, _ = rest.connect(IDENTITY)
        if keystone.endpoint_override:  # of --os-endpoint: that of the stand-alone service
            return text
        # By id first: the name of one project can be the id of another.
        by_id = keystone.get(f"/projects/{quote(text, safe='')}", raise_exc=False)
        if by_id.status_code == 200:
            return text
        by_name = keystone.get(f"/projects?name={quote(text, safe='')}", raise_exc=False)
        # 403: keystone does not show the projects to the caller.
        if by_name.status_code != 200:
            return text
        ids = [str(project["id"]) for project in by_name.json()["projects"]]
        # A reader of a domain gets 403 for each id that is not in it, also if the text is a name.
        if not ids and by_id.status_code != 404:
            return text
    except (exceptions.ClientException, CommandError, ValueError, KeyError, TypeError):
        return text
    if len(ids) == 1:
        return ids[0]
    problem = f"{len(ids)} projects have the name {text!r}" if ids else f"no project {text!r}"
    raise CommandError(f"{problem} in keystone: give the id, as openstack project list shows it")


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

    def read_rows(self, args: Arguments) -> list[dict[str, Any]]:
        """Return the rows of the counted objects, and one for each resource class."""
        limits = self.app.rest.call("GET", LIMITS.path, params=self.read_fields(args))
        counted = [
            {"resource_class": key.replace("_", " "), "bound": None, **limits[key]}
            for key in COUNTED
        ]
        return [{**row, "limit": _limit(row["limit"])} for row in (*counted, *limits["resources"])]


def _limit(limit: int) -> formatting.Text:
    return formatting.Text(limit, "unlimited" if limit == UNLIMITED else str(limit))
