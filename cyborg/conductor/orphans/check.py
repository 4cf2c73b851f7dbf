# SPDX-License-Identifier: Apache-2.0
"""Release orphaned ARQs of the providers of a bind that finds no free handle.

A server that is deleted while it is built leaves a bound ARQ behind. Placement can allocate the
unit of this ARQ to another server immediately, and the bind for that server then finds no free
handle. The bind does not wait for the orphan collector: it compares the owners of the handles with
the allocations of the provider. An ARQ is released if its instance has no allocation there and does
not exist in Nova. Placement and Nova must agree, because there is no grace period here: nothing is
released if Placement lost its allocations, or if the Nova user cannot see all projects.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.orphans.instance_query import InstanceQuery
from cyborg.conductor.orphans.release import OrphanReleaser, log_released
from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger
from cyborg.core.orphans import orphans
from cyborg.core.orphans.orphans import BoundArq, Presence
from cyborg.db.orphans import write as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

MAX_PROVIDERS = 8  # of one bind
MAX_OWNERS = 512  # of one provider
MAX_QUERIES = 32  # instances queried in Nova for one bind
MAX_SECONDS = 5.0  # after this time, a bind starts no further query
QUERY_SECONDS = 3.0  # timeout of one query
MAX_CHECKS = 4  # concurrent checks, so that a Placement that hangs does not block all binds


class OrphanCheck:
    """Check for orphaned ARQs at the providers of one bind, limited to a few seconds."""

    def __init__(
        self,
        uow: UnitOfWork,
        placement: Placement,
        nova: Nova,
        releaser: OrphanReleaser,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` returns monotonic seconds."""
        self._uow = uow
        self._placement = placement.with_timeout(QUERY_SECONDS)
        self._nova = nova.with_timeout(QUERY_SECONDS)
        self._releaser = releaser
        self._clock = clock
        self._slots = threading.BoundedSemaphore(MAX_CHECKS)

    def release_at(self, providers: Sequence[str]) -> bool:
        """Release the orphaned ARQs of these providers; return whether to retry the bind.

        Return True unless ``providers`` is empty, even if no orphan is found: another conductor or
        bind may have released orphans since the bind failed. If Placement or Nova is unavailable,
        nothing is released and nothing is raised.
        """
        if not providers:
            return False
        if self._slots.acquire(timeout=MAX_SECONDS):
            try:
                self._check(providers)
            finally:
                self._slots.release()
        return True

    def _check(self, providers: Sequence[str]) -> None:
        end = self._clock() + MAX_SECONDS
        query = InstanceQuery(self._nova, limit=MAX_QUERIES, seconds=MAX_SECONDS, clock=self._clock)
        for provider in providers[:MAX_PROVIDERS]:
            if self._clock() >= end:
                break
            orphan_arqs = [
                arq
                for arq in self._unallocated(provider)
                if query.get_presence(arq.instance, arq.hostname) is Presence.NOT_FOUND
            ]
            if orphan_arqs:
                log_released(self._releaser.release(orphan_arqs, keep=False), deleted=True)

    def _unallocated(self, provider: str) -> Iterable[BoundArq]:
        # The owners are read first: an allocation precedes its bind, so the answer of Placement
        # must have an allocation for each of them.
        rows = self._uow.run(lambda tx: store.bound_at_provider(tx, provider, MAX_OWNERS))
        error: str | None = None
        try:
            consumers = self._placement.allocations(provider)
        except CyborgError as exc:
            error = exc.message
        if error is not None:
            LOG.warning(
                "Cannot read allocations in Placement, releasing no orphan of this provider: %s",
                error,
                provider=provider,
            )
            return ()
        # A provider that does not exist in Placement proves nothing about its consumers.
        if consumers is None:
            return ()
        return orphans.without_allocation(map(BoundArq.from_row, rows), consumers)
