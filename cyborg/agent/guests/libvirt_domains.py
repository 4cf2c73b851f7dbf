# SPDX-License-Identifier: Apache-2.0
"""PCI functions of the domains of libvirt, read by its Python binding: nothing is changed.

A connection that only reads needs no privileges: libvirt's default policy lets each user of the
host see its domains ("Connection authentication" of libvirt's documentation, ``unix_sock_ro_perms``
and ``auth_unix_ro`` of libvirtd.conf). One domain that cannot be described does not hide others.
"""

import importlib
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from cyborg.agent.guests.libvirt_hypervisor import read_domain
from cyborg.core.errors import Unavailable
from cyborg.core.inventory.functions import Guest
from cyborg.core.log import get_logger
from cyborg.drivers.host_use.domains import parse_functions
from cyborg.threads.calls import TimedCalls

LOG = get_logger(__name__)

MAX_SECONDS = 5.0
"""Seconds for one read: a discovery waits for it."""
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
        self._calls = TimedCalls(f"libvirt ({uri})", max_seconds)
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
        # Opened for each read: a restart of the daemon needs no care. A connection to this host
        # needs no keepalive, and so no thread for libvirt's events.
        connection = self._libvirt.openReadOnly(self._uri)
        try:
            found = [self._find(connection, domain) for domain in connection.listAllDomains(0)]
        finally:
            connection.close()
        return [
            guest
            for guest in found
            if guest is not None and (guest.functions or not guest.is_readable)
        ]

    def _find(self, connection: Any, domain: Any) -> Guest | None:
        """Return a guest, which may not be readable; None if it has ended since."""
        uuid = domain.UUIDString()
        try:
            guest = self._describe(domain)
        except (self._libvirt.libvirtError, ValueError) as exc:
            if not connection.isAlive():
                raise
            if uuid not in self._broken:
                LOG.warning(
                    "Cannot read the domain %s of libvirt, its last known devices stay withheld: "
                    "%s",
                    uuid,
                    exc,
                )
            self._broken.add(uuid)
            return Guest(uuid, "", frozenset(), is_readable=False)
        self._broken.discard(uuid)
        return guest

    def _describe(self, domain: Any) -> Guest | None:
        """Return a guest; None if it has ended since."""
        found = read_domain(self._libvirt, domain)
        if found is None:
            return None
        running, defined = (
            frozenset[str]() if xml is None else parse_functions(xml)
            for xml in (found.running, found.defined)
        )
        return Guest(domain.UUIDString(), domain.name(), running | defined, running)
