# SPDX-License-Identifier: Apache-2.0
"""Find the compute node provider of a host, and watch for added and removed compute nodes.

A compute node provider has no parent. It is looked up in this order: the provider configured on the
host; the uuid in nova-compute's compute_id file; the configured name of the host; the other names
and spellings of the host, compared with all root providers.

If an operator deletes a compute service, Nova deletes the compute node provider and its children,
which are the providers of Cyborg. Placement sends no events, and an unchanged provider is verified
only every ``placement_verify_interval``. So the compute nodes are listed more often: one call,
whose answer grows with the number of hosts, not of devices. Each conductor watches and keeps its
last list. If two conductors find the same change, both write the same values.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from cyborg.clients.placement import Placement, ProviderSummary
from cyborg.core import hosts as core
from cyborg.core import placement as compute_nodes
from cyborg.core.errors import Invalid, NotFound, Unavailable
from cyborg.core.log import get_logger
from cyborg.core.text import join_limited
from cyborg.core.validation import parse_uuid
from cyborg.db.providers import write as store
from cyborg.db.services import write as services
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

# Seconds for which the list of all root providers is cached: it is a large answer.
LIST_TTL = 60.0

# Seconds for which a result is cached. Later a better match may exist, such as the host's name.
RESULT_TTL = 600.0

# Cache entries, each of some hundred bytes.
MAX_HOSTS = 16384

# Hosts listed in one log line.
MAX_NAMED = 10


@dataclass(frozen=True, slots=True)
class _CacheEntry:
    provider: ProviderSummary
    identity: core.Identity
    found_at: float


@dataclass(eq=False)
class ComputeNodeResolver:
    """Cached lookup of compute node providers; several threads may look up different hosts.

    ``clock`` returns monotonic seconds.
    """

    placement: Placement
    uow: UnitOfWork
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._cache: dict[str, _CacheEntry] = {}
        self._identities: dict[str, object] = {}
        self._last_error: dict[str, str] = {}
        self._all_roots: dict[str, ProviderSummary] = {}
        self._listed_at = float("-inf")
        self._list_error: str | None = None
        self._list_lock = threading.Lock()

    def preload(self, identities: Mapping[str, object]) -> None:
        """Use identities that the caller has read; None for a host whose agent never reported."""
        self._identities = dict(identities)

    def find(self, host: str) -> ProviderSummary:
        """Return the compute node provider of a host; its ``generation`` may be outdated.

        A cached result needs no call. If its provider no longer exists, call ``forget``. Raise
        NotFound with a hint for the operator, Unavailable, and Invalid for an unreadable identity
        from an agent of another release.
        """
        # Used once: the next lookup reads what the agent has reported since.
        try:
            stored = self._identities.pop(host)
        except KeyError:
            stored = self.uow.run(lambda tx: services.identities(tx, [host])).get(host)
        # Parsed here, so that an unreadable identity of a newer release affects only its host.
        identity = parse_identity(stored)
        cached = self._cache.get(host)
        if cached and cached.identity == identity and self.clock() - cached.found_at < RESULT_TTL:
            return cached.provider
        # Before the calls: if they fail, the next ones must not use the old result.
        self.forget(host)
        provider = self._resolve(host, identity)
        # The oldest first: dictionaries keep the order of insertion. With defaults, because another
        # thread may remove entries meanwhile.
        while len(self._cache) >= MAX_HOSTS:
            self._cache.pop(next(iter(self._cache), host), None)
        self._cache[host] = _CacheEntry(provider, identity, self.clock())
        if self._last_error.pop(host, None) is not None:
            LOG.info(
                "Found compute node resource provider %s",
                provider.name,
                host=host,
                provider=provider.uuid,
            )
        return provider

    def forget(self, host: str) -> None:
        """Remove the cached result of a host."""
        self._cache.pop(host, None)

    def _resolve(self, host: str, identity: core.Identity) -> ProviderSummary:
        """Look the compute node of a host up in Placement. Raise NotFound, Unavailable."""
        if identity.provider is not None:
            return self._find_configured(host, identity.provider)
        if identity.compute_id is not None:
            summary = self.placement.get(identity.compute_id)
            if summary is not None and summary.parent_uuid is None:
                return summary
        # By name, one call with a small answer. Only if it fails, all root providers are listed.
        summary = self.placement.find(host)
        if summary is not None and summary.parent_uuid is None:
            return summary
        return self._match_by_name(host, identity)

    def _find_configured(self, host: str, provider: str) -> ProviderSummary:
        """Return the configured provider, without fallback: the operator's choice is binding."""
        try:
            uuid = parse_uuid(provider, "resource_provider")
        except Invalid:  # not a uuid, so a name
            summary = self.placement.find(provider)
        else:
            summary = self.placement.get(uuid)
        if summary is None:
            raise self._not_found(
                host,
                f"Placement has no resource provider {provider!r}, set by [agent] "
                f"resource_provider on host {host}",
                similar_to=provider,
            )
        if summary.parent_uuid is not None:
            raise self._not_found(
                host,
                f"resource provider {provider!r}, set by [agent] resource_provider on host {host}, "
                "is not a compute node: it has a parent provider",
            )
        return summary

    def _match_by_name(self, host: str, identity: core.Identity) -> ProviderSummary:
        """Return the only root provider with a name of the host. Raise NotFound."""
        providers = self._list_roots()
        candidates = core.matching_nodes([host, *identity.names], providers)
        if candidates:
            # A name that is the host name of another agent belongs to that host.
            others = self.uow.run(lambda tx: services.existing_hosts(tx, candidates)) - {host}
            candidates = tuple(name for name in candidates if name not in others)
        if len(candidates) == 1:
            return providers[candidates[0]]
        if candidates:
            raise self._not_found(
                host,
                f"the compute node of host {host} is ambiguous, candidate resource providers are "
                f"{' and '.join(map(repr, candidates))}; set [agent] resource_provider on the host",
            )
        raise self._not_found(
            host,
            f"Placement has no resource provider {host!r}, which nova-compute creates when it "
            "first starts; check that [DEFAULT] host is the name of this host in Nova, or set "
            "[agent] resource_provider on the host",
            similar_to=host,
        )

    def _not_found(self, host: str, reason: str, *, similar_to: str | None = None) -> NotFound:
        """Return the error; log it unless the last error of the host had the same reason.

        Add the provider names that are similar to ``similar_to``; this may query all root
        providers.
        """
        last = self._last_error.get(host)  # begins with the reason, hints follow
        if last is not None and last.startswith(reason):
            return NotFound(last)
        similar = () if similar_to is None else core.closest_names(similar_to, self._list_roots())
        message = reason
        if similar:
            message += f"; similar names are {', '.join(map(repr, similar))}"
        if self._list_error is not None:
            message += f"; cannot list all root providers: {self._list_error}"
        while len(self._last_error) >= MAX_HOSTS:
            self._last_error.pop(next(iter(self._last_error), host), None)
        self._last_error[host] = message
        LOG.warning("Compute node not found: %s", message, host=host)
        return NotFound(message)

    def _list_roots(self) -> Mapping[str, ProviderSummary]:
        """Return all root providers by name, at most LIST_TTL seconds old.

        A failure counts as an empty list for LIST_TTL: otherwise each host would wait for its
        timeout, one after the other.
        """
        # The answer is large: hosts that need it at the same time wait for one answer.
        with self._list_lock:
            if self.clock() - self._listed_at >= LIST_TTL:
                self._listed_at = self.clock()
                try:
                    self._all_roots = {root.name: root for root in self.placement.root_providers()}
                    self._list_error = None
                except Unavailable as exc:
                    # Placement has just answered for one name, so only this answer may be too
                    # large. One host without a compute node must not delay the other hosts.
                    self._all_roots, self._list_error = {}, exc.message
            return self._all_roots


