# SPDX-License-Identifier: Apache-2.0
"""Notifications to agents about a new generation of the desired state of their hosts.

A notification may be lost: an agent also learns the generation from the answer to its heartbeat.
"""

import threading
from collections.abc import Sequence

from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger
from cyborg.rpc.contract import AgentAPI
from cyborg.threads.calls import FanOut

LOG = get_logger(__name__)

HostGeneration = tuple[str, int]
"""A host and the generation of its desired state."""


class GenerationNotifier:
    """Sender of generations to agents, in its own threads."""

    def __init__(self, agents: AgentAPI) -> None:
        self._agents = agents
        self._calls = FanOut("nudge")
        self._lock = threading.Lock()
        # One generation a host: the queue for agents that do not answer must not grow.
        self._pending: dict[str, int] = {}

    def notify(self, host_generations: Sequence[HostGeneration]) -> None:
        """Start to notify hosts of generations; do not wait."""
        with self._lock:
            new = (host for host, _ in host_generations if host not in self._pending)
            hosts = list(dict.fromkeys(new))
            self._pending.update(host_generations)
        self._calls.submit(self._notify_host, hosts)

    def stop(self) -> None:
        """Start no more calls."""
        self._calls.stop()

    def _notify_host(self, host: str) -> None:
        with self._lock:
            generation = self._pending.pop(host)
        try:
            self._agents.sync_backends(host=host, generation=generation)
        except CyborgError as exc:
            LOG.info(
                "Cannot notify agent, it will sync with its next heartbeat: %s",
                exc.message,
                host=host,
            )
        except Exception:
            LOG.exception("Unexpected error while notifying an agent", host=host)
