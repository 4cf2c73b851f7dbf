# SPDX-License-Identifier: Apache-2.0
"""Domains of libvirt's driver ``test``, in memory of this process, and a library that fails."""

import logging
import sys
import threading
from typing import Any

import pytest

from cyborg.agent.guests.hypervisor import LibvirtDomains, find_library
from cyborg.core.errors import TimedOut, Unavailable
from cyborg.core.inventory.functions import Guest

requires_binding = pytest.mark.requires("libvirt_python")

URI = "test:///default"
SERVER, OTHER = "7a3c6b0e-1f0d-4b0e-9f43-5a1b2c3d4e5f", "9a1d6f3c-6a8e-4a39-9b7a-0d5f6f3c6a8e"
A, B = "0000:01:00.0", "0000:02:00.0"


def render(*buses: int) -> str:
    devices = "".join(
        "<hostdev mode='subsystem' type='pci' managed='yes'><source>"
        f"<address domain='0x0000' bus='{bus:#04x}' slot='0x00' function='0x0'/></source></hostdev>"
        for bus in buses
    )
    return (
        f"<domain type='test'><name>guest1</name><uuid>{SERVER}</uuid><memory>1024</memory>"
        f"<os><type>hvm</type></os><devices>{devices}</devices></domain>"
    )


def read(**more: Any) -> list[Guest]:
    library = find_library()
    assert library is not None
    return LibvirtDomains(URI, library, **more).read()


@requires_binding
def test_domain_has_its_functions_while_it_is_defined_or_runs(connection: Any) -> None:
    assert read() == []
    domain = connection.defineXML(render(1))
    assert read() == [Guest(SERVER, "guest1", frozenset({A}))]
    domain.create()
    # The next start has another device.
    connection.defineXML(render(2))
    assert read() == [Guest(SERVER, "guest1", frozenset({A, B}), frozenset({A}))]
    domain.destroy()
    assert read() == [Guest(SERVER, "guest1", frozenset({B}))]
    connection.defineXML(render())
    assert read() == []
    domain.undefine()
    connection.createXML(render(1))
    assert read() == [Guest(SERVER, "guest1", frozenset({A}), frozenset({A}))]


class OtherLibrary:
    """libvirt's binding with another function to open a connection."""

    def __init__(self, open_connection: Any) -> None:
        self._library: Any = find_library()
        self.openReadOnly = open_connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def make_error(self, code: str) -> Exception:
        """Return an error of libvirt."""
        error: Any = self._library.libvirtError("failed")
        error.err = (getattr(self._library, code), 0, "failed", 2, "", "", "", 0, 0)
        found: Exception = error
        return found


class Domains:
    """A connection with ``others`` and a domain whose description raises an error."""

    def __init__(self, error: Exception | None, *others: Any, is_alive: bool = True) -> None:
        self._error = error
        self._others = others
        self._is_alive = is_alive
        self.is_closed = False

    def listAllDomains(self, flags: int) -> list[Any]:
        """Return this object as the first domain."""
        return [self, *self._others]

    def isAlive(self) -> bool:
        """Return whether the connection is alive."""
        return self._is_alive

    def UUIDString(self) -> str:
        """Return the uuid of the domain."""
        return OTHER

    def isActive(self) -> bool:
        """Return that the domain runs."""
        return True

    def isPersistent(self) -> bool:
        """Return that the domain has a definition."""
        return True

    def XMLDesc(self, flags: int) -> str:
        """Fail, or return a text that is no XML."""
        if self._error is not None:
            raise self._error
        return "<domain"

    def close(self) -> None:
        """Record the call."""
        self.is_closed = True


@requires_binding
def test_domain_that_ended_meanwhile_is_skipped() -> None:
    library = OtherLibrary(None)
    domains = Domains(library.make_error("VIR_ERR_NO_DOMAIN"))
    library.openReadOnly = lambda uri: domains
    assert LibvirtDomains(URI, library).read() == []  # type: ignore[arg-type]
    assert domains.is_closed


@requires_binding
@pytest.mark.parametrize("is_xml", [True, False])
def test_domain_that_cannot_be_described_does_not_hide_the_others(
    connection: Any, caplog: pytest.LogCaptureFixture, is_xml: bool
) -> None:
    library = OtherLibrary(None)
    other = connection.defineXML(render(1))
    domains = Domains(library.make_error("VIR_ERR_INTERNAL_ERROR") if is_xml else None, other)
    library.openReadOnly = lambda uri: domains
    reader = LibvirtDomains(URI, library)  # type: ignore[arg-type]
    for _ in range(2):
        assert reader.read() == [
            Guest(OTHER, "", frozenset(), is_readable=False),
            Guest(SERVER, "guest1", frozenset({A})),
        ]
    assert caplog.text.count(f"Cannot read the domain {OTHER} of libvirt") == 1
    assert domains.is_closed


@requires_binding
def test_connection_that_ends_meanwhile_is_an_error() -> None:
    library = OtherLibrary(None)
    domains = Domains(library.make_error("VIR_ERR_RPC"), is_alive=False)
    library.openReadOnly = lambda uri: domains
    with pytest.raises(Unavailable, match="libvirt at test:///default cannot be read now: "):
        LibvirtDomains(URI, library).read()  # type: ignore[arg-type]
    assert domains.is_closed


@requires_binding
def test_libvirt_of_another_host_is_not_read() -> None:
    library = OtherLibrary(lambda uri: pytest.fail("opened"))
    domains = LibvirtDomains("qemu+ssh://root@compute-2/system", library)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="names another host, compute-2"):
        domains.read()


@requires_binding
def test_host_without_a_daemon_is_an_error() -> None:
    library = find_library()
    assert library is not None
    with pytest.raises(Unavailable, match="cannot be read now"):
        LibvirtDomains("qemu+unix:///system?socket=/absent", library).read()


@requires_binding
def test_daemon_that_hangs_fails_in_time_and_at_once_after_that() -> None:
    answer = threading.Event()
    opened: list[str] = []

    def open_connection(uri: str) -> Any:
        opened.append(uri)
        assert answer.wait(30.0)
        return Domains(None)

    library: Any = OtherLibrary(open_connection)
    domains = LibvirtDomains(URI, library, max_seconds=0.05)
    with pytest.raises(TimedOut, match="did not answer in"):
        domains.read()
    with pytest.raises(Unavailable, match="has not answered for"):
        domains.read()
    assert opened == [URI], "it is not asked again"
    answer.set()


def test_host_without_the_binding_has_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "libvirt", None)
    caplog.set_level(logging.INFO)
    assert find_library() is None
    assert "install cyborg[live], or set [libvirt] read_domains = false" in caplog.text
