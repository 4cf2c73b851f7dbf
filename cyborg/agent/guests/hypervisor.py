# SPDX-License-Identifier: Apache-2.0
"""The guests of this host: the interface that changes them, and libvirt by its Python binding.

The binding is in the extra ``live`` of the package. Its calls may hang, so that each has a timeout,
and there is one at a time. A connection that only reads needs no privileges: libvirt's default
policy lets each user of the host see its domains ("Connection authentication" of libvirt's
documentation, ``unix_sock_ro_perms`` and ``auth_unix_ro`` of libvirtd.conf).
"""

import functools
import importlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from cyborg.core.errors import CyborgError, DriverFailed, Misconfigured, NotFound, Unavailable
from cyborg.core.inventory.functions import Guest
from cyborg.core.log import get_logger
from cyborg.drivers.host_use.domains import parse_functions
from cyborg.threads import calls, failures

LOG = get_logger(__name__)


class GuestBusy(Unavailable):
    """Another operation of the hypervisor on this guest did not end in time."""


class DeviceAbsent(DriverFailed):
    """The guest has no such device."""


@dataclass(frozen=True, slots=True)
class Domain:
    """The XML of a guest: as it runs now, and as its next start defines it.

    ``running`` is None if the guest does not run. ``defined`` is None if the guest is transient:
    the hypervisor has no definition of it.
    """

    running: str | None
    defined: str | None


class Hypervisor(Protocol):
    """Guests of this host, by the uuids of their instances.

    Every method may raise Unavailable if the hypervisor does not answer in time, GuestBusy if only
    this guest is not available, and DriverFailed with its reason if it refuses.
    """

    def describe(self, instance: str) -> Domain | None:
        """Return a guest, or None if this host has none with this uuid."""

    def attach(self, instance: str, device: str) -> None:
        """Attach a device, given as XML, to the running guest. Raise NotFound."""

    def detach(self, instance: str, device: str, domain: Domain) -> None:
        """Request the removal of a device from each part of ``domain`` that is not None.

        A running guest may delay the removal, or ignore the request. Raise DeviceAbsent if the
        guest does not have the device and no earlier request to attach it is in progress. Raise
        NotFound if there is no such guest.
        """

    def close(self) -> None:
        """End the connection; do not wait for a call that hangs."""


T = TypeVar("T")


KEEPALIVE = 5  # seconds between two questions to the daemon
TICK = 1000  # milliseconds; libvirt waits without end if nothing is due
PAUSE = 0.5  # seconds after an error of the loop


# Once for each process, as libvirt has one loop: the second implementation would be ignored.
@functools.cache
def start_event_loop(libvirt: Any) -> threading.Thread:
    """Start the thread of the event loop and return it. Call this before the first connection."""
    # Connections receive events only if the process runs the event loop of libvirt.
    libvirt.virEventRegisterDefaultImpl()
    libvirt.virEventAddTimeout(TICK, lambda timer, data: None, None)
    thread = threading.Thread(
        target=run_events, args=(libvirt,), name="libvirt-events", daemon=True
    )
    thread.start()
    return thread


def keep_alive(libvirt: Any, connection: Any, seconds: float) -> None:
    """Let a connection end if its daemon does not answer; ``seconds`` is the limit of a call."""
    # Longer than the limit of a call: otherwise the connection could end during a slow call, which
    # the daemon would execute nevertheless.
    max_unanswered = math.ceil(seconds / KEEPALIVE) + 1
    try:
        connection.setKeepAlive(KEEPALIVE, max_unanswered)
    except libvirt.libvirtError as exc:
        # Drivers inside this process, such as that of the tests, have no daemon to ask.
        LOG.debug("A connection to libvirt has no keepalive: %s", exc)


def run_events(libvirt: Any, sleep: Callable[[float], None] = time.sleep) -> None:
    """Call the functions for the events of libvirt, without end."""
    log = failures.RateLimitedLogger(logger=LOG)
    while True:
        error: object = "unknown error"
        try:
            if libvirt.virEventRunDefaultImpl() == 0:
                continue
        except Exception as exc:  # noqa: BLE001  without this loop no start is noticed
            error = exc
        log.warn("Cannot wait for the events of libvirt, retrying: %s", error)
        # An error that stays must not become a busy loop.
        sleep(PAUSE)


def read_domain(libvirt: Any, domain: Any) -> Domain | None:
    """Return a guest of a domain of libvirt; None if it has ended since it was found."""
    try:
        running = domain.XMLDesc(0) if domain.isActive() else None
        # Not of a transient domain, which has no definition: libvirt would return the running one.
        flags = libvirt.VIR_DOMAIN_XML_INACTIVE
        return Domain(running, domain.XMLDesc(flags) if domain.isPersistent() else None)
    except libvirt.libvirtError as exc:
        if exc.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return None
        raise


