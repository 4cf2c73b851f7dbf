# SPDX-License-Identifier: Apache-2.0
"""Query Nova about instances, and release the orphans that a bind finds in its way.

For a user who cannot list the servers of all projects, Nova answers 404 for a server of another
project. So a 404 proves that an instance does not exist only if the user can list all servers.

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
from cyborg.conductor.orphans.release import OrphanReleaser, log_released
from cyborg.core.errors import CyborgError
from cyborg.core.hosts import Instance
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


class InstanceQuery:
    """Cached queries to Nova about instances.

    It queries at most ``limit`` instances, and starts no query after ``seconds`` or after
    ``max_failures`` failed queries. For an instance that is not queried the answer is UNKNOWN.
    """

    def __init__(
        self,
        nova: Nova | None,
        *,
        limit: int,
        seconds: float = float("inf"),
        max_failures: int = 1,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[..., object] = LOG.warning,
        warn_forbidden: Callable[..., object] = LOG.warning,
    ) -> None:
        """``nova`` is None in an installation without Nova: all answers are UNKNOWN.

        ``warn`` logs a failed query, ``warn_forbidden`` that Nova hides servers from the user; both
        take the arguments of a logger.
        """
        self._nova = nova
        self._queries_left = limit
        self._failures_left = max_failures
        self._clock = clock
        self._warn = warn
        self._warn_forbidden = warn_forbidden
        self._end = clock() + seconds
        # By instance, not by bind: an instance can have ARQs on several hosts.
        self._found: dict[str, Instance | None] = {}
        self._unknown: set[str] = set()
        self._not_queried: set[str] = set()
        self._sees_all: bool | None = None

    def get_presence(self, instance: str, hostname: str | None) -> Presence:
        """Return whether an instance exists in Nova, from the cache if it was queried before.

        ``hostname`` is the host of the device that is bound to the instance.
        """
        if instance not in self._found and instance not in self._unknown:
            self._query_nova(instance)
        if instance in self._unknown:
            return Presence.UNKNOWN
        return orphans.classify_presence(self._found[instance], hostname)

    def was_skipped(self, instance: str) -> bool:
        """Return whether an instance is unknown because a limit prevented its query."""
        return instance in self._not_queried

    def _query_nova(self, instance: str) -> None:
        """Record the answer of Nova about an instance, or that it is unknown."""
        if (
            self._nova is None
            or self._queries_left <= 0
            or self._failures_left <= 0
            or self._clock() >= self._end
        ):
            self._not_queried.add(instance)
            self._unknown.add(instance)
            return
        # Before the query: one that fails has cost its time, too.
        self._queries_left -= 1
        try:
            server = self._nova.get_server(instance)
            # A user who cannot list all projects gets 404 for servers that exist.
            missing = orphans.classify_presence(server, None) is Presence.NOT_FOUND
            if missing and not self._can_see_all():
                self._unknown.add(instance)
            else:
                self._found[instance] = server
            return
        except CyborgError as exc:
            error = exc.message
        self._failures_left -= 1
        self._unknown.add(instance)
        self._warn(
            "Cannot query an instance in Nova, its ARQs are checked again later: %s",
            error,
            instance=instance,
        )

    def _can_see_all(self) -> bool:
        if self._sees_all is None and self._nova is not None:
            self._sees_all = self._nova.lists_all_projects()
            if not self._sees_all:
                self._warn_forbidden(
                    "The Nova user of [nova] cannot list the servers of all projects, so a 404 "
                    "does not prove that a server is deleted; no orphaned ARQ is released"
                )
        return bool(self._sees_all)


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
