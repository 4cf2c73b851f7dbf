# SPDX-License-Identifier: Apache-2.0
"""Collection of the four sources of an audit for one host.

The database is read with seven statements. Placement is read with one call for the provider tree of
the host, and three calls for each of Cyborg's providers. Nova is asked for the list of the servers
on the host; servers with a suspected inconsistency are read one by one.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement, ProviderSummary
from cyborg.conductor.placement import reconciler
from cyborg.conductor.placement.compute_nodes import ComputeNodeResolver
from cyborg.core import naming
from cyborg.core.audit import sources
from cyborg.core.audit.compare import instances_to_verify
from cyborg.core.audit.sources import Finding
from cyborg.core.errors import CyborgError, Invalid, NotFound
from cyborg.core.inventory import report
from cyborg.core.placement import Provider
from cyborg.db.audits import read as view
from cyborg.db.deployables import write as deployables
from cyborg.db.services.write import find_agent
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.agent_api import AgentAPI


@dataclass(eq=False)
class SourceCollector:
    """Collector of the sources of one audit. Thread-safe.

    Any number of agents may be called at a time, but only ``[conductor] max_placement_calls``
    threads read the other sources: ``turn`` limits them.

    ``nova`` is None in an installation without Nova. ``renew_lease`` is called between calls that
    may take long; its exceptions propagate. ``nova_error`` is the first error of a call to Nova,
    None before it. After an error Nova is not called again.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    agents: AgentAPI
    placement: Placement
    nova: Nova | None
    renew_lease: Callable[[], None]

    def __post_init__(self) -> None:
        # An own one: that of the publisher must only be used in the publisher's thread.
        self._compute_nodes = ComputeNodeResolver(self.placement, self.uow)
        self.nova_error: str | None = None
        self._turns = threading.BoundedSemaphore(self.conf.conductor.max_placement_calls)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Limit the threads within the block. Raise what ``renew_lease`` raises."""
        with self._turns:
            # Only now: a thread that has waited here while the audit ended must not make its calls.
            self.renew_lease()
            yield

    def collect(self, host: str, recheck: Sequence[Finding] | None = None) -> sources.HostSnapshot:
        """Return the data of all sources about a host.

        If ``recheck`` has findings, read only the data that can confirm these findings. Raise
        Unavailable if Placement or the database does not answer.
        """
        hardware, unreachable_reason = None, None
        # The agent alone confirms what a report repairs, and the kinds that only it observes.
        needs_agent = recheck is None or any(
            f.repair is sources.Repair.REPORT or f.kind in sources.OBSERVED_KINDS for f in recheck
        )
        if needs_agent:
            hardware, unreachable_reason = self._collect_hardware(host)
        # After the agent, so that the database has what the agent reported just before.
        with self.turn():
            return self._collect_others(host, hardware, unreachable_reason, recheck)

    def _collect_others(
        self,
        host: str,
        hardware: report.Hardware | None,
        unreachable_reason: str | None,
        recheck: Sequence[Finding] | None,
    ) -> sources.HostSnapshot:
        """Return the data of all sources; that of the agent is given."""
        records, desired_rows = self.uow.run(lambda tx: _read_records(tx, host))
        root, placement = self._collect_placement(host, records, recheck)
        snapshot = sources.HostSnapshot(
            host=host,
            now=self.uow.clock(),
            hardware=hardware,
            unreachable_reason=unreachable_reason,
            database=records,
            # Without a compute node there is no tree: ``placement`` has the reason.
            desired=reconciler.desired_providers(root, desired_rows) if root is not None else {},
            placement=placement,
            # Without Nova there are no allocations, unless the configuration says otherwise.
            allocations_expected=self.conf.nova.send_events
            or self.conf.conductor.orphan_grace is not None,
        )
        # Last: which instances Nova is asked about follows from the other three sources.
        instances = self._collect_instances(snapshot, recheck)
        return replace(snapshot, instances=instances)

    def _collect_hardware(self, host: str) -> tuple[report.Hardware | None, str | None]:
        """Return the hardware that the agent found, or why the agent is unreachable."""
        row = self.uow.run(lambda tx: find_agent(tx, host))
        if row is None:
            return None, "no agent of this host has ever sent a heartbeat"
        # The deadline of the heartbeat does not decide: after an outage of the conductors the
        # deadlines of all agents have passed, although the agents run.
        if row["down_since"] is not None:
            # Do not call the agent: each host that is down would cost a timeout.
            age = (self.uow.clock() - row["last_seen_at"]).total_seconds()
            return None, f"the last heartbeat of the agent was {age:.0f} s ago"
        try:
            return report.load_answer(self.agents.hardware(host)), None
        except CyborgError as exc:
            return None, exc.message

    def _collect_placement(
        self, host: str, records: sources.DatabaseSnapshot, recheck: Sequence[Finding] | None
    ) -> tuple[str | None, sources.PlacementSnapshot]:
        """Return the compute node provider's uuid, or None, and Cyborg's providers in Placement."""
        try:
            root = self._compute_nodes.find(host)
            tree = self.placement.tree(root.uuid)
            if not tree:  # the cached provider was deleted
                self._compute_nodes.forget(host)
                root = self._compute_nodes.find(host)
                tree = self.placement.tree(root.uuid)
        except (NotFound, Invalid) as exc:  # no such provider, or a malformed host identity
            return None, sources.PlacementSnapshot(missing_reason=exc.message)
        own = self._own_providers(root.uuid, tree, host, records)
        if recheck is not None:
            # Each provider costs three calls: only those of the findings are read again.
            doubtful = {finding.provider for finding in recheck}
            own = {uuid: summary for uuid, summary in own.items() if uuid in doubtful}
        actual: dict[str, Provider] = {}
        consumers: dict[str, dict[str, int]] = {}  # by provider, the units of each consumer
        for uuid, summary in own.items():
            self.renew_lease()
            inventories, traits = self.placement.inventories(uuid), self.placement.traits(uuid)
            actual[uuid] = reconciler.actual_provider(summary, inventories, traits)
            # None if the provider was deleted since the tree was read.
            if (allocations := self.placement.allocations(uuid)) is not None:
                consumers[uuid] = {c: sum(amounts.values()) for c, amounts in allocations.items()}
        return root.uuid, sources.PlacementSnapshot(actual=actual, consumers=consumers)

    def _own_providers(
        self,
        root: str,
        tree: Mapping[str, ProviderSummary],
        host: str,
        records: sources.DatabaseSnapshot,
    ) -> dict[str, ProviderSummary]:
        """Return Cyborg's providers, identified by the database, the owner trait or the name.

        Providers of other services are not read. An expected provider that is not in the tree is
        read by its uuid: it may have another parent.
        """
        with_trait = self.placement.tree(root, naming.OWNER_TRAIT)
        deployable_providers = {
            deployable.provider for device in records.devices for deployable in device.deployables
        }
        recorded = deployable_providers | set(records.providers)
        prefix = naming.provider_name(host, "")
        # Cyborg computes the uuid of a provider from its name: a provider of another service has
        # another uuid.
        named = {
            uuid
            for uuid, summary in tree.items()
            if summary.name.startswith(prefix)
            and uuid == naming.provider_uuid(host, summary.name.removeprefix(prefix))
        }
        own_uuids = recorded | named | with_trait.keys()
        own = {uuid: summary for uuid, summary in tree.items() if uuid in own_uuids}
        own.pop(root, None)  # the compute node provider is Nova's, whatever traits it has
        # A stale provider is not compared: it waits for the publisher.
        published = {uuid for uuid, row in records.providers.items() if row.stale_since is None}
        for uuid in sorted((recorded & published) - set(tree)):
            self.renew_lease()
            # One by one: a provider outside of the tree is rare.
            if (elsewhere := self.placement.get(uuid)) is not None:
                own[uuid] = elsewhere
        return own

    def _collect_instances(
        self, snapshot: sources.HostSnapshot, recheck: Sequence[Finding] | None
    ) -> sources.NovaSnapshot | None:
        """Return the instances in Nova, only the doubtful ones of ``recheck``; None without Nova.

        Nova counts as absent after an error, which is stored in ``nova_error``.
        """
        # One error is enough: each further call would wait for its timeout.
        if self.nova is None or self.nova_error is not None:
            return None
        try:
            if recheck is not None:
                doubtful = {f.instance for f in recheck if f.instance is not None}
                return sources.NovaSnapshot(queried=self._get_servers(self.nova, doubtful))
            # Listed by host: to query each instance would take as many queries as there are ARQs.
            hosts = {r.hostname for r in snapshot.database.arqs if r.is_settled(snapshot.now)}
            listed = frozenset[str]().union(
                *(self.nova.servers_on_host(name) for name in sorted(hosts))
            )
            to_verify = instances_to_verify(snapshot, listed)
            return sources.NovaSnapshot(listed, self._get_servers(self.nova, to_verify))
        except CyborgError as exc:
            self.nova_error = exc.message
            return None

    def _get_servers(self, nova: Nova, uuids: set[str] | frozenset[str]) -> dict[str, Any]:
        servers = {}
        # Each call may take as long as its timeout.
        for uuid in sorted(uuids):
            self.renew_lease()
            servers[uuid] = nova.get_server(uuid)
        return servers


def _read_records(
    tx: sa.Connection, host: str
) -> tuple[sources.DatabaseSnapshot, Sequence[deployables.DesiredProviderRow]]:
    """Return the database's data about a host, and the rows of its desired providers."""
    records = view.read_snapshot(tx, host)
    uuids = [deployable.provider for device in records.devices for deployable in device.deployables]
    return records, deployables.desired_state(tx, uuids) if uuids else ()
