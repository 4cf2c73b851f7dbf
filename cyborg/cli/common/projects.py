# SPDX-License-Identifier: Apache-2.0
"""Lookup of projects in keystone, with the caller's token."""

from urllib.parse import quote

from cyborg.cli.common.errors import CommandError
from cyborg.cli.common.rest import RestClient

SERVICE = "identity"


def find_project(rest: RestClient, text: str) -> str:
    """Return the id of the project with this id or name. Raise CommandError if there is none.

    The text is returned unchanged if the cloud has no keystone, or it does not show the projects to
    the caller: then the service decides.
    """
    from keystoneauth1 import exceptions

    try:
        keystone = rest.connect(SERVICE)[0]
        if keystone.endpoint_override:  # of --os-endpoint: that of the stand-alone service
            return text
        found = keystone.get(f"/projects/{quote(text, safe='')}", raise_exc=False)
        if found.status_code == 200:
            return text
        named = keystone.get(f"/projects?name={quote(text, safe='')}", raise_exc=False)
        if found.status_code != 404 or named.status_code != 200:
            return text
        ids = [str(project["id"]) for project in named.json()["projects"]]
    except (exceptions.ClientException, CommandError, ValueError, KeyError, TypeError):
        return text
    if len(ids) == 1:
        return ids[0]
    problem = f"{len(ids)} projects have the name {text!r}" if ids else f"no project {text!r}"
    raise CommandError(f"{problem} in keystone: give the id, as openstack project list shows it")
