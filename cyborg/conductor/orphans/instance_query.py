# SPDX-License-Identifier: Apache-2.0
"""Query Nova whether instances exist, with limits on the number of queries and on time.

For a user who cannot list the servers of all projects, Nova answers 404 for a server of another
project. So a 404 proves that an instance does not exist only if the user can list all servers.
"""

import time
from collections.abc import Callable

from cyborg.clients.nova import Nova
from cyborg.core.audit.sources import Instance
from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger
from cyborg.core.orphans import orphans
from cyborg.core.orphans.orphans import Presence

LOG = get_logger(__name__)


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
        self._queries_left -= 1
        try:
            found = self._nova.get_server(instance)
            missing = orphans.classify_presence(found, None) is Presence.NOT_FOUND
            if missing and not self._can_see_all():
                self._unknown.add(instance)
            else:
                self._found[instance] = found
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
