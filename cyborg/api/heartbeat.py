# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of the API to the conductor, so that the list of services shows it."""

from typing import Any
from uuid import NAMESPACE_DNS, uuid5

from oslo_config import cfg

from cyborg.api.health import Health
from cyborg.core import hosts as service
from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger
from cyborg.rpc.contract import ConductorAPI
from cyborg.threads.failures import RateLimitedLogger
from cyborg.threads.periodic import LoopThread

LOG = get_logger(__name__)

BINARY = service.API
STOP_TIMEOUT = 2.0  # seconds that stop() waits for a call in flight


class Heartbeat(LoopThread):
    """A thread that sends heartbeats to the conductor, at the interval that the conductor sets.

    All workers of one server are one service with one epoch, which is derived from ``server_id``,
    an identifier of one run of the server. A failure is logged once a minute and has no other
    effect.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        conductor: ConductorAPI,
        server_id: str,
        health: Health | None = None,
    ) -> None:
        super().__init__("heartbeat")
        self._conf = conf
        self._conductor = conductor
        self._epoch = str(uuid5(NAMESPACE_DNS, f"{conf.host}/{server_id}"))
        self._health = health
        self._failure_log = RateLimitedLogger(logger=LOG)

    def stop(self) -> None:
        """Stop the thread; abandon a call in progress after STOP_TIMEOUT seconds."""
        super().stop()
        self.join(STOP_TIMEOUT)

    def run_once(self) -> float:
        """Send one heartbeat; return the seconds until the next one."""
        from cyborg.api.versions import LATEST

        versions: dict[str, Any] = {"api": LATEST}
        error: str | None = None
        try:
            response = self._conductor.service_hello(BINARY, self._conf.host, self._epoch, versions)
        except CyborgError as exc:
            error = exc.message
        if error is not None:
            self._record_health(False)
            interval = float(self._conf.conductor.hello_interval)
            self._failure_log.warn(
                "Heartbeat to conductor failed, retrying in %g s: %s",
                interval,
                error,
                host=self._conf.host,
            )
            return interval
        self._record_health(True)
        self._failure_log.reset()
        return float(response["interval"])

    def _record_health(self, answered: bool) -> None:
        if self._health is not None:
            self._health.record_conductor(answered)