def parse_identity(stored: object) -> core.Identity:
    """Return the stored identity of an agent, NO_IDENTITY if there is none. Raise Invalid."""
    return core.Identity.from_dict(stored) if isinstance(stored, dict) else core.NO_IDENTITY


@dataclass(eq=False)
class ComputeNodeWatch:
    """Watch of the list of compute nodes; ``run_once`` is the work of a periodic task."""

    uow: UnitOfWork
    placement: Placement
    wake_publisher: Callable[[], None]

    def __post_init__(self) -> None:
        self._nodes: Mapping[str, compute_nodes.ComputeNode] | None = None

    def run_once(self) -> int:
        """Schedule verification of hosts with a changed compute node; return their number.

        The first call only stores the list. Raise Unavailable if Placement is unavailable.
        """
        nodes = {
            node.uuid: compute_nodes.ComputeNode(node.name, node.generation)
            for node in self.placement.compute_nodes()
        }
        # The first list shows no changes: another conductor, or the verification, finds what
        # changed before.
        if self._nodes is None:
            self._nodes = nodes
            return 0
        changed = compute_nodes.changed_nodes(self._nodes, nodes)
        hosts = self.uow.run(lambda tx: self._schedule_verification(tx, changed)) if changed else []
        # Set after the write, so that a change is found again if the write fails.
        self._nodes = nodes
        if hosts:
            LOG.info(
                "Compute nodes of %s hosts were added or removed in Placement, verifying their "
                "resource providers now: %s",
                len(hosts),
                join_limited(hosts, MAX_NAMED),
                host=hosts,
            )
            self.wake_publisher()
        return len(hosts)

    def _schedule_verification(
        self, tx: sa.Connection, changed: Mapping[str, compute_nodes.ComputeNode]
    ) -> list[str]:
        hosts = store.hosts(tx)
        rows = services.identities(tx, hosts)
        affected = compute_nodes.affected_hosts(
            changed, {host: _read_identity(rows.get(host)) for host in hosts}
        )
        store.schedule_verification_of_hosts(tx, affected, self.uow.clock())
        return affected


def _read_identity(row: Any) -> core.Identity:
    try:
        return parse_identity(row)
    except (Invalid, KeyError, TypeError, ValueError):
        return core.NO_IDENTITY  # of another release: the host name is sufficient
