# SPDX-License-Identifier: Apache-2.0
"""The Python binding of libvirt, with libvirt's driver ``test``: guests in memory of this process.

This driver cannot attach devices; ``cyborg/tests/lab/test_live_attach.py`` does.
"""

import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest

from cyborg import os_acc
from cyborg.agent.guests.hypervisor import (
    PAUSE,
    DeviceAbsent,
    Domain,
    GuestBusy,
    LibvirtHypervisor,
    load_library,
    run_events,
)
from cyborg.core.errors import DriverFailed, Misconfigured, NotFound, TimedOut, Unavailable
from cyborg.tests.fixtures.hosts.fake_hypervisor import OTHER, SERVER, make_arq

URI = "test:///default"
LONG = 30.0
DOMAIN = (
    f"<domain type='test'><name>guest</name><uuid>{SERVER}</uuid><memory>1024</memory>"
    "<os><type>hvm</type></os><devices>{}</devices></domain>"
)

requires_binding = pytest.mark.requires("libvirt_python")


class SlowLibrary:
    """libvirt's binding whose connections are opened after an event only."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.answer = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def open(self, uri: str) -> Any:
        """Open a connection when ``answer`` is set."""
        assert self.answer.wait(LONG)
        return self._library.open(uri)


class WatchedConnection:
    """A connection of libvirt that fails on request."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.fault: Exception | None = None
        self.alive = True
        self.keepalive = (0, 0)
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def domainEventDeregisterAny(self, callback: int) -> None:
        """Record the call."""
        self.calls.append("deregister")
        self._connection.domainEventDeregisterAny(callback)

    def close(self) -> None:
        """Record the call."""
        self.calls.append("close")
        self._connection.close()

    def isAlive(self) -> bool:
        """Return whether the daemon answers."""
        return self.alive

    def setKeepAlive(self, interval: int, count: int) -> None:
        """Record the values."""
        self.keepalive = (interval, count)

    def lookupByUUIDString(self, uuid: str) -> Any:
        """Fail, or return a domain."""
        if self.fault is not None:
            raise self.fault
        return self._connection.lookupByUUIDString(uuid)


class WatchedLibrary:
    """libvirt's binding whose connections fail on request."""

    def __init__(self) -> None:
        self._library: Any = load_library()
        self.connections: list[WatchedConnection] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def open(self, uri: str) -> WatchedConnection:
        """Open a connection."""
        self.connections.append(WatchedConnection(self._library.open(uri)))
        return self.connections[-1]

    def make_error(self, code: str, text: str) -> Exception:
        """Return an error of libvirt."""
        error: Any = self._library.libvirtError(text)
        error.err = (getattr(self._library, code), 0, text, 2, "", "", "", 0, 0)
        found: Exception = error
        return found


