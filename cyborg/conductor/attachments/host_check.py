# SPDX-License-Identifier: Apache-2.0
"""Compare the host of a resource provider with the host of a server, before an attachment exists.

Nova and an agent may name one host differently, so Placement decides: its tree of resource
providers has one root for each compute node.
"""

from cyborg.clients.placement import Placement
from cyborg.core.attachments.server import Server
from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger

LOG = get_logger(__name__)

TIMEOUT = 5.0
"""Seconds for a request to Placement: the caller waits, and the check can be omitted."""


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
