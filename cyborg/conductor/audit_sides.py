# SPDX-License-Identifier: Apache-2.0
"""Asking the four sides of an audit about one host.

The database is six statements, and Placement three calls a provider of ours besides the host's
tree. Nova lists the servers of the host and is asked one by one about those that are odd.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Protocol

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Known, Placement
from cyborg.conductor import rendering
from cyborg.conductor.roots import Roots
from cyborg.core import hardware, names
from cyborg.core.audit import Finding, Kind, Repair
from cyborg.core.audit_compare import doubtful
from cyborg.core.audit_view import Facts, Instances, Placed, Records
from cyborg.core.errors import CyborgError, Invalid, NotFound
from cyborg.core.hardware import Hardware
from cyborg.core.provider_tree import Provider
from cyborg.db.store import audit_view as view
from cyborg.db.store import deployables
from cyborg.db.unit_of_work import UnitOfWork


class Agents(Protocol):
    """What asks agents: ``cyborg.rpc.agent.AgentClient``."""

    def hardware(self, host: str, driver: str | None = None) -> Mapping[str, Any]:
        """Return what the backends of a host saw last."""


class Sides:
    """Asks for one audit. ``nova`` is None without Nova.

    ``nova_error`` is why Nova could not be asked; it is not asked again then.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        agents: Agents,
        placement: Placement,
        nova: Nova | None,
        *,
        now: Callable[[], datetime],
        keep: Callable[[], None],
    ) -> None:
        """``keep`` is called between calls that may take long; what it raises ends the look."""
        self._conf = conf
        self._uow = uow
        self._agents = agents
        self._placement = placement
        self._nova = nova
        # Its own: the publisher's is its thread's.
        self._roots = Roots(placement, uow)
        self._now = now
        self._keep = keep
        self.nova_error: str | None = None

    def look(self, host: str, again: Sequence[Finding] | None = None) -> Facts:
        """Return what the sides say of a host; of a second look, on what these disagreed about.

        A second look is only good for finding again what the first found. Raises Unavailable when
        Placement or the database does not answer.
        """
        seen, silence = None, None
        if again is None or any(
            f.repair is Repair.REPORT or f.kind is Kind.BACKEND_SILENT for f in again
        ):
            seen, silence = self._hardware(host)
        self._keep()
        # After the agent: what it reported just before it was asked is in the database then.
        records, desired = self._uow.run(lambda tx: _read(tx, host))
        root, placed = self._placed(host, records, again)
        facts = Facts(
            host=host,
            now=self._now(),
            hardware=seen,
            silence=silence,
            records=records,
            wanted=rendering.wanted(root, desired) if root is not None else {},
            placed=placed,
            # Without Nova nobody allocates, unless an operator says that somebody does.
            allocates=self._conf.nova.notify or self._conf.conductor.orphan_grace is not None,
        )
        instances = self._instances(facts, again)
        return replace(facts, instances=instances)

    def _hardware(self, host: str) -> tuple[Hardware | None, str | None]:
        """Return what the agent sees, or why that is not known."""
        row = self._uow.run(lambda tx: view.agent(tx, host))
        if row is None:
            return None, "no agent of this host has ever said hello"
        ours = self._conf.conductor
        silent = self._now() - row["last_seen_at"]
        limit = timedelta(seconds=ours.hello_interval) * (ours.down_after + 1)
        if row["down_since"] is not None or silent >= limit:
            # It is not asked: each host that is down would cost a timeout.
            return None, f"the agent was heard last {silent.total_seconds():.0f} s ago"
        try:
            return hardware.load(self._agents.hardware(host)), None
        except CyborgError as bad:
            return None, bad.message

    def _placed(
        self, host: str, records: Records, again: Sequence[Finding] | None
    ) -> tuple[str | None, Placed]:
        """Return the compute node's provider and what Placement has of ours."""
        try:
            root = self._roots.find(host)
            tree = self._placement.tree(root.uuid)
            if not tree:  # it was remembered, and is gone
                self._roots.forget(host)
                root = self._roots.find(host)
                tree = self._placement.tree(root.uuid)
        except (NotFound, Invalid) as bad:  # not there, or an identity that nobody can read
            return None, Placed(missing=bad.message)
        ours = self._ours(root.uuid, tree, host, records)
        if again is not None:
            looked = {finding.provider for finding in again}
            ours = {uuid: known for uuid, known in ours.items() if uuid in looked}
        actual: dict[str, Provider] = {}
        consumers: dict[str, dict[str, int]] = {}
        for uuid, known in ours.items():
            self._keep()
            inventories, traits = self._placement.inventories(uuid), self._placement.traits(uuid)
            actual[uuid] = rendering.actual(known, inventories, traits)
            if (found := self._placement.allocations(uuid)) is not None:
                consumers[uuid] = {c: sum(has.values()) for c, has in found.items()}
        return root.uuid, Placed(None, actual, consumers)

    def _ours(
        self, root: str, tree: Mapping[str, Known], host: str, records: Records
    ) -> dict[str, Known]:
        """Return the providers that are ours, by what the database, a trait or the name says.

        A provider of somebody else's is not read. One that should be there and is not in the tree
        is asked for by itself: it may hang elsewhere.
        """
        marked = self._placement.tree(root, names.OWNER_TRAIT)
        parts = {part.provider for device in records.devices for part in device.parts}
        known = parts | set(records.providers)
        prefix = names.provider_name(host, "")
        named = {
            uuid
            for uuid, one in tree.items()
            if one.name.startswith(prefix)
            and uuid == names.provider_uuid(host, one.name.removeprefix(prefix))
        }
        ours = {u: one for u, one in tree.items() if u in known | named or u in marked}
        ours.pop(root, None)
        settled = {u for u, row in records.providers.items() if row.stale_since is None}
        for uuid in sorted((known & settled) - set(tree)):
            self._keep()
            if (one := self._placement.get(uuid)) is not None:
                ours[uuid] = one
        return ours

    def _instances(self, facts: Facts, again: Sequence[Finding] | None) -> Instances | None:
        if self._nova is None or self.nova_error is not None:
            return None
        try:
            if again is not None:
                asked = {f.instance for f in again if f.instance is not None}
                return Instances(frozenset(), self._ask(self._nova, asked))
            hosts = {r.hostname for r in facts.records.requests if r.settled(facts.now)}
            here = frozenset[str]().union(*(self._nova.on_host(name) for name in sorted(hosts)))
            return Instances(here, self._ask(self._nova, doubtful(facts, here)))
        except CyborgError as bad:
            self.nova_error = bad.message
            return None

    def _ask(self, nova: Nova, uuids: set[str] | frozenset[str]) -> dict[str, Any]:
        found = {}
        for uuid in sorted(uuids):
            self._keep()
            found[uuid] = nova.server(uuid)
        return found


def _read(tx: sa.Connection, host: str) -> tuple[Records, Sequence[sa.RowMapping]]:
    records = view.read(tx, host)
    uuids = [part.provider for device in records.devices for part in device.parts]
    return records, deployables.desired(tx, uuids) if uuids else ()
