# SPDX-License-Identifier: Apache-2.0
"""Check of the active partitions of this host's fabrics: whether an accelerator request has them.

A partition can stay active without a request, for example if the agent was killed, if a request to
Fabric Manager ended after its timeout, or if the database was restored from a backup. Only the
conductor knows the requests, so it decides; it also enqueues the job that deactivates the
partition. Here only partitions are named that this agent has activated itself: one of another
program closes the sets that overlap it, see ``drivers.gpu.fabric.partitions``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cyborg.agent.backends.backend import Backend, error_text
from cyborg.agent.backends.device_sets import read_activations
from cyborg.core import log
from cyborg.core.errors import CyborgError
from cyborg.core.inventory.activations import PartitionUse
from cyborg.core.inventory.device_set import Activation
from cyborg.drivers.device_sets.driver import DeviceSetDriver
from cyborg.rpc.contract import ConductorAPI
from cyborg.threads.failures import Backoff, RateLimitedLogger
from cyborg.threads.periodic import LoopThread

LOG = log.get_logger(__name__)

# Seconds between two checks. A restarted Fabric Manager has the same active partitions as before,
# and one that was away makes its source unhealthy, which wakes the check.
INTERVAL = 60.0
FIRST_RETRY, LAST_RETRY = 2.0, 60.0  # seconds


@dataclass(eq=False)
class PartitionCheck(LoopThread):
    """Thread that asks a conductor about active partitions: at the start, when woken, repeatedly.

    ``fabrics`` are the backends whose sets are partitions. ``epoch`` is that of the agent.
    """

    host: str
    epoch: str
    conductor: ConductorAPI
    fabrics: Sequence[Backend]

    def __post_init__(self) -> None:
        super().__init__("partition-check")
        self._backoff = Backoff(FIRST_RETRY, LAST_RETRY)
        self._log = RateLimitedLogger(logger=LOG)

    def run_once(self) -> float:
        """Check all fabrics; return the seconds until the next check."""
        try:
            for backend in self.fabrics:
                if isinstance(backend.driver, DeviceSetDriver):
                    self._check(backend, backend.driver)
        except (CyborgError, KeyError, TypeError, ValueError) as exc:
            # Such as a conductor that does not know this epoch before the first heartbeat.
            self._log.warn(
                "Cannot ask the conductor for the use of active partitions, retrying: %s",
                error_text(exc),
                host=self.host,
            )
            return self._backoff.next_delay()
        self._backoff.reset()
        self._log.recovered("Asking for the use of active partitions")
        return INTERVAL

    def _check(self, backend: Backend, driver: DeviceSetDriver) -> None:
        """Ask about the partitions of a fabric; rediscover it if its sets must change."""
        activations = read_activations(backend)
        if not activations:
            return  # the fabric is away: what is known of it stays
        own = sorted(a for a, activation in activations.items() if activation is Activation.OWN)
        uses = _ask(self.conductor, self.host, self.epoch, own) if own else {}
        if driver.set_overlapped({a for a, use in uses.items() if use is PartitionUse.OVERLAPPED}):
            backend.rediscover()


def make_check(
    host: str, epoch: str, conductor: ConductorAPI, backends: Iterable[Backend]
) -> PartitionCheck | None:
    """Return the check of the fabrics among these backends; None without a fabric.

    Only the configuration file has fabrics, so none is added while the agent runs.
    """
    fabrics = [
        backend
        for backend in backends
        if isinstance(backend.driver, DeviceSetDriver) and backend.driver.is_fabric
    ]
    return PartitionCheck(host, epoch, conductor, fabrics) if fabrics else None


def _ask(
    conductor: ConductorAPI, host: str, epoch: str, partitions: list[str]
) -> Mapping[str, PartitionUse | None]:
    """Return the use of each partition; the conductor has the unused ones deactivated."""
    answer = conductor.report_active_partitions(host, epoch, partitions)["uses"]
    uses = [None if use is None else PartitionUse(use) for use in answer]
    return dict(zip(partitions, uses, strict=True))
