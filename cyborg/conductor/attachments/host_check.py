# SPDX-License-Identifier: Apache-2.0
"""Ask Nova about a server, and compare its host with a device's, before anything is changed.

Nova and an agent may name one host differently, so Placement decides: its tree of resource
providers has one root for each compute node.
"""

from collections.abc import Callable
from typing import TypeVar

from cyborg.clients.placement import Placement
from cyborg.core.attachments.server import Server
from cyborg.core.errors import CyborgError, TimedOut, Unavailable
from cyborg.core.log import get_logger

LOG = get_logger(__name__)

TIMEOUT = 5.0
"""Seconds for a request to Placement: the caller waits, and the check can be omitted."""

T = TypeVar("T")


def ask_first(ask: Callable[[str], T], uuid: str) -> T:
    """Return the answer of Nova about a server. Raise Unavailable, but not TimedOut, and others."""
    try:
        return ask(uuid)
    except TimedOut as exc:
        # TimedOut would leave open whether the request of the caller has taken effect.
        raise Unavailable(f"{exc.message}; nothing was changed, retry later") from exc


def is_on_other_host(placement: Placement, provider: str, server: Server) -> bool:
    """Return whether a resource provider is below another compute node than a server.

    Return False if Placement does not answer, or does not have both providers yet. The step
    ``allocate`` checks this again in any case, since the server may move.
    """
    assert server.node is not None
    placement = placement.with_timeout(TIMEOUT)
    try:
        node, found = placement.find(server.node), placement.get(provider)
    except CyborgError as exc:
        LOG.info("Cannot compare hosts now, step allocate will compare them: %s", exc.message)
        return False
    if node is None or found is None or found.root_uuid is None:
        return False
    return found.root_uuid != (node.root_uuid or node.uuid)
