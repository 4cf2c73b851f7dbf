# SPDX-License-Identifier: Apache-2.0
"""Status of the servers with accelerators, fetched from Nova with the caller's token."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from cyborg.cli.common.errors import CommandError
from cyborg.cli.common.rest import RestClient

SERVICE = "compute"
MAX_CONCURRENT = 8  # requests to Nova
NOT_FOUND = "no such server"


def fetch_states(rest: RestClient, uuids: Collection[str]) -> dict[str, str]:
    """Return the status of each server, such as ``ACTIVE``, or ``no such server``.

    Nova decides which servers the caller can see. Raise CommandError if the cloud has no Nova or it
    does not respond.
    """
    from keystoneauth1 import exceptions

    if not uuids:
        return {}
    try:
        adapter, _ = rest.connect(SERVICE)

        def fetch(uuid: str) -> str:
            return _parse_status(adapter.get(f"/servers/{quote(uuid, safe='')}", raise_exc=False))

        unique = sorted(set(uuids))
        with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
            return dict(zip(unique, pool.map(fetch, unique), strict=True))
    except exceptions.ClientException as exc:
        raise CommandError(f"cannot get the status of servers from Nova: {exc}") from exc


def _parse_status(response: Any) -> str:
    if response.status_code == 404:
        return NOT_FOUND
    if response.status_code != 200:
        return f"unknown (HTTP {response.status_code})"
    try:
        return str(response.json()["server"]["status"])
    except (ValueError, KeyError, TypeError):
        return "unknown (unexpected response from Nova)"
