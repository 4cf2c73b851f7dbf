# SPDX-License-Identifier: Apache-2.0
"""The guests of this host: give running guests their devices again, with the checks before it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oslo_config import cfg

from cyborg.agent.backends.backend import Backend
from cyborg.agent.guests.devices import Check, GuestDevice, GuestDevices
from cyborg.agent.guests.function_users import FunctionUsers, RecordFile
from cyborg.agent.guests.hypervisor import LibvirtDomains, LibvirtHypervisor, find_library
from cyborg.core import errors, log, naming
from cyborg.core.address import PciAddress
from cyborg.core.attachments.delivery import (
    MAX_DELIVERIES,
    DeliveryRecord,
    Outcome,
    RecordedDelivery,
)
from cyborg.core.inventory.device import AttachHandle, Deployable, HandleType
from cyborg.core.inventory.functions import FunctionOwner
from cyborg.core.inventory.report import BackendStatus
from cyborg.core.jobs.job import parse_guest_arq
from cyborg.core.validation import parse_uuid
from cyborg.drivers.base import RecreateInterface, UseInterface
from cyborg.rpc.contract import ConductorAPI
from cyborg.threads import failures, periodic

LOG = log.get_logger(__name__)


# Bytes of the configuration space of conventional PCI; that of PCIe is 4096 (``PCI_CFG_SPACE_SIZE``
# and ``PCI_CFG_SPACE_EXP_SIZE`` of Linux, ``include/uapi/linux/pci_regs.h``).
CONVENTIONAL_SIZE = 256
# Types of handles that are PCI functions of the host.
_FUNCTIONS = frozenset({HandleType.PCI, HandleType.VFIO})


@dataclass(frozen=True, slots=True)
class HostHandles:
    """The handles that the backends of this host have discovered."""

    host: str
    backends: Sequence[Backend]

    def is_known(self, arq: Mapping[str, Any]) -> bool:
        """Return whether a backend has the handle of an ARQ."""
        expected = (arq["attach_handle_type"], dict(arq["attach_handle_info"]))
        # The info of a mediated device is that of its parent; its uuid identifies it.
        uuid = arq["attach_handle_uuid"]
        return any(
            expected == (handle.type, dict(handle.info))
            and (
                handle.type is not HandleType.MDEV
                or uuid == naming.handle_uuid(self.host, deployable.address, handle.address)
            )
            for backend in self.backends
            for deployable, handle in _handles(backend)
        )

    def make_ready(self, arq: Mapping[str, Any]) -> None:
        """Raise DriverFailed unless the device of an ARQ can be attached to its server now.

        Create a prepared device again that another program removed while the server was stopped.
        """
        type_, info = arq["attach_handle_type"], dict(arq["attach_handle_info"])
        for backend in self.backends:
            driver = backend.driver
            for _, handle in _handles(backend):
                if dict(handle.info) != info:
                    continue
                # Not of other types: for example a mediated device exists only for its server.
                if type_ == HandleType.PCI and isinstance(driver, UseInterface):
                    driver.check_unused(handle.address)
                elif type_ == HandleType.VFIO and isinstance(driver, RecreateInterface):
                    driver.recreate(handle.address)

    def needs_port(self, arq: Mapping[str, Any]) -> bool:
        """Return whether a guest with PCIe ports needs a free one for the device of an ARQ.

        libvirt plugs a conventional PCI device into a conventional bridge. As libvirt does without
        privileges, decide by the size of the configuration space: that of PCIe is larger.
        """
        info = dict(arq["attach_handle_info"])
        for backend in self.backends:
            for _, handle in _handles(backend):
                if handle.type in _FUNCTIONS and dict(handle.info) == info:
                    devices = backend.driver.sysfs_root / "bus/pci/devices"
                    try:
                        size = (devices / handle.address / "config").stat().st_size
                    except OSError:
                        return True  # libvirt too takes it for PCIe then
                    return size != CONVENTIONAL_SIZE
        return True

    def is_pending(self) -> bool:
        """Return whether a backend may discover further devices soon."""
        # After a start of the agent, no backend has devices before its first discovery has ended.
        return any(b.snapshot.state.status != BackendStatus.READY for b in self.backends)


def _handles(backend: Backend) -> Iterator[tuple[Deployable, AttachHandle]]:
    """Yield the handles that a backend has discovered, each with its deployable."""
    for device in backend.snapshot.devices:
        for deployable in device.deployables:
            for handle in deployable.handles:
                yield deployable, handle


FIRST_RETRY = 2.0  # seconds until the next check if a guest lacks a device, doubled each time


@dataclass(eq=False)
class Reasserter(periodic.LoopThread):
    """Thread that compares the running guests with the devices that they must have.

    ``watch`` makes sure that starts of guests are noticed; ``interval`` is in seconds, and so is
    ``attach_timeout``, after which a device that a running guest lacks is reported as an error.
    """

    host: str
    epoch: str
    conductor: ConductorAPI
    guests: GuestDevices
    watch: Callable[[], None]
    interval: float
    attach_timeout: float = 60.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        super().__init__("reasserter")
        self._backoff = failures.Backoff(min(FIRST_RETRY, self.interval), self.interval)
        self._log = failures.RateLimitedLogger(self.clock, LOG)
        self._deliveries = DeliveryRecord(self.attach_timeout)
        self._awaits_host = False

    def notice_start(self) -> None:
        """Check the guests now, and again soon if a guest lacks a device. Thread-safe."""
        # A guest that has just started gets its devices at once, whatever failed for others before.
        self._backoff.reset()
        self.wake()

    def notice_job(self) -> None:
        """Check the guests now if one waits for host work, of which some has ended. Thread-safe."""
        if self._awaits_host:
            self.notice_start()

    def run_once(self) -> float:
        """Check all guests; return the seconds until the next check."""
        is_complete = False
        try:
            # First, so that a start during the check is not missed.
            self.watch()
            answer = self.conductor.get_guest_devices(self.host, self.epoch)
            devices = load_devices(answer)
            # A malformed device was left out, and its guest may still lack it.
            has_all = len(devices) == len(answer["devices"])
            is_complete = self._check(devices) and has_all
            if self._log.reset():
                LOG.info("Checking the devices of guests works again")
        except errors.Stale as exc:
            # No heartbeat of this agent has arrived yet, or another agent has replaced it.
            LOG.debug("The conductor does not know this agent: %s", exc.message)
        except errors.CyborgError as exc:
            self._log.warn("Cannot check the devices of guests, retrying: %s", exc.message)
        except (KeyError, TypeError, ValueError) as exc:
            self._log.warn(
                "Cannot check the devices of guests, retrying: malformed answer of the conductor: "
                "%s %s",
                type(exc).__name__,
                exc,
            )
        if is_complete:
            self._backoff.reset()
            return self.interval
        delay = self._backoff.next_delay()
        # Until a device has been missing for the attach timeout: then this must be reported.
        until_report = self._deliveries.next_deadline(self.clock())
        return delay if until_report is None else min(delay, until_report)

    def _check(self, devices: Sequence[GuestDevice]) -> bool:
        """Attach what running guests lack, and report it; return whether no guest lacks a device.

        Raise the errors of the hypervisor and of the conductor.
        """
        # Read by ``notice_job``: the end of a job on this host may make a device ready.
        self._awaits_host = not all(device.ready for device in devices)
        failure: errors.CyborgError | None = None
        try:
            check = self.guests.reassert(devices)
        except errors.CyborgError as exc:
            failure = exc
            # Reported first, then raised: a device may be missing for the attach timeout by now.
            unknown = Outcome(is_attached=None, error=exc.message)
            check = Check(
                is_complete=False, outcomes={device.arq["uuid"]: unknown for device in devices}
            )
        recorded = {
            device.arq["uuid"]: RecordedDelivery(device.attached, device.error)
            for device in devices
        }
        changes = self._deliveries.update(recorded, check.outcomes, self.clock())
        for begin in range(0, len(changes), MAX_DELIVERIES):
            body = [delivery.to_dict() for delivery in changes[begin : begin + MAX_DELIVERIES]]
            self.conductor.report_guest_devices(self.host, self.epoch, body)
        self._deliveries.confirm()
        if failure is not None:
            raise failure
        return check.is_complete


def load_devices(answer: Any) -> list[GuestDevice]:
    """Parse the answer of the conductor; skip malformed devices. Raise KeyError, TypeError."""
    devices: list[GuestDevice] = []
    for item in answer["devices"]:
        try:
            instance, ready = parse_uuid(item["instance"], "instance"), item["ready"] is True
            error = item.get("error")
            device = GuestDevice(
                instance,
                parse_guest_arq(item["arq"]),
                ready,
                attached=item.get("attached") is True,
                error=None if error is None else str(error),
            )
            devices.append(device)
        except (errors.Invalid, KeyError, TypeError) as exc:
            # The guests get their other devices nevertheless.
            LOG.warning("Malformed device of a guest: %s %s", type(exc).__name__, exc)
    return devices


def is_owner(host: str, conductor: ConductorAPI, instance: str, arq: Mapping[str, Any]) -> bool:
    """Return whether an ARQ of a server still owns the PCI function of an ARQ.

    A mediated device exists for its owner only: True. Raise Invalid for an info without the address
    of a PCI function, and the errors of the conductor.
    """
    if arq["attach_handle_type"] not in _FUNCTIONS:
        return True
    address = PciAddress.parse_attach_info(arq["attach_handle_info"])
    question = {"instance": instance, "address": str(address)}
    answer = conductor.find_function_owners(host, [question])
    return list(answer["owners"]) == [FunctionOwner.INSTANCE]


@dataclass(frozen=True, slots=True)
class LiveGuests:
    """The running guests of this host; ``reasserter`` is started and stopped by its owner."""

    hypervisor: LibvirtHypervisor
    devices: GuestDevices
    reasserter: Reasserter


def make_guests(
    conf: cfg.ConfigOpts, epoch: str, conductor: ConductorAPI, backends: Sequence[Backend]
) -> LiveGuests | None:
    """Return the objects for running guests, None if live attach is disabled. Raise Misconfigured.

    A guest gets only devices of these backends. An agent that replays another host has no guests.
    """
    options = conf.libvirt
    # The guests of this machine do not belong to the replayed host.
    if not options.live_attach or conf.agent.replay:
        return None
    # Opened at the first use, so that an agent starts without libvirt.
    hypervisor = LibvirtHypervisor(
        options.connection_uri,
        options.request_timeout,
        lambda: reasserter.notice_start(),  # noqa: PLW0108  it is created below
    )
    handles = HostHandles(conf.host, backends)
    devices = GuestDevices(
        hypervisor,
        options.detach_timeout,
        is_known=handles.is_known,
        is_pending=handles.is_pending,
        make_ready=handles.make_ready,
        needs_port=handles.needs_port,
        is_owner=partial(is_owner, conf.host, conductor),
    )
    reasserter = Reasserter(
        conf.host,
        epoch,
        conductor,
        devices,
        hypervisor.watch,
        options.reassert_interval,
        options.attach_timeout,
    )
    return LiveGuests(hypervisor, devices, reasserter)


def make_function_users(
    conf: cfg.ConfigOpts, conductor: ConductorAPI, path: Path, rediscover: Callable[[], object]
) -> FunctionUsers | None:
    """Return the reader of the devices of guests; None if they are not read.

    ``path`` is the file with what is known of them. ``rediscover`` starts a discovery of all
    backends.
    """
    options = conf.libvirt
    library = find_library() if options.read_domains else None
    if library is None:
        return None
    domains = LibvirtDomains(options.connection_uri, library)
    return FunctionUsers(conf.host, conductor, domains.read, RecordFile(path), rediscover)
