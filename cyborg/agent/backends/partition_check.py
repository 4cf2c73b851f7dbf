# SPDX-License-Identifier: Apache-2.0
"""Check of the active partitions of this host's fabrics: whether an accelerator request has them.

A partition can stay active without a request, for example if the agent was killed, if a request to
Fabric Manager ended after its timeout, or if the database was restored from a backup. Only the
conductor knows the requests, so it decides; it also enqueues the job that deactivates the
partition, if the agent finds it still active after the answer. Here only partitions are named that
this agent has activated itself: one of another program closes the sets that overlap it, see
``drivers.gpu.fabric.partitions``.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cyborg.agent.backends.backend import Backend, error_text
from cyborg.agent.backends.device_sets import read_activations
from cyborg.core import log
from cyborg.core.errors import CyborgError, Stale
from cyborg.core.inventory.activations import PartitionUse
from cyborg.core.inventory.device_set import Activation
from cyborg.drivers.device_sets.driver import DeviceSetDriver
from cyborg.rpc.contract import ConductorAPI
from cyborg.threads.failures import JITTER, Backoff, RateLimitedLogger
from cyborg.threads.periodic import LoopThread

LOG = log.get_logger(__name__)

# Seconds between two checks. A restarted Fabric Manager has the same active partitions as before,
# and one that was away makes its source unhealthy, which wakes the check.
INTERVAL = 60.0
# Seconds, at most, until a conductor is asked again about the same partitions that were all used.
# A restored database that knows the same devices asks for no report, which would come before.
SETTLED_INTERVAL = 600.0
FIRST_RETRY, LAST_RETRY = 2.0, 60.0  # seconds


class _Settled(NamedTuple):
    """Active partitions of a fabric that were all used, and until when that counts."""

    partitions: Sequence[str]
    until: float


@dataclass(eq=False)
class PartitionCheck(LoopThread):
    """Thread that asks a conductor about active partitions: at the start, when woken, repeatedly.

    ``fabrics`` are the backends whose sets are partitions. ``epoch`` is that of the agent.
    ``clock`` returns monotonic seconds. A conductor is asked only if the active partitions are
    other ones than those that it knew to be used, or after ``ask_again``: a host on which nothing
    happens costs it nothing.
    """

    host: str
    epoch: str
    conductor: ConductorAPI
    fabrics: Sequence[Backend]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        super().__init__("partition-check")
        self._backoff = Backoff(FIRST_RETRY, LAST_RETRY, jitter=True)
        self._log = RateLimitedLogger(logger=LOG)
        self._settled: dict[str, _Settled] = {}
        self._asks_again = threading.Event()

    def ask_again(self) -> None:
        """Ask about all active partitions now. Thread-safe."""
        self._asks_again.set()
        self.wake()

    def run_once(self) -> float:
        """Check all fabrics; return the seconds until the next check."""
        if self._asks_again.is_set():
            self._asks_again.clear()
            self._settled.clear()
        # Each one: the failure of one fabric must not leave the others unchecked.
        failures = [self._try_check(backend) for backend in self.fabrics]
        if not any(failures):
            self._backoff.reset()
            self._log.recovered("Asking for the use of active partitions")
            return INTERVAL
        return self._backoff.next_delay()

    def _try_check(self, backend: Backend) -> bool:
        """Check a fabric; return whether this failed."""
        try:
            if isinstance(backend.driver, DeviceSetDriver):
                self._check(backend, backend.driver)
        except Stale as exc:
            # No heartbeat of this agent has arrived yet, or another agent has replaced it.
            LOG.debug("The conductor does not know this agent: %s", exc.message)
        except (CyborgError, KeyError, TypeError, ValueError) as exc:
            self._log.warn(
                "Cannot ask the conductor for the use of active partitions, retrying: %s",
                error_text(exc),
                host=self.host,
                backend=backend.name,
            )
        else:
            return False
        return True

    def _check(self, backend: Backend, driver: DeviceSetDriver) -> None:
        """Ask about the partitions of a fabric; rediscover it if its sets must change."""
        own = _read_own(backend)
        if own is None:
            return  # the fabric is away: what is known of it stays
        now, settled = self.clock(), self._settled.pop(backend.name, None)
        if settled is not None and settled.partitions == own and now < settled.until:
            self._settled[backend.name] = settled
            return
        uses = self._ask(own) if own else {}
        unused = {a: use for a, use in uses.items() if use is not PartitionUse.USED}
        blocking = {a: use for a, use in unused.items() if use is not PartitionUse.UNUSED}
        if driver.set_unused(blocking):
            backend.rediscover()
        if not unused:
            until = now + SETTLED_INTERVAL * JITTER.uniform(0.5, 1.0)
            self._settled[backend.name] = _Settled(own, until)
            return
        # Read after the answer: a release job may have deactivated it just before.
        still_active = (unused.keys() - blocking).intersection(_read_own(backend) or [])
        if still_active:
            self.conductor.deactivate_partitions(self.host, self.epoch, sorted(still_active))

    def _ask(self, partitions: list[str]) -> Mapping[str, PartitionUse | None]:
        """Return the use of each partition."""
        answer = self.conductor.report_active_partitions(self.host, self.epoch, partitions)
        uses = [None if use is None else PartitionUse(use) for use in answer["uses"]]
        return dict(zip(partitions, uses, strict=True))


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


def _read_own(backend: Backend) -> list[str] | None:
    """Return the active partitions that this agent has activated; None if that is unknown."""
    activations = read_activations(backend)
    if not activations:
        return None
    return sorted(a for a, activation in activations.items() if activation is Activation.OWN)
