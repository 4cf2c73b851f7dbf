# SPDX-License-Identifier: Apache-2.0
"""Telling agents that something is wanted of their hosts; one that misses it asks by itself."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from oslo_log import log

from cyborg.conductor.calls import Calls
from cyborg.core.errors import CyborgError

LOG = log.getLogger(__name__)

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
        self._calls = Calls("nudge")

    def nudge(self, nudges: Sequence[Nudge]) -> None:
        """Begin to tell hosts of revisions, and return at once."""
        self._calls.begin(self._call, nudges)

    def stop(self) -> None:
        """Begin no more calls."""
        self._calls.stop()

    def _call(self, nudge: Nudge) -> None:
        host, revision = nudge
        try:
            self._agents.wanted(host=host, revision=revision)
        except CyborgError as bad:
            LOG.info("Host %s asks what is wanted of it with a hello: %s", host, bad.message)
        except Exception:
            LOG.exception("Nudging %s failed for a reason nobody foresaw", host)
