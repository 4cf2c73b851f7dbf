# SPDX-License-Identifier: Apache-2.0
"""Watch the compute node providers, and verify a host whose compute node was added or removed.

If an operator deletes a compute service, Nova deletes the compute node provider and its children,
which are the providers of Cyborg. Placement sends no events, and an unchanged provider is verified
only every ``placement_verify_interval``. So the compute nodes are listed more often: one call,
whose answer grows with the number of hosts, not of devices. Each conductor watches and keeps its
last list. If two conductors find the same change, both write the same values.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.clients.placement import Placement
from cyborg.core.errors import Invalid
from cyborg.core.hosts.identity import NO_IDENTITY, Identity
from cyborg.core.log import get_logger
from cyborg.core.placement import compute_nodes
from cyborg.core.placement.compute_nodes import ComputeNode
from cyborg.core.text import join_limited
from cyborg.db.providers import write as store
from cyborg.db.services import write as services
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

MAX_NAMED = 10  # hosts listed in one log line


class ComputeNodeWatch:
    """Watch of the list of compute nodes; ``run_once`` is the work of a periodic task."""

    def __init__(
        self,
        uow: UnitOfWork,
        placement: Placement,
        wake_publisher: Callable[[], None],
        *,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """``now`` returns naive UTC."""
        self._uow = uow
        self._placement = placement
        self._wake_publisher = wake_publisher
        self._now = now or uow.clock
        self._nodes: Mapping[str, ComputeNode] | None = None

    def run_once(self) -> int:
        """Schedule verification of hosts with a changed compute node; return their number.

        The first call only stores the list. Raise Unavailable if Placement is unavailable.
        """
        nodes = {
            node.uuid: ComputeNode(node.name, node.generation)
            for node in self._placement.compute_nodes()
        }
        if self._nodes is None:
            self._nodes = nodes
            return 0
        changed = compute_nodes.changed_nodes(self._nodes, nodes)
        hosts = (
            self._uow.run(lambda tx: self._schedule_verification(tx, changed)) if changed else []
        )
        # Set after the write, so that a change is found again if the write fails.
        self._nodes = nodes
        if hosts:
            LOG.info(
                "Compute nodes of %s hosts were added or removed in Placement, verifying their "
                "resource providers now: %s",
                len(hosts),
                join_limited(hosts, MAX_NAMED),
                host=hosts,
            )
            self._wake_publisher()
        return len(hosts)

    def _schedule_verification(
        self, tx: sa.Connection, changed: Mapping[str, ComputeNode]
    ) -> list[str]:
        hosts = store.hosts(tx)
        rows = services.identities(tx, hosts)
        found = compute_nodes.affected_hosts(
            changed, {h: _read_identity(rows.get(h)) for h in hosts}
        )
        store.schedule_verification_of_hosts(tx, found, self._now())
        return found


def _read_identity(row: Any) -> Identity:
    try:
        return Identity.from_dict(row) if isinstance(row, dict) else NO_IDENTITY
    except (Invalid, KeyError, TypeError, ValueError):
        return NO_IDENTITY  # of another release: the host name is sufficient
