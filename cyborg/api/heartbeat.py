# SPDX-License-Identifier: Apache-2.0
"""Saying that this API is alive, so that the listing of services shows it."""

import threading
import time
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

from oslo_config import cfg
from oslo_log import log

from cyborg.api.health import Health
from cyborg.core.errors import CyborgError
from cyborg.rpc.conductor import ConductorClient

LOG = log.getLogger(__name__)

BINARY = "cyborg-api"
_SAY_EVERY = 60.0


class Heartbeat:
    """A thread that says hello to the conductor, as often as that wishes.

    All workers of one server are one service: they say the same epoch, which ``life`` stands for,
    whatever names one run of the server. A broker that is away is told of once a minute and stops
    nothing else.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        conductor: ConductorClient,
        life: str,
        health: Health | None = None,
    ) -> None:
        self._conf = conf
        self._conductor = conductor
        self._epoch = str(uuid5(NAMESPACE_DNS, f"{conf.host}/{life}"))
        self._health = health
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._said = float("-inf")

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for a call in flight, which its timeout bounds."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def beat(self) -> float:
        """Say hello once; return the seconds until the next."""
        from cyborg.api.versions import LATEST

        versions: dict[str, Any] = {"api": LATEST}
        try:
            answer = self._conductor.service_hello(BINARY, self._conf.host, self._epoch, versions)
        except CyborgError as bad:
            self._heard(False)
            if time.monotonic() - self._said >= _SAY_EVERY:
                LOG.warning("No conductor hears that this API is alive: %s", bad.message)
                self._said = time.monotonic()
            return float(self._conf.conductor.hello_interval)
        self._heard(True)
        self._said = float("-inf")
        return float(answer["interval"])

    def _heard(self, answered: bool) -> None:
        if self._health is not None:
            self._health.heard(answered)

    def _run(self) -> None:
        while not self._stopped.wait(self.beat()):
            pass
