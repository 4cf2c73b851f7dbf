# SPDX-License-Identifier: Apache-2.0
"""Query Nova whether instances exist, with limits on the number of queries and on time.

For a user who cannot list the servers of all projects, Nova answers 404 for a server of another
project. So a 404 proves that an instance does not exist only if the user can list all servers.
"""

import time
from collections.abc import Callable

from cyborg.clients.nova import Nova
from cyborg.core.arq import orphans
from cyborg.core.arq.orphans import Presence
from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger

LOG = get_logger(__name__)


class InstanceQuery:
    """Cached queries to Nova about instances.

    It queries at most ``limit`` instances, and starts no query after ``seconds`` or after a failed
    query. For an instance that is not queried the answer is UNKNOWN.
    """

    def __init__(
        self,
        nova: Nova | None,
        *,
        limit: int,
        seconds: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``nova`` is None in an installation without Nova: all answers are UNKNOWN."""
        self._nova = nova
        self._queries_left = limit
        self._clock = clock
        self._end = clock() + seconds
        self._answers: dict[str, Presence] = {}
        self._sees_all: bool | None = None

    def get_presence(self, instance: str, hostname: str | None) -> Presence:
        """Return whether an instance exists in Nova, from the cache if it was queried before.

        ``hostname`` is the host of the device that is bound to the instance.
        """
        if instance not in self._answers:
            self._answers[instance] = self._query_nova(instance, hostname)
        return self._answers[instance]

    def _query_nova(self, instance: str, hostname: str | None) -> Presence:
        if self._nova is None or self._queries_left <= 0 or self._clock() >= self._end:
            return Presence.UNKNOWN
        self._queries_left -= 1
        try:
            answer = orphans.classify_presence(self._nova.get_server(instance), hostname)
            if answer is Presence.NOT_FOUND and not self._can_see_all():
                return Presence.UNKNOWN
        except CyborgError as exc:
            error = exc.message
        else:
            return answer
        self._queries_left = 0
        LOG.warning(
            "Cannot query an instance in Nova, its ARQs are checked again in the next scan: %s",
            error,
            instance=instance,
        )
        return Presence.UNKNOWN

    def _can_see_all(self) -> bool:
        if self._sees_all is None and self._nova is not None:
            self._sees_all = self._nova.lists_all_projects()
            if not self._sees_all:
                LOG.warning(
                    "The Nova user of [nova] cannot list the servers of all projects, so a 404 "
                    "does not prove that a server is deleted; no orphaned ARQ is released"
                )
        return bool(self._sees_all)
