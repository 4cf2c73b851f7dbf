# SPDX-License-Identifier: Apache-2.0
"""Which resource provider is a host's compute node: the parent of all of the host's.

Tried in this order, and only a provider without a parent counts: what the operator configured on
the host; the uuid that nova-compute keeps in a file; the name of the host as configured; the host's
other names and spellings, against all the roots there are.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from oslo_log import log

from cyborg.clients.placement import Known, Placement
from cyborg.core import identity as names
from cyborg.core import wire
from cyborg.core.errors import Invalid, NotFound, Unavailable
from cyborg.core.identity import Identity
from cyborg.core.request import parse_uuid
from cyborg.db.store import services
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

LISTED = 60.0
"""Seconds for which the list of all roots is used again: it is the largest answer of Placement."""

FRESH = 600.0
"""Seconds for which a root is believed: a better match, such as the host's own name, may come."""

MAX_HOSTS = 16384  # remembered, each of some hundred bytes


@dataclass(frozen=True, slots=True)
class _Found:
    root: Known
    identity: Identity
    at: float


class Roots:
    """Finds the providers of compute nodes, and remembers them."""

    def __init__(
        self,
        placement: Placement,
        uow: UnitOfWork,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` counts seconds upwards."""
        self._placement = placement
        self._uow = uow
        self._clock = clock
        self._found: dict[str, _Found] = {}
        self._told: dict[str, object] = {}
        self._said: dict[str, str] = {}
        self._listed: dict[str, Known] = {}
        self._listed_at = float("-inf")
        self._unlisted: str | None = None

    def prepare(self, hosts: Collection[str]) -> None:
        """Read in one statement what ``find`` needs to know of these hosts."""
        read = self._uow.run(lambda tx: services.identities(tx, hosts))
        self.told({host: read.get(host) for host in hosts})

    def told(self, identities: Mapping[str, object]) -> None:
        """Take what has been read of these hosts' agents already; None for one that never spoke."""
        self._told = dict(identities)

    def find(self, host: str) -> Known:
        """Return the provider of a host's compute node; ``generation`` may be an old one.

        What is remembered costs no call, and may be gone: say ``forget`` then. Raises NotFound with
        what to do about it, Unavailable, and Invalid for what an agent of another release told.
        """
        if host not in self._told:
            self.prepare([host])
        # Read here: what a newer release wrote, and we cannot read, concerns no other host.
        identity = _identity(self._told.pop(host))
        known = self._found.get(host)
        if known and known.identity == identity and self._clock() - known.at < FRESH:
            return known.root
        self.forget(host)
        root = self._look(host, identity)
        while len(self._found) >= MAX_HOSTS:
            del self._found[next(iter(self._found))]
        self._found[host] = _Found(root, identity, self._clock())
        if self._said.pop(host, None) is not None:
            LOG.info("Host %s: its compute node is resource provider %s", host, root.name)
        return root

    def forget(self, host: str) -> None:
        """Look for a host's compute node anew at the next ``find``."""
        self._found.pop(host, None)

    def _look(self, host: str, identity: Identity) -> Known:
        if identity.provider is not None:
            return self._configured(host, identity.provider)
        if identity.compute_id is not None:
            found = self._placement.get(identity.compute_id)
            if found is not None and found.parent_uuid is None:
                return found
        found = self._placement.find(host)
        if found is not None and found.parent_uuid is None:
            return found
        return self._spelled(host, identity)

    def _configured(self, host: str, provider: str) -> Known:
        """Return what the operator named, and nothing else: he knows better than we."""
        try:
            found = self._placement.get(parse_uuid(provider, "resource_provider"))
        except Invalid:
            found = self._placement.find(provider)
        if found is None:
            raise self._missing(
                host,
                f"Placement has no resource provider {provider!r}, which [agent] resource_provider "
                f"of host {host} names",
                provider,
            )
        if found.parent_uuid is not None:
            raise self._missing(
                host,
                f"resource provider {provider!r}, which [agent] resource_provider of host {host} "
                "names, lies below another one and is no compute node",
            )
        return found

    def _spelled(self, host: str, identity: Identity) -> Known:
        roots = self._roots()
        likely = names.matching([host, *identity.names], roots)
        if likely:
            # A name that another agent gives as its host's is that host's.
            others = self._uow.run(lambda tx: services.hosts_among(tx, likely)) - {host}
            likely = tuple(name for name in likely if name not in others)
        if len(likely) == 1:
            return roots[likely[0]]
        if likely:
            raise self._missing(
                host,
                f"more than one resource provider may be the compute node of host {host}: "
                f"{' and '.join(map(repr, likely))}; set [agent] resource_provider on the host",
            )
        raise self._missing(
            host,
            f"Placement has no resource provider {host!r}: nova-compute makes it when "
            "it first starts; is [DEFAULT] host the name that Nova has for this host? If not, set "
            "[agent] resource_provider on the host",
            host,
        )

    def _missing(self, host: str, reason: str, name: str | None = None) -> NotFound:
        """Return the error; log it unless the last one of this host had the same reason.

        ``name`` is what the nearest names are told of, which may cost more than all the rest.
        """
        if (said := self._said.get(host)) is not None and said.startswith(reason):
            return NotFound(said)
        near = names.nearest(name, self._roots()) if name is not None else ()
        message = reason
        if near:
            message += f"; the nearest names are {', '.join(map(repr, near))}"
        if self._unlisted is not None:
            message += f"; the list of all of them could not be read: {self._unlisted}"
        while len(self._said) >= MAX_HOSTS:
            del self._said[next(iter(self._said))]
        self._said[host] = message
        LOG.warning("Host %s: %s", host, message)
        return NotFound(message)

    def _roots(self) -> Mapping[str, Known]:
        """Return all roots by name, as they were at most LISTED seconds ago."""
        if self._clock() - self._listed_at >= LISTED:
            self._listed_at = self._clock()
            try:
                self._listed = {root.name: root for root in self._placement.roots()}
                self._unlisted = None
            except Unavailable as bad:
                # It has just answered for one name: one host that lacks its compute node must not
                # keep all others waiting for an answer that is too large.
                self._listed, self._unlisted = {}, bad.message
        return self._listed


def _identity(told: object) -> Identity:
    """Return what an agent told; nothing, if it told nothing or never spoke."""
    return wire.load_identity(told) if isinstance(told, dict) else wire.NOBODY
