# SPDX-License-Identifier: Apache-2.0
"""One backend: a thread that discovers devices and measures their health, with a watchdog.

A driver that raises or exceeds its timeout puts only its own backend into ERROR. The devices keep
their last known state.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from cyborg.agent.backends.health import HealthTracker
from cyborg.core import log, naming
from cyborg.core.errors import CyborgError, DriverFailed
from cyborg.core.inventory.device import Ability, Device, HandleType
from cyborg.core.inventory.report import MAX_REMARKS, BackendState, BackendStatus
from cyborg.core.text import sanitize
from cyborg.drivers.base import Driver, PartitionInterface, SetupInterface
from cyborg.drivers.device_sets.driver import NOTHING_GROUPED, DeviceSetDriver, Grouped
from cyborg.threads.periodic import LoopThread

LOG = log.get_logger(__name__)

NO_LIVE_ATTACH = (
    "its handles have the type VFIO, which the agent attaches to guests, and not Nova: set "
    "[libvirt] live_attach = true on this host"
)
MAX_ERROR = 1000  # characters of a driver's error that are shown
StateCallback = Callable[[BackendState], None]


@dataclass(frozen=True, slots=True)
class BackendSnapshot:
    """State and devices of a backend at one point in time.

    ``has_discovered`` is set after the first successful discovery. A source of device sets has the
    names of its ``members``, and of these backends the devices that its last successful discovery
    has ``grouped``.
    """

    state: BackendState
    devices: tuple[Device, ...] = ()
    has_discovered: bool = False
    members: frozenset[str] = frozenset()
    grouped: Grouped = NOTHING_GROUPED


@dataclass(eq=False)
class Backend(LoopThread):
    """One configured driver. ``on_change`` is called, from any thread, after each new snapshot.

    Discover every ``interval`` seconds; ``timeout`` limits each step, in seconds.

    ``health_interval`` is the time in seconds between measurements, if the driver measures. An
    unhealthy device must be measured healthy for ``recovery_window`` seconds of ``clock``. With
    ``needs_setup``, the driver's setup (if the driver has one) runs before the first discovery.
    After ``cordon_after`` consecutive failures the state is cordoned; 0 disables this. Without
    ``live_attach``, no guest of the host gets a VFIO handle: devices that have one are not
    deliverable.
    """

    driver: Driver
    interval: float
    timeout: float
    on_change: Callable[[], None] = lambda: None
    _: KW_ONLY
    health_interval: float = 10.0
    recovery_window: float = 60.0
    needs_setup: bool = False
    cordon_after: int = 0
    live_attach: bool = True
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        super().__init__(f"backend-{self.driver.backend}")
        # A source of device sets has nothing to discover before its members have devices.
        self._awaits_members = isinstance(self.driver, DeviceSetDriver)
        if isinstance(self.driver, DeviceSetDriver):
            self.driver.rediscover = self.rediscover
        self.name = self.driver.backend
        self._health = HealthTracker(self.driver, self.recovery_window, self.clock)
        self._can_measure = False  # as of the last measurement
        self._pending_setup: SetupInterface | None = (
            self.driver if self.needs_setup and isinstance(self.driver, SetupInterface) else None
        )
        self._pending_check: Callable[[], None] | None = None
        self._remarks: tuple[str, ...] = ()
        self._failures = 0  # consecutive, of setup and discovery
        self._lock = threading.Lock()
        self._step_number = 0  # of the step that was started last
        self._step_running = False
        self._step_overdue = False  # it exceeded its timeout
        self._ended = False  # no step will start again
        self._next_callbacks: list[StateCallback] = []
        self._current_callbacks: list[StateCallback] = []
        self._discovered = BackendSnapshot(
            self._build_state(BackendStatus.DISCOVERING),
            members=self.driver.member_backends
            if isinstance(self.driver, DeviceSetDriver)
            else frozenset(),
        )
        self._snapshot = self._discovered

    @property
    def snapshot(self) -> BackendSnapshot:
        """Return the current snapshot."""
        return self._snapshot

    @property
    def setup_done(self) -> bool:
        """Return whether no setup is pending."""
        return self._pending_setup is None

    def copy_health_from(self, other: "Backend") -> None:
        """Copy the device health of the backend that this one replaces. Call before ``start``."""
        self._health.copy_from(other._health)

    def set_precheck(self, check: Callable[[], None]) -> None:
        """Set a check that must pass before the setup and the first discovery."""
        self._pending_check = check

    def rediscover(self, on_done: StateCallback = lambda _: None) -> None:
        """Request a discovery; call ``on_done`` with the state when it ends or times out.

        A discovery in progress does not count: it may have read the hardware too early. If the
        backend is stopped or its current step is overdue, ``on_done`` gets the current state.
        """
        self._awaits_members = False  # a source of device sets discovers from now on
        with self._lock:
            # No further discovery may come: a job that waits for its callback would never end.
            answers_now = self._step_overdue or self._ended
            if not answers_now:
                self._next_callbacks.append(on_done)
        if answers_now:
            on_done(self._snapshot.state)
        self._wake.set()

    def run_once(self) -> float:
        """Run the pending check and setup, and a discovery; return the seconds to the next one.

        A source of device sets is only measured until its first discovery is requested.
        """
        if self._awaits_members:
            self._run_with_watchdog("measuring health", self._measure)
            return self.interval
        # The check first: a setup would already change devices that must not be adopted.
        if self._pending_check is not None:
            self._run_with_watchdog("adoption check", self._run_check, discovers=True)
        if self._pending_check is None and self._pending_setup is not None:
            self._run_with_watchdog("setup", self._run_setup, discovers=True)
        ready = self._pending_check is None and self._pending_setup is None
        if ready and not self._stopped.is_set():
            self._run_with_watchdog("discovery", self._discover, discovers=True)
        return self.interval

    def on_end(self) -> None:
        """Call the callbacks of requested discoveries that will not run any more."""
        with self._lock:
            self._ended = True
            callbacks, self._next_callbacks = self._next_callbacks, []
        for callback in callbacks:
            callback(self._snapshot.state)

    def _wait(self, seconds: float | None) -> None:
        """Measure health until the next discovery is due or requested.

        ``seconds`` is not used: ``run_once`` always returns the interval.
        """
        end = time.monotonic() + self.interval  # not ``clock``: the event waits in real time
        while not self._wake.is_set() and (left := end - time.monotonic()) > 0:
            if not self._can_measure or left <= self.health_interval:
                # Nothing to measure before the next discovery, which measures too.
                self._wake.wait(left)
            elif not self._wake.wait(self.health_interval):
                self._run_with_watchdog("measuring health", self._measure)

    def _run_with_watchdog(
        self, step: str, func: Callable[[], BackendSnapshot | None], *, discovers: bool = False
    ) -> None:
        """Run a step and publish its snapshot, or an error once it exceeds the timeout.

        ``func`` raises no exception. If it returns no snapshot, the next step decides the backend's
        state. With ``discovers``, the callbacks of requested discoveries get the published state,
        and a timeout counts as a failed discovery.
        """
        with self._lock:
            self._step_number += 1
            self._step_running = True
            if discovers:
                self._current_callbacks, self._next_callbacks = self._next_callbacks, []
        # Python cannot interrupt a call that hangs. This thread waits for it and makes no other
        # call, so that a driver that hangs never uses more than one thread; the timer publishes the
        # error meanwhile.
        watchdog = threading.Timer(
            self.timeout, self._on_timeout, (self._step_number, step, discovers)
        )
        watchdog.daemon = True
        watchdog.start()
        snapshot = func()
        watchdog.cancel()
        if snapshot is not None:
            self._publish(self._step_number, snapshot, overdue=False)
            return
        with self._lock:
            self._step_running = self._step_overdue = False
            # The callbacks get the state after the next step.
            self._next_callbacks = self._current_callbacks + self._next_callbacks
            self._current_callbacks = []

    def _run_check(self) -> BackendSnapshot | None:
        """Run the pending check; return a snapshot only if it fails."""
        if self._pending_check is not None:
            try:
                self._pending_check()
            except BaseException as exc:  # a SystemExit is a failure too
                LOG.debug("Check of adopted devices failed", backend=self.name, exc_info=True)
                return replace(self._discovered, state=self._error_state(error_text(exc)))
        self._pending_check = None
        return None

    def _run_setup(self) -> BackendSnapshot | None:
        """Run the pending setup of the driver; return a snapshot only if it fails."""
        if self._pending_setup is not None:
            try:
                self._pending_setup.setup()
            except BaseException as exc:  # a SystemExit is a failure too
                LOG.debug("Driver setup failed", backend=self.name, exc_info=True)
                return replace(
                    self._discovered, state=self._failed_state(f"setup: {error_text(exc)}")
                )
        self._pending_setup = None
        return None

    def _discover(self) -> BackendSnapshot:
        """Discover, and return a snapshot of the result or of the error. Raise no exception."""
        try:
            devices, defects = _usable_devices(self.name, self.driver.discover())
            # Read once: a property may run code of the driver, and give another answer for each
            # device.
            abilities = frozenset(self.driver.abilities)
            devices = tuple(self._describe(device, abilities, defects) for device in devices)
        except BaseException as exc:  # a SystemExit is a failure too
            LOG.debug("Discovery failed", backend=self.name, exc_info=True)
            self._discovered = replace(self._discovered, state=self._failed_state(error_text(exc)))
        else:
            self._failures = 0
            error = "; ".join(defects)[:MAX_ERROR] or None
            self._update_remarks()
            self._discovered = replace(
                self._discovered,
                state=self._build_state(BackendStatus.READY, error),
                devices=devices,
                has_discovered=True,
                grouped=self.driver.grouped
                if isinstance(self.driver, DeviceSetDriver)
                else NOTHING_GROUPED,
            )
        # Measured before it is published: an unhealthy device must never be schedulable.
        return self._measure()

    def _describe(
        self, device: Device, abilities: frozenset[Ability], defects: list[str]
    ) -> Device:
        """Return a device with the abilities of its driver and its layouts.

        If the layouts cannot be read, add an error to ``defects`` and return the device without
        layouts.
        """
        plain = replace(device, abilities=abilities, layouts=(), layout=None)
        if not self.live_attach and plain.deliverable and _needs_live_attach(plain):
            plain = replace(plain, deliverable=False, undeliverable_reason=NO_LIVE_ATTACH)
        if Ability.PARTITIONS not in abilities or not isinstance(self.driver, PartitionInterface):
            return plain
        try:
            layouts = tuple(self.driver.layouts(device))
            current = next((layout.name for layout in layouts if layout.matches(device)), None)
            described = replace(plain, layouts=layouts, layout=current)
            defect = _find_defect(self.name, described)
        except Exception as exc:
            # Only this device goes without layouts: one card with a strange firmware is no reason
            # to lose the others.
            LOG.debug("Layouts cannot be read", backend=self.name, exc_info=True)
            defect = error_text(exc)
        if defect is None:
            return described
        defects.append(f"layouts of device {device.address}: {defect}")
        return plain

    def _measure(self) -> BackendSnapshot:
        """Return a snapshot of the last discovery with the current health of the devices."""
        state, devices = self._discovered.state, self._discovered.devices
        try:
            if not devices and isinstance(self.driver, DeviceSetDriver):
                # A restarted Fabric Manager waits a minute for the list of active partitions, which
                # the driver has before its first discovery.
                self.driver.answer_fabric()
            self._can_measure = self._health.update(devices)
        except BaseException as exc:  # a SystemExit is a failure too
            LOG.debug("Health measurement failed", backend=self.name, exc_info=True)
            errors = [*([state.error] if state.error else []), f"health: {error_text(exc)}"]
            state = replace(state, error="; ".join(errors)[:MAX_ERROR])
        return replace(self._discovered, state=state, devices=self._health.apply_to(devices))

    def _on_timeout(self, number: int, step: str, discovers: bool) -> None:
        """Publish an error for an overdue step. If the step returns later, publish its result."""
        error = f"{step} takes longer than {self.timeout:g} s"
        state = self._failed_state(error) if discovers else self._error_state(error)
        self._publish(number, replace(self._snapshot, state=state), overdue=True)

    def _failed_state(self, message: str) -> BackendState:
        """Count a failed setup or discovery; return the resulting state of the backend."""
        with self._lock:
            self._failures += 1
        return self._error_state(message)

    def _error_state(self, message: str) -> BackendState:
        cordoned = 0 < self.cordon_after <= self._failures
        if cordoned:
            # The same text for each later failure, so that it is not reported as a change.
            cause = f"cordoned after {self.cordon_after} failed discoveries"
            message = f"{message[: MAX_ERROR - len(cause) - 2]}; {cause}"
        return replace(
            self._build_state(BackendStatus.ERROR, message[:MAX_ERROR]), cordoned=cordoned
        )

    def _build_state(self, status: BackendStatus, error: str | None = None) -> BackendState:
        name, settings = self.driver.name, self.driver.settings
        return BackendState(self.name, name, status, error, self._remarks, settings)

    def _update_remarks(self) -> None:
        """Read the driver's warnings; log new warnings, and log once when no warning is left."""
        texts = [sanitize(str(remark))[:MAX_ERROR] for remark in self.driver.remarks]
        # A driver may give the same warning for each of its devices.
        remarks = tuple(dict.fromkeys(text for text in texts if text))[:MAX_REMARKS]
        for remark in remarks:
            if remark not in self._remarks:
                LOG.warning("Driver warns about its configuration: %s", remark, backend=self.name)
        if self._remarks and not remarks:
            LOG.info("Driver has no more warnings about its configuration", backend=self.name)
        self._remarks = remarks

    def _publish(self, number: int, snapshot: BackendSnapshot, *, overdue: bool) -> None:
        """Publish the snapshot of a step that has returned, or is overdue and still runs.

        Do nothing if the step with this number has already ended.
        """
        with self._lock:
            # The step has returned just before its timer, or the timer is that of an earlier step.
            if number != self._step_number or not self._step_running:
                return
            self._step_running = self._step_overdue = overdue
            callbacks, self._current_callbacks = self._current_callbacks, []
            if overdue:
                # No other step starts before this one returns, perhaps never: those who wait for
                # the next discovery get the error now, too.
                callbacks, self._next_callbacks = callbacks + self._next_callbacks, []
            previous, self._snapshot = self._snapshot, snapshot
        if snapshot != previous:
            LOG.log(
                logging.INFO if snapshot.state.error is None else logging.WARNING,
                "Backend is %s, %d devices%s",
                snapshot.state.status,
                len(snapshot.devices),
                f": {snapshot.state.error}" if snapshot.state.error else "",
                backend=self.name,
            )
            self.on_change()
        for callback in callbacks:
            callback(snapshot.state)


