# SPDX-License-Identifier: Apache-2.0
"""The agents as the conductor sees them. Every method may raise TimedOut and Unavailable."""

from collections.abc import Mapping
from typing import Any, cast

from oslo_config import cfg

from cyborg.rpc.client import Client
from cyborg.rpc.contract import AGENT
from cyborg.rpc.transport import Transport


class AgentClient:
    """Calls the agent of one host."""

    def __init__(self, transport: Transport, conf: cfg.ConfigOpts) -> None:
        self._client = Client(AGENT, transport, conf)

    def discovery(
        self, host: str, driver: str | None = None, discovery_id: str | None = None
    ) -> dict[str, Any]:
        """Have backends look again, those of one driver or all; the answer comes at once.

        ``{"status": "IN-PROGRESS", "discovery_id": uuid}``; how it ended, the agent tells by
        ``conductor.discovery_done``. Raises NotFound when the host has no such backend.
        """
        answer = self._client.call("discovery", host, driver=driver, discovery_id=discovery_id)
        return cast(dict[str, Any], answer)

    def hardware(self, host: str, driver: str | None = None) -> dict[str, Any]:
        """Return what the backends saw last (``core.hardware.answer``). Raises NotFound."""
        return cast(dict[str, Any], self._client.call("hardware", host, driver=driver))

    def wanted(self, host: str, revision: int) -> dict[str, Any]:
        """Have the host brought to what is wanted of it; ``{"revision": what it has come to}``.

        The answer comes at once; how it ended, the agent tells by ``conductor.backends_applied``.
        """
        return cast(dict[str, Any], self._client.call("wanted", host, revision=revision))

    def job(
        self, host: str, job: str, kind: str, arguments: Mapping[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Have a job begun (``core.job.Work``), or hear how it is; asking twice does it once.

        ``{"state": "running" | "done" | "failed", "error": str or None}``. Raises Invalid.
        """
        answer = self._client.call(
            "job", host, job=job, kind=kind, arguments=arguments, seconds=seconds
        )
        return cast(dict[str, Any], answer)