def load_library() -> ModuleType:
    """Return libvirt's Python binding. Raise Misconfigured if it is not installed."""
    try:
        return importlib.import_module("libvirt")
    except ImportError as exc:
        raise Misconfigured(
            f"[libvirt] live_attach is true, and libvirt's Python binding cannot be loaded ({exc}):"
            " install cyborg[live], or libvirt-python",
            option="libvirt.live_attach",
        ) from exc


@dataclass(eq=False)
class LibvirtHypervisor:
    """Guests of one libvirt connection, which is opened when it is needed.

    ``timeout`` is for each call, in seconds.

    ``on_start`` is called, in another thread, when a guest has started, and when the connection
    was opened: a start before may have been missed. Raise Misconfigured.
    """

    uri: str
    timeout: float
    on_start: Callable[[], None]
    library: ModuleType | None = None

    def __post_init__(self) -> None:
        self._libvirt: Any = self.library or load_library()
        self._calls = calls.TimedCalls(f"libvirt ({self.uri})", self.timeout)
        self._connection: Any = None
        self._callback = 0  # of the events of the connection
        self._closed = threading.Event()
        # The binding also prints each error.
        self._libvirt.registerErrorHandler(lambda context, error: None, None)

    def describe(self, instance: str) -> Domain | None:
        """Return a guest, or None if this host has none with this uuid."""
        return self._run(lambda: self._describe(instance))

    def attach(self, instance: str, device: str) -> None:
        """Attach a device to the running guest. Raise NotFound if there is no such guest."""
        flags = self._libvirt.VIR_DOMAIN_AFFECT_LIVE
        self._run(lambda: self._require(instance).attachDeviceFlags(device, flags))

    def detach(self, instance: str, device: str, domain: Domain) -> None:
        """Request the removal of a device from each part of ``domain`` that is not None.

        Raise DeviceAbsent if the guest does not have the device, NotFound if there is no such
        guest. Before it changes the running guest, libvirt completes or rejects the earlier
        changes.
        """
        flags = 0
        if domain.running is not None:
            flags |= self._libvirt.VIR_DOMAIN_AFFECT_LIVE
        if domain.defined is not None:
            flags |= self._libvirt.VIR_DOMAIN_AFFECT_CONFIG
        self._run(lambda: self._require(instance).detachDeviceFlags(device, flags))

    def watch(self) -> None:
        """Open the connection, so that ``on_start`` is called. Raise Unavailable, DriverFailed."""
        self._run(lambda: None)

    def close(self) -> None:
        """End the connection; do not wait for a call that hangs. Later calls are refused."""
        self._closed.set()
        try:
            self._calls.run(self._disconnect)
        except CyborgError as exc:
            LOG.debug("The connection to libvirt was not closed: %s", exc)

    def _run(self, function: Callable[[], T]) -> T:
        """Run a function with an open connection. Raise Unavailable, NotFound, DriverFailed."""

        def run() -> T:
            self._connect()
            return function()

        try:
            return self._calls.run(run)
        except self._libvirt.libvirtError as exc:
            raise self._convert(exc) from exc

    def _disconnect(self) -> None:
        """Close the connection, if there is one; ignore errors."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        # Each on its own: the connection must be closed even if its callback is gone.
        for function in (
            lambda: connection.domainEventDeregisterAny(self._callback),
            connection.close,
        ):
            try:
                function()
            except self._libvirt.libvirtError as exc:
                LOG.debug("The connection to libvirt was not closed: %s", exc)

    def _connect(self) -> None:
        """Connect to libvirt unless a connection works. Raise Unavailable, libvirtError."""
        if self._closed.is_set():
            raise Unavailable("the agent is stopping")
        if self._connection is not None and self._connection.isAlive():
            return
        libvirt = self._libvirt
        start_event_loop(libvirt)
        # The former connection is lost; without this call libvirt keeps its callback.
        self._disconnect()
        connection = libvirt.open(self.uri)
        keep_alive(libvirt, connection, self.timeout)
        self._callback = connection.domainEventRegisterAny(
            None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._on_event, None
        )
        self._connection = connection
        if self._closed.is_set():  # while it was opened
            self._disconnect()
            raise Unavailable("the agent is stopping")
        LOG.info("Connected to libvirt at %s", self.uri)
        self.on_start()

    def _on_event(self, connection: Any, domain: Any, event: int, detail: int, data: Any) -> None:
        if event == self._libvirt.VIR_DOMAIN_EVENT_STARTED:
            self.on_start()

    def _describe(self, instance: str) -> Domain | None:
        domain = self._find(instance)
        return None if domain is None else read_domain(self._libvirt, domain)

    def _find(self, instance: str) -> Any:
        try:
            return self._connection.lookupByUUIDString(instance)
        except self._libvirt.libvirtError as exc:
            if exc.get_error_code() == self._libvirt.VIR_ERR_NO_DOMAIN:
                return None
            raise

    def _require(self, instance: str) -> Any:
        domain = self._find(instance)
        if domain is None:
            raise NotFound(f"this host has no server {instance}", instance=instance)
        return domain

    def _convert(self, exc: Any) -> CyborgError:
        """Return the error of this project for one of libvirt."""
        libvirt = self._libvirt
        # Errors of the connection and not of the guest: the next call opens another one.
        connection_codes = {
            libvirt.VIR_ERR_RPC,
            libvirt.VIR_ERR_NO_CONNECT,
            libvirt.VIR_ERR_AUTH_FAILED,
            libvirt.VIR_ERR_INVALID_CONN,
        }
        code = exc.get_error_code()
        connection = self._connection
        if code in connection_codes or connection is None or not connection.isAlive():
            return Unavailable(f"libvirt at {self.uri} cannot be used now: {exc}")
        if code == libvirt.VIR_ERR_OPERATION_TIMEOUT:
            # An operation of the same guest holds its lock; the connection works.
            return GuestBusy(f"libvirt at {self.uri} is busy with the guest: {exc}")
        # Versions of libvirt differ in the code for a device that the running guest lacks.
        is_absent = code == libvirt.VIR_ERR_OPERATION_FAILED and "not found" in str(exc)
        if code == libvirt.VIR_ERR_DEVICE_MISSING or is_absent:
            return DeviceAbsent(f"libvirt refused: {exc}")
        return DriverFailed(f"libvirt refused: {exc}")


# Seconds for one read: a discovery waits for it.
MAX_SECONDS = 5.0
# The URI of a local connection has no host: qemu:///system.
_THIS_HOST = (None, "", "localhost", "127.0.0.1", "::1")


def find_library() -> ModuleType | None:
    """Return libvirt's Python binding; None if it cannot be loaded, with a line in the log."""
    try:
        return importlib.import_module("libvirt")
    except ImportError as exc:
        LOG.info(
            "Devices of domains of libvirt are not known, because its Python binding cannot be "
            "loaded (%s): install cyborg[live], or set [libvirt] read_domains = false on a host "
            "without libvirt",
            exc,
        )
        return None