def _needs_live_attach(device: Device) -> bool:
    """Return whether only the agent attaches a handle of a device."""
    return any(
        handle.type is HandleType.VFIO
        for deployable in device.deployables
        for handle in deployable.handles
    )


def error_text(exc: BaseException) -> str:
    """Return the text of an exception that a driver raised, sanitised for display."""
    return sanitize(exc.message if isinstance(exc, CyborgError) else f"{type(exc).__name__}: {exc}")


def _usable_devices(backend: str, found: Sequence[Any]) -> tuple[tuple[Device, ...], list[str]]:
    """Return the valid devices, and one error text for each invalid device.

    One invalid device must not make the whole report of the host invalid. Raise DriverFailed for
    two valid devices of one address: nothing shows which of them is right.
    """
    devices: dict[str, Device] = {}
    defects: list[str] = []
    for device in found:
        if (defect := _find_defect(backend, device)) is not None:
            defects.append(defect)
        elif device.address in devices:
            raise DriverFailed(f"the driver reports the device {device.address} twice")
        else:
            devices[device.address] = device
    return tuple(devices.values()), defects


def _find_defect(backend: str, device: Any) -> str | None:
    """Return why a device of a driver cannot be reported, None if it can."""
    if not isinstance(device, Device):
        return f"the driver reports a {type(device).__name__} as a device"
    name = f"device {device.address}"
    if device.backend != backend:
        return f"{name} names backend {device.backend}, not {backend}"
    for deployable in device.deployables:
        if not naming.is_accelerator_class(deployable.resource_class):
            return (
                f"{name} has resource class {deployable.resource_class}, not an accelerator class"
            )
        if invalid := sorted(trait for trait in deployable.traits if not naming.is_trait(trait)):
            return f"{name} has trait {invalid[0]}, which Placement does not accept"
    try:
        # A value that JSON changes, such as a tuple, would differ from what the conductor stores:
        # the digest would never match, and each heartbeat would cost a report.
        if Device.from_dict(json.loads(json.dumps(device.to_dict()))) != device:
            return f"{name} changes when it is encoded and decoded"
    except (CyborgError, TypeError, ValueError, KeyError, AttributeError) as exc:
        return f"{name} cannot be encoded: {exc}"
    return None
