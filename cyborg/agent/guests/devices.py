# SPDX-License-Identifier: Apache-2.0
"""Attach devices to running guests, and detach them. Both operations are idempotent."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cyborg import os_acc
from cyborg.agent.guests.hypervisor import DeviceAbsent, Domain, GuestBusy, Hypervisor
from cyborg.agent.guests.root_ports import check_free_ports, count_free_ports
from cyborg.core.attachments.delivery import STOPPED, Outcome
from cyborg.core.errors import CyborgError, DriverFailed, NotFound, Unavailable, WrongState
from cyborg.core.log import get_logger

LOG = get_logger(__name__)

Arq = Mapping[str, Any]

RETRY_INTERVAL = 1.0  # seconds between two attempts to attach while the host is not ready
POLL_INTERVAL = 0.5  # seconds between two looks at a device that the guest must release
MAX_WITHDRAWN = 10_000  # ARQs whose devices were taken back that are remembered


class _Removal(NamedTuple):
    """A request to remove the device of an ARQ: from the running guest, or from its definition."""

    arq: str
    from_running: bool


class NotRunning(WrongState):
    """The guest does not run on this host."""


@dataclass(frozen=True, slots=True)
class GuestDevice:
    """A device that a running guest must have; not ``ready`` while the host prepares it.

    ``attached`` and ``error`` are what the conductor has recorded of the guest.
    """

    instance: str
    arq: Arq
    ready: bool
    attached: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a check of all guests.

    ``is_complete`` is whether no guest lacks a device and none is being prepared. ``outcomes`` has
    no device that was detached.
    """

    is_complete: bool
    outcomes: Mapping[str, Outcome]


