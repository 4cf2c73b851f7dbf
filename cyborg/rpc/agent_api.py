# SPDX-License-Identifier: Apache-2.0
"""The methods of agents in the contract of the internal bus."""

from collections.abc import Mapping
from typing import Any, Protocol


class AgentAPI(Protocol):
    """Calls to the agent of ``host``. Every method may raise TimedOut and Unavailable."""

    def discovery(
        self, host: str, driver: str | None = None, discovery_id: str | None = None
    ) -> dict[str, Any]:
        """Start a discovery of the backends of one driver, or of all; do not wait for its end.

        Return ``{"status": "IN-PROGRESS", "discovery_id": uuid}``. The agent reports the result
        with ``conductor.discovery_done``. Raise NotFound if the host has no such backend.
        """

    def hardware(self, host: str, driver: str | None = None) -> dict[str, Any]:
        """Return the hardware that the backends found last (``core.inventory.report``).

        Raise NotFound.
        """

    def sync_backends(self, host: str, generation: int) -> dict[str, Any]:
        """Start to sync the host to a generation of its desired state; do not wait for the end.

        Return ``{"generation": observed generation}``. The agent reports the outcomes with
        ``conductor.report_backend_outcomes``.
        """

    def find_driver(self, host: str, driver: str) -> dict[str, Any]:
        """Rescan the installed drivers of the host; return ``{"driver": entry or None}``.

        ``driver`` is a name or a uuid. The entry has the format of a report. Other new drivers are
        in the next report. Raise Invalid.
        """

    def job(
        self, host: str, job: str, kind: str, arguments: Mapping[str, Any], timeout: float
    ) -> dict[str, Any]:
        """Start a job (``core.jobs.job.JobSpec``), or query its state if it was started before.

        Return ``{"state": "running" | "done" | "failed", "error": str or None}``, and of a running
        job its ``activity`` (``core.jobs.progress``) if the agent knows it. Raise Invalid.
        """

    def count_free_ports(self, host: str, instance: str) -> dict[str, Any]:
        """Return how many devices can be plugged into the PCIe ports of a running guest.

        The answer is ``{"free": number}``. It is None if only an attach can tell: the guest does
        not run, has no PCIe, or the agent attaches nothing. Raise Invalid.
        """
