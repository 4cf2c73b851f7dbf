# SPDX-License-Identifier: Apache-2.0
"""Telling agents that something is wanted of their hosts; one that misses it asks by itself."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from oslo_log import log

from cyborg.core.errors import CyborgError

LOG = log.getLogger(__name__)

CALLS_AT_ONCE = 8

Nudge = tuple[str, int]
"""A host, and the revision of what is wanted of it."""


class Agents(Protocol):
    """What asks agents: ``cyborg.rpc.agent.AgentClient``."""

    def wanted(self, host: str, revision: int) -> Mapping[str, Any]:
        """Have a host be brought to what is wanted of it."""


class Nudger:
    """Calls agents beside the conductor's own work."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._stopped = threading.Event()

    def nudge(self, nudges: Sequence[Nudge]) -> None:
        """Begin to tell hosts of revisions, and return at once."""
        todo = deque(nudges)
        # Daemon threads, not a pool: a call to a dead agent must not keep the process from ending.
        for _ in range(min(CALLS_AT_ONCE, len(todo))):
            threading.Thread(target=self._call, args=(todo,), name="nudge", daemon=True).start()

    def stop(self) -> None:
        """Begin no more calls."""
        self._stopped.set()

    def _call(self, todo: deque[Nudge]) -> None:
        while not self._stopped.is_set():
            try:
                host, revision = todo.popleft()
            except IndexError:
                return
            try:
                self._agents.wanted(host=host, revision=revision)
            except CyborgError as bad:
                LOG.info("Host %s asks what is wanted of it with a hello: %s", host, bad.message)
            except Exception:
                LOG.exception("Nudging %s failed for a reason nobody foresaw", host)