@dataclass(eq=False)
class GuestDevices:
    """Devices of the running guests of this host. Thread-safe.

    ``detach_timeout`` is the time for one request to a guest, in seconds.

    ``is_known`` is whether a backend of this host has the device of an ARQ; ``is_pending`` is
    whether a backend may discover further devices soon. ``make_ready`` raises DriverFailed
    unless the device of an ARQ can be attached now, for example if the host uses it.
    ``needs_port`` is whether the device of an ARQ needs a free PCIe port of a guest that has such
    ports. ``is_owner`` is whether an ARQ of a server still owns the device.
    """

    hypervisor: Hypervisor
    detach_timeout: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    is_known: Callable[[Arq], bool] = lambda arq: True
    is_pending: Callable[[], bool] = lambda: False
    make_ready: Callable[[Arq], None] = lambda arq: None
    needs_port: Callable[[Arq], bool] = lambda arq: True
    is_owner: Callable[[str, Arq], bool] = lambda instance, arq: True

    def __post_init__(self) -> None:
        # A list of devices may be older than the request to take one back. The lock is held during
        # an attachment, so that a request to take the device back comes before or after it.
        self._lock = threading.Lock()
        self._withdrawn: dict[str, None] = {}

    def plug(
        self,
        instance: str,
        arqs: Sequence[Arq],
        should_continue: Callable[[], bool] = lambda: True,
        seconds: float = 0.0,
    ) -> int | None:
        """Attach the devices that the running guest lacks; return how many.

        If the hypervisor does not answer, or a backend has not discovered its devices, retry for up
        to ``seconds``; the number is that of the last attempt. Return None if ``should_continue``
        returns False in this time. Raise NotRunning, WrongState for a device that was detached,
        NotFound for a device that no backend has, DriverFailed, Unavailable. If the guest has too
        few free PCIe ports for all of the devices, none is attached.
        """
        end = self.clock() + seconds
        while True:
            try:
                self._check_known(arqs)
                self._check_ports(instance, arqs)
                return sum(self._attach(instance, arq) for arq in arqs)
            except Unavailable:
                if self.clock() >= end:
                    raise
            if not should_continue():
                return None
            self.sleep(RETRY_INTERVAL)

    def unplug(
        self,
        instance: str,
        arqs: Sequence[Arq],
        should_continue: Callable[[], bool] = lambda: True,
        *,
        guest_expected: bool = False,
    ) -> bool:
        """Detach devices from the guest and wait until it has none of them.

        With ``guest_expected``, a guest that the host does not have is an error. Return False if
        ``should_continue`` returns False during the wait. Raise DriverFailed if the guest still has
        a device, or is missing, when the detach timeout ends. Raise Unavailable.
        """
        # First: a reassertion that runs now must not attach a device again that is about to go.
        self._withdraw(arqs)
        end = self.clock() + self.detach_timeout
        requested: set[_Removal] = set()
        reason: str | None = None
        while True:
            domain, error = self._describe(instance)
            is_missing = domain is None and error is None
            if is_missing and not guest_expected:
                return True
            kept = [arq["uuid"] for arq in arqs]  # all, while the guest cannot be read
            if domain is not None:
                kept, error = self._request_removal(instance, domain, arqs, requested)
                if not kept:
                    return True
            reason = error or reason
            if not should_continue():
                return False
            if self.clock() >= end:
                raise DriverFailed(
                    _missing_error(instance)
                    if is_missing
                    else _kept_error(instance, kept, self.detach_timeout, reason)
                )
            self.sleep(POLL_INTERVAL)

    def count_free_ports(self, instance: str) -> int | None:
        """Return the number of PCIe ports of a running guest into which a device can be plugged.

        Return None if only an attach can tell. Raise Unavailable, DriverFailed.
        """
        domain = self.hypervisor.describe(instance)
        if domain is None or domain.running is None:
            return None
        return count_free_ports(domain.running)

    def reassert(self, devices: Sequence[GuestDevice]) -> Check:
        """Attach the devices that running guests lack; return which have them now.

        Raise Unavailable if the hypervisor does not answer.
        """
        guests: dict[str, list[GuestDevice]] = {}
        for device in devices:
            guests.setdefault(device.instance, []).append(device)
        outcomes: dict[str, Outcome] = {}
        for instance, states in guests.items():
            outcomes |= self._reassert_guest(instance, states)
        # A guest that does not run lacks nothing: its next start is checked. But a device that is
        # not ready is checked again soon, because the guest may start before it is.
        is_complete = all(device.ready and self.is_known(device.arq) for device in devices)
        return Check(is_complete and all(o.is_complete for o in outcomes.values()), outcomes)

    def _reassert_guest(self, instance: str, devices: Sequence[GuestDevice]) -> dict[str, Outcome]:
        """Attach the devices that a guest lacks, if it runs; return the outcomes by ARQ.

        Raise Unavailable if the hypervisor does not answer for any guest.
        """
        try:
            domain = self.hypervisor.describe(instance)
        except CyborgError as exc:
            failure = _message_of_guest(exc)
            LOG.warning(
                "Cannot check the devices of a running guest: %s", failure, instance=instance
            )
            unknown = Outcome(is_attached=None, error=failure)
            return {device.arq["uuid"]: unknown for device in devices}
        if domain is None or domain.running is None:
            return {device.arq["uuid"]: STOPPED for device in devices}
        outcomes: dict[str, Outcome] = {}
        for device in devices:
            arq = device.arq
            try:
                outcomes[arq["uuid"]] = self._reassert_device(device, domain.running)
            except (WrongState, NotFound):
                continue  # the device was withdrawn, or the guest has ended
            except CyborgError as exc:
                outcomes[arq["uuid"]] = Outcome(is_attached=False, error=_message_of_guest(exc))
                LOG.warning(
                    "A running guest may lack a device, and it cannot be attached: %s",
                    exc.message,
                    instance=instance,
                    arq=arq["uuid"],
                )
        return outcomes

    def _reassert_device(self, device: GuestDevice, domain: str) -> Outcome:
        """Attach a device unless the guest has it. Raise WrongState, NotFound, and others."""
        arq = device.arq
        if os_acc.find_alias(arq, domain) is not None:
            return Outcome(is_attached=True)
        if not device.ready:
            return Outcome(is_attached=False, error="the host has not prepared the device yet")
        if not self.is_known(arq):
            # Such as after a start of the agent, before the first discovery.
            return Outcome(is_attached=False, error="no backend of this host has the device")
        if not self._attach(device.instance, arq):
            return Outcome(is_attached=True)
        LOG.info(
            "Attached a device that the guest lacked after its start",
            instance=device.instance,
            arq=arq["uuid"],
        )
        return Outcome(is_attached=True, is_new=True)

    def _check_known(self, arqs: Sequence[Arq]) -> None:
        """Raise NotFound for a device that no backend has, Unavailable if it may appear soon."""
        for arq in arqs:
            if self.is_known(arq):
                continue
            error = f"no backend of this host has the device of ARQ {arq['uuid']}"
            # Asked again after the answer: the discovery may have ended between both.
            if self.is_pending() or self.is_known(arq):
                raise Unavailable(f"{error} yet: the discovery of a backend has not succeeded")
            raise NotFound(error)

    def _check_ports(self, instance: str, arqs: Sequence[Arq]) -> None:
        """Raise DriverFailed if the running guest has too few free PCIe ports for devices."""
        domain = self.hypervisor.describe(instance)
        if domain is None or domain.running is None:
            return  # the attachment of a device is refused
        running = domain.running
        absent = [arq for arq in arqs if os_acc.find_alias(arq, running) is None]
        check_free_ports(instance, running, sum(map(self.needs_port, absent)))

    def _describe(self, instance: str) -> tuple[Domain | None, str | None]:
        """Return the guest or None, and the error if only this guest is not available."""
        try:
            return self.hypervisor.describe(instance), None
        except GuestBusy as exc:
            # Only this guest: the others can be asked, so that the caller goes on.
            return None, exc.message

    def _request_removal(
        self, instance: str, domain: Domain, arqs: Sequence[Arq], requested: set[_Removal]
    ) -> tuple[list[str], str | None]:
        """Request the removal of devices, once from each part of the guest that has one.

        ``requested`` has the requests of earlier calls; those of this call are added to it. Return
        the uuids of the ARQs whose devices are not proven to be absent, and the last error.
        """
        kept: list[str] = []
        error: str | None = None
        for arq in arqs:
            parts = _parts_with(domain, arq)
            is_absent = parts.running is None and parts.defined is None
            if is_absent and domain.running is None:
                continue  # proven: only a running guest can be about to get a device
            # A request to attach the device, of which no answer came, may still be in progress in
            # the hypervisor: only the answer to a later request proves that the device is absent.
            target = (
                Domain(running=domain.running, defined=None)
                if is_absent
                else _unrequested(parts, arq, requested)
            )
            if target is not None:
                try:
                    self.hypervisor.detach(instance, os_acc.detach(arq), target)
                except DeviceAbsent:
                    if is_absent:
                        continue  # both answers agree; otherwise the guest is read again
                except GuestBusy as exc:
                    error = exc.message  # libvirt has not taken the request
                except (DriverFailed, NotFound) as exc:
                    error = exc.message
                    # The reason may be an earlier request that is still in progress: wait for it.
                    # But a device that seems absent is asked for again: see above.
                    if not is_absent:
                        requested |= _removals(target, arq)
                else:
                    requested |= _removals(target, arq)
            kept.append(arq["uuid"])
        return kept, error

    def _attach(self, instance: str, arq: Arq) -> bool:
        """Attach a device; return False if the running guest has it already."""
        with self._lock:
            if not self._lacks(instance, arq):
                return False
        # Without the lock, because it reads the open files of all processes.
        self.make_ready(arq)
        # The list of devices may be minutes old, and the device may have been released since then,
        # such as when Nova evacuated or deleted the server while this host had no network.
        if not self.is_owner(instance, arq):
            raise WrongState(f"server {instance} does not own the device of ARQ {arq['uuid']} now")
        with self._lock:
            # Again: the guest may have changed meanwhile.
            if not self._lacks(instance, arq):
                return False
            self.hypervisor.attach(instance, os_acc.attach(arq))
            return True

    def _lacks(self, instance: str, arq: Arq) -> bool:
        """Return whether a running guest lacks a device. Raise if it cannot be attached now."""
        if arq["uuid"] in self._withdrawn:
            raise WrongState(f"the device of ARQ {arq['uuid']} was detached from the guest")
        domain = self.hypervisor.describe(instance)
        if domain is None or domain.running is None:
            raise NotRunning(f"server {instance} does not run on this host")
        if os_acc.find_alias(arq, domain.running) is not None:
            return False
        if self.needs_port(arq):
            check_free_ports(instance, domain.running, needed=1)
        return True

    def _withdraw(self, arqs: Sequence[Arq]) -> None:
        with self._lock:
            for arq in arqs:
                self._withdrawn[arq["uuid"]] = None
            # The oldest are long gone; without a limit the agent would remember each ARQ of its
            # life.
            while len(self._withdrawn) > MAX_WITHDRAWN:
                del self._withdrawn[next(iter(self._withdrawn))]