class Host:
    """A hypervisor, and another connection that starts and stops its guests."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.hypervisor = LibvirtHypervisor(URI, LONG, self.started.release)
        self.hypervisor.watch()
        self.connection = load_library().open(URI)

    def define(self, *devices: str) -> Any:
        """Define the guest; return it."""
        return self.connection.defineXML(DOMAIN.format("".join(devices)))

    def close(self) -> None:
        """Remove the guest, which all connections of this process have in common."""
        for domain in self.connection.listAllDomains():
            if domain.UUIDString() == SERVER:
                if domain.isActive():
                    domain.destroy()
                domain.undefine()
        self.connection.close()
        self.hypervisor.close()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@requires_binding
def test_guest_is_described_as_it_runs_and_as_it_is_defined(host: Host) -> None:
    assert host.hypervisor.describe(SERVER) is None
    domain, arq = host.define(os_acc.attach(make_arq(1))), make_arq(1)
    stopped = host.hypervisor.describe(SERVER)
    assert stopped is not None
    assert stopped.running is None
    assert os_acc.find_alias(arq, str(stopped.defined)) is not None
    domain.create()
    running = host.hypervisor.describe(SERVER)
    assert running is not None
    assert os_acc.find_alias(arq, str(running.running)) is not None


@requires_binding
def test_start_of_a_guest_is_noticed(host: Host) -> None:
    assert host.started.acquire(timeout=LONG)  # the connection
    domain = host.define()
    assert not host.started.acquire(blocking=False)
    domain.create()
    assert host.started.acquire(timeout=LONG)


@requires_binding
def test_refusal_of_libvirt_is_an_error_with_its_reason(host: Host) -> None:
    host.define().create()
    with pytest.raises(DriverFailed, match="not supported by the connection driver"):
        host.hypervisor.attach(SERVER, os_acc.attach(make_arq(1)))
    with pytest.raises(DriverFailed, match="libvirt refused"):
        host.hypervisor.detach(SERVER, os_acc.detach(make_arq(1)), Domain("", None))
    with pytest.raises(NotFound, match=OTHER):
        host.hypervisor.attach(OTHER, os_acc.attach(make_arq(1)))


@requires_binding
def test_connection_that_cannot_be_opened_is_retried() -> None:
    hypervisor = LibvirtHypervisor("test:///missing-file", LONG, lambda: None)
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"test:///missing-file cannot be used now"):
            hypervisor.describe(SERVER)


@requires_binding
def test_daemon_that_hangs_does_not_hang_the_agent() -> None:
    library = SlowLibrary(load_library())
    hypervisor = LibvirtHypervisor(URI, 0.05, lambda: None, library)  # type: ignore[arg-type]
    with pytest.raises(TimedOut, match=r"did not answer in 0.05 s"):
        hypervisor.describe(SERVER)
    with pytest.raises(Unavailable, match="has not answered for"):
        hypervisor.describe(SERVER)
    hypervisor.close()
    library.answer.set()


@requires_binding
@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        ("VIR_ERR_OPERATION_TIMEOUT", "cannot acquire state change lock", GuestBusy),
        ("VIR_ERR_DEVICE_MISSING", "device not present in domain configuration", DeviceAbsent),
        ("VIR_ERR_OPERATION_FAILED", "host pci device 0000:3d:01.1 not found", DeviceAbsent),
        ("VIR_ERR_OPERATION_FAILED", "device is in the process of unplug", DriverFailed),
        ("VIR_ERR_RPC", "client socket is closed", Unavailable),
    ],
)
def test_error_of_libvirt_has_its_class(code: str, text: str, expected: type[Exception]) -> None:
    library = WatchedLibrary()
    hypervisor = LibvirtHypervisor(URI, LONG, lambda: None, library)  # type: ignore[arg-type]
    hypervisor.watch()
    library.connections[0].fault = library.make_error(code, text)
    with pytest.raises(expected, match=text) as found:
        hypervisor.detach(SERVER, os_acc.detach(make_arq(1)), Domain("", None))
    assert type(found.value) is expected
    hypervisor.close()


@requires_binding
def test_connection_is_not_given_up_before_a_call_is() -> None:
    library = WatchedLibrary()
    hypervisor = LibvirtHypervisor(URI, LONG, lambda: None, library)  # type: ignore[arg-type]
    hypervisor.watch()
    interval, count = library.connections[0].keepalive
    assert interval * count > LONG
    hypervisor.close()


@requires_binding
def test_lost_connection_is_closed_and_replaced() -> None:
    library = WatchedLibrary()
    hypervisor = LibvirtHypervisor(URI, LONG, lambda: None, library)  # type: ignore[arg-type]
    hypervisor.watch()
    first = library.connections[0]
    first.alive = False
    hypervisor.watch()
    assert first.calls == ["deregister", "close"]
    assert len(library.connections) == 2
    hypervisor.close()


@requires_binding
def test_closed_hypervisor_opens_no_connection() -> None:
    library = WatchedLibrary()
    hypervisor = LibvirtHypervisor(URI, LONG, lambda: None, library)  # type: ignore[arg-type]
    hypervisor.watch()
    hypervisor.close()
    assert library.connections[0].calls == ["deregister", "close"]
    with pytest.raises(Unavailable, match="the agent is stopping"):
        hypervisor.describe(SERVER)
    assert len(library.connections) == 1


def test_event_loop_continues_after_an_error() -> None:
    class End(BaseException):
        pass

    class Library:
        results: ClassVar[list[int | BaseException]] = [0, -1, OSError("poll"), 0, End()]

        def virEventRunDefaultImpl(self) -> int:
            result = self.results.pop(0)
            if isinstance(result, BaseException):
                raise result
            return result

    pauses: list[float] = []
    with pytest.raises(End):
        run_events(Library(), pauses.append)
    assert pauses == [PAUSE, PAUSE]


def test_missing_binding_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libvirt", None)
    with pytest.raises(Misconfigured, match=r"install cyborg\[live\]") as found:
        LibvirtHypervisor(URI, LONG, lambda: None)
    assert found.value.details["option"] == "libvirt.live_attach"


@requires_binding
def test_library_is_loaded_when_it_is_needed() -> None:
    assert isinstance(load_library(), ModuleType)