class LibvirtDomains:
    """Domains of one libvirt connection."""

    def __init__(self, uri: str, library: ModuleType, max_seconds: float = MAX_SECONDS) -> None:
        """``max_seconds`` is for one read."""
        self._uri = uri
        self._libvirt: Any = library
        self._max_seconds = max_seconds
        self._broken: set[str] = set()  # uuids of domains that cannot be described
        self._calls = calls.TimedCalls(f"libvirt ({uri})", max_seconds)
        # The binding also prints each error.
        self._libvirt.registerErrorHandler(lambda context, error: None, None)

    def read(self) -> list[Guest]:
        """Return the running and defined domains with a PCI function of the host.

        Raise TimedOut, and Unavailable, also for the URI of another host: its devices are not those
        of this one.
        """
        try:
            if (host := urlsplit(self._uri).hostname) not in _THIS_HOST:
                raise Unavailable(
                    f"[libvirt] connection_uri {self._uri} names another host, {host}"
                )
            return self._calls.run(self._read)
        except (self._libvirt.libvirtError, ValueError) as exc:
            raise Unavailable(f"libvirt at {self._uri} cannot be read now: {exc}") from exc

    def _read(self) -> list[Guest]:
        """Return the domains with a function of the host, and those that cannot be read."""
        # Opened for each read: a restart of the daemon needs no care. A connection to this host
        # needs no keepalive, and so no thread for libvirt's events.
        connection = self._libvirt.openReadOnly(self._uri)
        try:
            guests = [self._find(connection, domain) for domain in connection.listAllDomains(0)]
        finally:
            connection.close()
        return [
            guest
            for guest in guests
            if guest is not None and (guest.functions or not guest.is_readable)
        ]

    def _find(self, connection: Any, domain: Any) -> Guest | None:
        """Return a guest, which may not be readable; None if it has ended since."""
        uuid = domain.UUIDString()
        try:
            guest = self._describe(domain)
        except (self._libvirt.libvirtError, ValueError) as exc:
            if not connection.isAlive():
                raise  # of the connection: the read of all domains fails
            if uuid not in self._broken:
                LOG.warning(
                    "Cannot read the domain %s of libvirt, its last known devices stay withheld: "
                    "%s",
                    uuid,
                    exc,
                )
            self._broken.add(uuid)
            return Guest(uuid, name="", functions=frozenset(), is_readable=False)
        self._broken.discard(uuid)
        return guest

    def _describe(self, domain: Any) -> Guest | None:
        """Return a guest; None if it has ended since."""
        guest_xml = read_domain(self._libvirt, domain)
        if guest_xml is None:
            return None
        running, defined = (
            frozenset[str]() if xml is None else parse_functions(xml)
            for xml in (guest_xml.running, guest_xml.defined)
        )
        return Guest(domain.UUIDString(), domain.name(), running | defined, running)