def _parts_with(domain: Domain, arq: Arq) -> Domain:
    """Return the parts of a guest that have a device."""
    # Also the persistent definition: a soft reboot by Nova starts the guest from it. The device is
    # found by its source, because one that Nova has added does not have our alias.
    running, defined = (
        xml if xml is not None and os_acc.find_alias(arq, xml) is not None else None
        for xml in (domain.running, domain.defined)
    )
    return Domain(running, defined)


def _unrequested(domain: Domain, arq: Arq, requested: Collection[_Removal]) -> Domain | None:
    """Return the parts of a guest without a request to remove a device yet, None if none."""
    uuid = arq["uuid"]
    running = domain.running if _Removal(uuid, from_running=True) not in requested else None
    defined = domain.defined if _Removal(uuid, from_running=False) not in requested else None
    return None if running is None and defined is None else Domain(running, defined)


def _removals(part: Domain, arq: Arq) -> set[_Removal]:
    parts = ((part.running, True), (part.defined, False))
    return {_Removal(arq["uuid"], from_running) for xml, from_running in parts if xml is not None}


def _message_of_guest(exc: CyborgError) -> str:
    """Return the message of an error of one guest. Raise the error if it concerns all guests."""
    if isinstance(exc, Unavailable) and not isinstance(exc, GuestBusy):
        raise exc
    return exc.message


def _kept_error(instance: str, arqs: Sequence[str], seconds: float, reason: str | None) -> str:
    return (
        f"server {instance} has not released the device of ARQ {', '.join(arqs)} in {seconds:g} s: "
        "the operating system of the guest must confirm the removal; a stop of the server also "
        "ends it" + (f" ({reason})" if reason else "")
    )


def _missing_error(instance: str) -> str:
    return (
        f"libvirt has no guest of server {instance}, which Nova shows as running on this host: "
        "[libvirt] connection_uri must name the hypervisor of nova-compute; or stop the server"
    )
