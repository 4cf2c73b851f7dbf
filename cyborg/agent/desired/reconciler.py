# SPDX-License-Identifier: Apache-2.0
"""Reconciliation of this host's backends with their desired state, without interruption.

Lost messages are recovered by the next heartbeat, whose answer carries the desired generation.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oslo_context import context

from cyborg.agent.backends.backend import Backend, error_text
from cyborg.agent.backends.factory import DriverFactory
from cyborg.agent.backends.inventory import BackendRegistry
from cyborg.agent.jobs.checkpoint import BOOT_ID, read_boot_id
from cyborg.agent.state_file import StateFile
from cyborg.core import log, validation
from cyborg.core.drivers import desired_state
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.report import BackendState, BackendStatus
from cyborg.drivers.base import Driver
from cyborg.drivers.pci import managed
from cyborg.rpc.contract import ConductorAPI
from cyborg.threads.periodic import LoopThread

LOG = log.get_logger(__name__)


@dataclass(frozen=True)
class BackendFileContent:
    """The backends of a generation; ``setup_boot`` is the boot in which they were set up."""

    generation: int
    backends: dict[str, desired_state.BackendRecord]
    setup_boot: str | None


# A restarted agent starts the same backends even if it cannot reach a conductor.
class BackendFile:
    """The file of the desired backends, and its content in memory. Not thread-safe."""

    def __init__(self, path: Path, boot_id: str | Path = BOOT_ID) -> None:
        """Read the file; ``boot_id`` is the path of the file with the host's boot id.

        A malformed file is quarantined, with a warning, and treated as empty.
        """
        self._file = StateFile(
            path,
            _load_backends,
            description="The file of desired backends",
            consequence="backends follow the configuration file until the conductor is reached",
        )
        self.path = path
        self._boot_id = read_boot_id(boot_id)
        content = self._file.read() or BackendFileContent(
            generation=0, backends={}, setup_boot=None
        )
        self.generation = content.generation
        self.backends = content.backends
        # The boot of the file, not the present one: ``rebooted_since_setup`` compares both.
        self._setup_boot = content.setup_boot

    @property
    def rebooted_since_setup(self) -> bool:
        """Return whether the host has rebooted since its backends were set up."""
        return bool(self.backends) and self._setup_boot != self._boot_id

    def record_setup(self) -> None:
        """Record that all backends are set up in this boot; ``write`` persists it."""
        self._setup_boot = self._boot_id

    def write(self, generation: int, backends: Mapping[str, desired_state.BackendRecord]) -> None:
        """Store the backends of a generation in memory, then in the file. Raise OSError."""
        # After a reboot the file keeps the former boot, until ``record_setup`` is called: a
        # restarted agent must run the setup again. Otherwise all backends, also the first ones that
        # are written, were set up in this boot.
        if not self.rebooted_since_setup:
            self.record_setup()
        self.generation, self.backends = generation, dict(backends)
        body = {
            # A reboot undoes the setup of the backends.
            "boot_id": self._setup_boot,
            "generation": generation,
            "backends": [record.to_dict() for record in backends.values()],
        }
        self._file.write(body)


def _load_backends(data: Any) -> BackendFileContent:
    records = [desired_state.BackendRecord.from_dict(item) for item in data["backends"]]
    return BackendFileContent(
        generation=validation.integer(data["generation"]),
        backends={record.desired.backend: record for record in records},
        setup_boot=data.get("boot_id"),
    )


BUILD_ACTIONS = frozenset({desired_state.Action.START, desired_state.Action.REPLACE})
ReportOutcomes = Callable[[int, Sequence[desired_state.BackendOutcome]], None]


class Stopping(Exception):
    """The agent is stopping; raised to end a reconciliation."""


@dataclass(eq=False)
class BackendReconciler(LoopThread):
    """Thread that fetches the desired state, applies it and reports the outcomes.

    ``make_backend`` returns a backend that runs its driver's setup before it discovers.

    ``report`` queues the outcomes of a generation for the conductor; the reporter then calls
    ``acknowledge``. ``on_change`` is called after each change of the registry.
    """

    host: str
    epoch: str
    conductor: ConductorAPI
    registry: BackendRegistry
    state_file: BackendFile
    factory: DriverFactory
    make_backend: Callable[[Driver], Backend]
    report: ReportOutcomes
    on_change: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        super().__init__("reconciler", run_at_start=False)
        self._lock = threading.Lock()
        # The state file may be ahead of the conductor, so each incarnation reports again.
        self._reported_generation = 0
        # The generation being applied or already applied; notifications for it are ignored. At
        # generation 0 a host has no desired backends: without a state file it needs no round.
        self._target_generation: int | None = (
            None if self.state_file.generation or self.state_file.backends else 0
        )
        self._step_ended = threading.Event()  # a probe has ended, or the agent stops

    @property
    def reported_generation(self) -> int:
        """Return the generation last acknowledged by the conductor, 0 for none."""
        return self._reported_generation

    def request(self, generation: int, *, repeat: bool = False) -> int:
        """Request reconciliation to a generation; return the generation that was last reported.

        A generation that is applied or in progress is ignored. With ``repeat`` a generation that
        was already reported is reported again, because that report may have been lost.
        """
        with self._lock:
            is_reported = generation == self._reported_generation
            # The number is not kept: ``reconcile`` fetches the newest generation anyway.
            if generation != self._target_generation or (repeat and is_reported):
                self._wake.set()
        return self._reported_generation

    def acknowledge(self, generation: int, accepted: bool) -> None:
        """Record whether the conductor accepted the outcomes of a generation."""
        with self._lock:
            if accepted:
                self._reported_generation = generation
            elif self._target_generation == generation:
                self._target_generation = None

    def stop(self) -> None:
        """Request that no more backends are changed."""
        with self._lock:
            super().stop()
        self._step_ended.set()

    def run_once(self) -> None:
        """Reconcile once; if that fails, log the reason."""
        context.RequestContext()  # a request id for the lines and calls of this round
        try:
            self.reconcile()
        except Stopping:
            return
        except Exception as exc:
            # An error of the whole round: ``_execute`` returns those of single backends. Without a
            # target, the answer to the next heartbeat requests the generation again.
            with self._lock:
                self._target_generation = None
            LOG.debug("Reconciliation failed", exc_info=True)
            LOG.warning(
                "Cannot fetch desired state, retrying after the next heartbeat: %s",
                error_text(exc),
                host=self.host,
            )

    def reconcile(self) -> None:
        """Fetch the desired state, apply it and report the outcomes.

        Raise any exception of the call to the conductor, and Stopping.
        """
        desired = desired_state.load_host(
            self.conductor.get_desired_backends(self.host, self.epoch)
        )
        with self._lock:
            self._target_generation = desired.generation
        records = dict(self.state_file.backends)
        actions = desired_state.plan(records, desired, self.factory.configured_backends)
        # A driver may have been installed since the last scan, which takes too long for each
        # heartbeat.
        if any(planned.action in BUILD_ACTIONS for planned in actions):
            self.factory.rescan()
        for planned in actions:
            error = self._execute(planned)
            previous = records.pop(planned.backend, None)
            record = desired_state.next_record(planned, previous, error)
            if record is not None:
                records[planned.backend] = record
            if planned.action is not desired_state.Action.KEEP:
                # At once: an agent that is killed during the next action starts with this one done.
                # The former generation stays until all actions are done.
                self._save(self.state_file.generation, records)
        # After a reboot the backends run their setup again, which is recorded once all have.
        is_set_up = all(backend.setup_done for backend in self.registry)
        setup_recorded = self.state_file.rebooted_since_setup and is_set_up
        if setup_recorded:
            self.state_file.record_setup()
        # Forced, since only the boot may have changed, which is not compared.
        self._save(desired.generation, records, force=setup_recorded)
        outcomes = [
            desired_state.BackendOutcome(b.backend, b.generation, records[b.backend].error)
            for b in desired.backends
        ]
        self.report(desired.generation, outcomes)

    def _save(
        self,
        generation: int,
        records: dict[str, desired_state.BackendRecord],
        *,
        force: bool = False,
    ) -> None:
        """Write the state file if the records changed, or with ``force``."""
        if not force and (generation, records) == (
            self.state_file.generation,
            self.state_file.backends,
        ):
            return
        try:
            self.state_file.write(generation, records)
        except OSError as exc:
            LOG.warning(
                "Cannot persist desired state to %s; it will be fetched again after a restart: %s",
                self.state_file.path,
                exc,
            )

    def _execute(self, planned: desired_state.PlannedAction) -> str | None:
        """Execute an action; return None after success. After a failure return the error text.

        An action that failed has changed nothing.
        """
        if self._stopped.is_set():
            raise Stopping
        if planned.action is desired_state.Action.STOP:
            old = self.registry.remove(planned.backend)
            if old is not None:
                old.stop()
                self._notify_watchers()
            LOG.info("Backend removed", backend=planned.backend)
        if planned.action not in BUILD_ACTIONS:
            return None
        try:
            self.factory.check_code(planned.backend, planned.desired)
            if planned.desired is None:
                driver = self.factory.from_config(planned.backend)
            else:
                driver = self.factory.from_desired(planned.desired)
            # Make before break: the new backend is set up and discovers while the old one runs, and
            # replaces it only when it is READY. So there is nothing to undo after a failure.
            self._activate(self._probe(driver))
        except Stopping:
            raise
        except BaseException as exc:  # a driver may end with sys.exit()
            LOG.debug(
                "Backend action %s failed", planned.action, backend=planned.backend, exc_info=True
            )
            error = error_text(exc)[: desired_state.MAX_ERROR] or "no message"
            LOG.warning(
                "Backend action %s failed, previous backend stays active: %s",
                planned.action,
                error,
                backend=planned.backend,
            )
            return error
        LOG.info(
            "Backend action %s succeeded",
            planned.action,
            backend=planned.backend,
            driver=driver.name,
        )
        return None

    def _probe(self, driver: Driver) -> Backend:
        """Return a backend whose first discovery succeeded. Raise DriverFailed and Stopping."""
        backend = self.make_backend(driver)
        states: list[BackendState] = []  # of the first discovery, once it has ended
        previous = self.registry.get(backend.name)
        if previous is not None:
            # An unhealthy device must not become schedulable because its backend was replaced.
            backend.copy_health_from(previous)
        previous_driver = None if previous is None else previous.driver
        # An operator adopts those in ``forced`` although the host uses them.
        added, forced = managed.added_addresses(driver, previous_driver)
        if added and isinstance(driver, managed.AdoptionInterface):
            backend.set_precheck(partial(driver.check_adoption, added, forced))

        def on_done(state: BackendState) -> None:
            states.append(state)
            self._step_ended.set()

        self._step_ended.clear()
        # Before the start, so that the callback gets the first discovery.
        backend.rediscover(on_done)
        backend.start()
        # No timeout here: the watchdog of the backend calls on_done.
        while not states and not self._stopped.is_set():
            self._step_ended.wait()
        if states and states[0].status is BackendStatus.READY:
            return backend
        backend.stop()
        if not states:
            raise Stopping
        raise DriverFailed(states[0].error or f"backend {backend.name} is {states[0].status}")

    def _activate(self, backend: Backend) -> None:
        """Put a backend into the registry and stop the backend that it replaces. Raise Stopping."""
        with self._lock:
            # Under the lock of stop(): nothing would stop a backend that is added after it.
            stopped = self._stopped.is_set()
            old = None if stopped else self.registry.replace(backend)
        if stopped:
            backend.stop()
            raise Stopping
        if old is not None:
            old.stop()
        self._notify_watchers()

    def _notify_watchers(self) -> None:
        try:
            self.on_change()
        except Exception:
            # The change itself succeeded and is not undone.
            LOG.exception("Failed to notify watchers of a backend change")
