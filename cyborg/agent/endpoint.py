# SPDX-License-Identifier: Apache-2.0
"""RPC endpoint of the agent: version 1.0 of the internal contract."""

import threading
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from cyborg.agent.backends.backend import Backend
from cyborg.agent.backends.device_sets import read_activations
from cyborg.agent.backends.inventory import collect
from cyborg.agent.jobs.checkpoint import MAX_PENDING
from cyborg.agent.jobs.queue import JobQueue
from cyborg.core.drivers.registry import DriverEntry
from cyborg.core.errors import Invalid, NotFound, Unavailable
from cyborg.core.inventory.device_set import Activation
from cyborg.core.inventory.report import BackendState, dump_answer
from cyborg.core.jobs.job import load_job_spec
from cyborg.core.validation import check_integer, parse_uuid


class AgentEndpoint:
    """RPC methods of the agent; ``driver`` is the name of a backend or of its driver."""

    def __init__(
        self,
        host: str,
        backends: Sequence[Backend],
        on_discovered: Callable[[str, BackendState], None],
        jobs: JobQueue,
        request_sync: Callable[[int], int],
        count_undelivered: Callable[[], int] = lambda: 0,
        find_driver: Callable[[str], DriverEntry | None] = lambda key: None,
        count_free_ports: Callable[[str], int | None] = lambda instance: None,
    ) -> None:
        """``on_discovered`` gets the outcome of each backend when a requested discovery ends.

        ``request_sync`` gets the desired generation and returns the last reported generation.
        ``count_undelivered`` returns the number of undelivered outcomes. ``find_driver`` scans for
        installed drivers and returns the entry of the driver with a name or uuid, or None.
        ``count_free_ports`` is that of ``GuestDevices``.
        """
        self._host = host
        self._backends = backends
        self._on_discovered = on_discovered
        self._jobs = jobs
        self._request_sync = request_sync
        self._count_undelivered = count_undelivered
        self._find_driver = find_driver
        self._count_free_ports = count_free_ports
        self._lock = threading.Lock()
        self._open_discoveries = 0  # backends with a requested discovery in progress

    def discovery(
        self, ctxt: Any, driver: str | None = None, discovery_id: str | None = None
    ) -> dict[str, str]:
        """Start a discovery of all backends, or of those of one driver; return its status and id.

        Raise Invalid, NotFound, and Unavailable if too many discoveries are open.
        """
        requested_id = None if discovery_id is None else parse_uuid(discovery_id, "discovery_id")
        # A new one only completes the answer: no outcome is reported under it.
        uuid = requested_id or str(uuid4())
        backends = self._select(driver)
        # Without an id the caller waits for no outcome, so that nothing is kept for the caller.
        if requested_id is not None:
            with self._lock:
                if self._open_discoveries + self._count_undelivered() + len(backends) > MAX_PENDING:
                    raise Unavailable(
                        f"the agent has {MAX_PENDING} open or undelivered discoveries, the "
                        "maximum; retry when some have ended"
                    )
                # Counted before they start, under the lock: concurrent calls must not exceed the
                # limit.
                self._open_discoveries += len(backends)
        # A discovery in progress does not count: it may have read the hardware before the change
        # that the caller has made.
        for backend in backends:
            backend.rediscover(self._outcome_callback(requested_id))
        return {"status": "IN-PROGRESS", "discovery_id": uuid}

    def hardware(self, ctxt: Any, driver: str | None = None) -> dict[str, Any]:
        """Return the devices and states of backends after their last discovery.

        Also return whether the partitions of a fabric are active now. Raise NotFound.
        """
        names = {backend.name for backend in self._select(driver)}
        # Of all backends: if two find the same device, ``collect`` gives it to the first one.
        inventory = collect([backend.snapshot for backend in self._backends])
        activations: dict[str, Activation] = {}
        for backend in self._backends:
            if backend.name in names:
                activations |= read_activations(backend)
        return dump_answer(
            [device for device in inventory.devices if device.backend in names],
            [state for state in inventory.states if state.name in names],
            activations,
        )

    def sync_backends(self, ctxt: Any, generation: int) -> dict[str, int]:
        """Request reconciliation to a generation without waiting for it. Raise Invalid."""
        return {"generation": self._request_sync(check_integer("generation", generation))}

    def find_driver(self, ctxt: Any, driver: str) -> dict[str, Any]:
        """Scan for installed drivers and return the driver with a name or uuid. Raise Invalid."""
        if not isinstance(driver, str):
            raise Invalid("driver must be a string", field="driver")
        entry = self._find_driver(driver)
        return {"driver": None if entry is None else entry.to_dict()}

    def job(self, ctxt: Any, job: str, kind: str, arguments: Any, timeout: float) -> dict[str, Any]:
        """Enqueue a job or return its status. Idempotent. Raise Invalid and Unavailable."""
        return self._jobs.start(load_job_spec(job, kind, arguments, timeout))

    def count_free_ports(self, ctxt: Any, instance: str) -> dict[str, Any]:
        """Return the number of PCIe ports for devices of a running guest. Raise Invalid."""
        return {"free": self._count_free_ports(parse_uuid(instance, "instance"))}

    def _outcome_callback(self, discovery_id: str | None) -> Callable[[BackendState], None]:
        if discovery_id is None:
            return lambda _: None

        def on_done(state: BackendState) -> None:
            self._on_discovered(discovery_id, state)
            with self._lock:
                self._open_discoveries -= 1

        return on_done

    def _select(self, driver: str | None) -> list[Backend]:
        """Return the backends with this name or driver, all for None. Raise NotFound."""
        selected = [b for b in self._backends if driver in (None, b.name, b.driver.name)]
        if driver is not None and not selected:
            names = sorted({b.name for b in self._backends})
            raise NotFound(
                f"host {self._host} has no backend or driver {str(driver)[:255]!r}; it has "
                f"{', '.join(names) or 'none'}",
                field="driver",
            )
        return selected
