# SPDX-License-Identifier: Apache-2.0
"""How the servers are that have accelerators, as Nova tells whoever types the command."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from cyborg.cli.answers import Refused
from cyborg.cli.rest import Rest

SERVICE = "compute"
AT_ONCE = 8  # servers that are asked after
GONE = "no such server"


def states(rest: Rest, uuids: Collection[str]) -> dict[str, str]:
    """Return each server's status, such as ``ACTIVE``; ``no such server`` for one Nova has not.

    It is Nova that decides what the caller may see. Raises Refused when the cloud has no Nova or
    that does not answer.
    """
    from keystoneauth1 import exceptions

    if not uuids:
        return {}
    try:
        way, _ = rest.reach(SERVICE)

        def ask(uuid: str) -> str:
            return _state(way.get(f"/servers/{quote(uuid, safe='')}", raise_exc=False))

        wanted = sorted(set(uuids))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(wanted, pool.map(ask, wanted), strict=True))
    except exceptions.ClientException as away:
        raise Refused(f"Nova does not say how the servers are: {away}") from away


def _state(answer: Any) -> str:
    if answer.status_code == 404:
        return GONE
    if answer.status_code != 200:
        return f"unknown (HTTP {answer.status_code})"
    try:
        return str(answer.json()["server"]["status"])
    except (ValueError, KeyError, TypeError):
        return "unknown (no answer of Nova's)"
