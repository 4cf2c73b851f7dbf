# SPDX-License-Identifier: Apache-2.0
"""Verify that Placement still has the providers that were published, within an interval.

The providers of a host are listed by one call, and only those whose generation has changed are
read: ``core.placement``. A difference is left to the publisher, which reads the
provider again and repairs it. Several conductors share the work: each leases the hosts that it
verifies. A change of the desired state ends the lease of its provider.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.clients.placement import Placement, ProviderSummary
from cyborg.conductor.common.work_lease import Leasing, WorkLease
from cyborg.conductor.placement import reconciler
from cyborg.conductor.placement.compute_nodes import ComputeNodeResolver, parse_identity
from cyborg.core import placement as core
from cyborg.core.errors import CyborgError, Invalid, NotFound, Unavailable
from cyborg.core.log import get_logger, log_fields
from cyborg.db.deployables import write as deployables
from cyborg.db.providers import write as store
from cyborg.db.services import write as services
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.threads.calls import map_parallel
from cyborg.threads.failures import RateLimitedLogger

LOG = get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R")

# Providers of one lease, of 64 hosts with 8 providers.
BATCH = 512
# Failed hosts of a batch that end it if Placement answered for no other host.
MAX_FAILURES = 8
# Seconds for which the number of providers is used. A count reads the rows of all providers.
MAX_COUNT_AGE = 600.0


@dataclass(frozen=True, slots=True)
class _HostState:
    """Providers of a host in Placement, by uuid, and whether its compute node is their root."""

    tree: Mapping[str, ProviderSummary]
    has_root: bool


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A provider whose contents must be read."""

    row: store.VerifiedProviderRow
    summary: ProviderSummary


@dataclass(eq=False)
class _Batch:
    """Leased providers and what became of them; thread-safe.

    ``identities`` are those of the hosts.
    """

    lease: WorkLease
    rows: Sequence[store.VerifiedProviderRow]
    identities: Mapping[str, object]

    def __post_init__(self) -> None:
        self.unchanged: list[int] = []
        self.compared: dict[int, store.PlacementState] = {}
        self.different: list[int] = []
        self.failure: CyborgError | None = None
        self.failed_hosts: set[str] = set()
        self._lock = threading.Lock()
        self._answers = 0

    def add_failure(self, host: str, exc: CyborgError) -> None:
        """Record that Placement gave no useful answer for a host."""
        with self._lock:
            self.failure = exc
            self.failed_hosts.add(host)

    def add_answer(self) -> None:
        """Record that Placement answered for a host."""
        with self._lock:
            self._answers += 1

    @property
    def is_unanswered(self) -> bool:
        """Return whether Placement seems to be down: MAX_FAILURES failed hosts and no answer."""
        with self._lock:
            return not self._answers and len(self.failed_hosts) >= MAX_FAILURES

    @property
    def has_answers(self) -> bool:
        """Return whether Placement has answered for any host."""
        with self._lock:
            return self._answers > 0


@dataclass(eq=False)
class ProviderVerifier:
    """Verifier of published resource providers. Safe to run in several conductors.

    ``clock`` returns monotonic seconds.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    placement: Placement
    wake_publisher: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._leasing = Leasing(
            self.conf, "providers to verify", now=self.uow.clock, clock=self.clock, requests=3
        )
        self._compute_nodes = ComputeNodeResolver(self.placement, self.uow)
        self._stopped = threading.Event()
        self._late_log = RateLimitedLogger(self.clock, LOG)
        self._failure_log = RateLimitedLogger(self.clock, LOG)
        self._count = 0
        self._counted_at = float("-inf")
        self._started_at: float | None = None

    def stop(self) -> None:
        """Make ``run_once`` return after the running calls."""
        self._stopped.set()

    def run_once(self) -> int:
        """Run one round and return the number of verified providers.

        Raise Unavailable if Placement does not answer.
        """
        interval = self.conf.conductor.placement_verify_interval
        start, previous = self.clock(), self._started_at
        self._started_at = start
        # At most one interval: this decides the share of all providers that the round takes.
        elapsed = 0.0 if previous is None else min(start - previous, interval)
        # A round takes its share of the interval, so that the load on Placement is even.
        plan = core.plan_round(self._count_providers(interval), interval, elapsed)
        taken, max_age = 0, timedelta()
        while not self._stopped.is_set() and (limits := plan.next_batch(taken)) is not None:
            min_age, max_rows = limits
            limit = min(max_rows, BATCH)
            batch = self.uow.run(partial(self._lease_batch, min_age=min_age, limit=limit))
            if batch is None:
                break
            taken += len(batch.rows)
            age = self.uow.clock() - min(row["verified_at"] for row in batch.rows)
            max_age = max(max_age, age)
            self._verify_batch(batch)
        if taken:
            self._report_age(max_age.total_seconds(), interval)
        return taken

    def _count_providers(self, interval: float) -> int:
        """Return the number of providers, counted again before a new one can be due."""
        now = self.clock()
        max_age = min(MAX_COUNT_AGE, core.EARLIEST * interval)
        if now - self._counted_at >= max_age:
            self._count = self.uow.run(store.count_verified)
            self._counted_at = now
        return self._count

    def _report_age(self, age: float, interval: float) -> None:
        if age <= interval:
            self._late_log.reset()
            return
        self._late_log.warn(
            "Resource providers were verified %.0f s ago, [conductor] placement_verify_interval is "
            "%g s. If this repeats, increase [conductor] max_placement_calls (%d now) if Placement "
            "can serve more, run more conductors, or increase the interval",
            age,
            interval,
            self.conf.conductor.max_placement_calls,
        )

    def _lease_batch(self, tx: sa.Connection, min_age: timedelta, limit: int) -> _Batch | None:
        """Lease providers not verified for ``min_age``; return None if there are none."""
        lease = self._leasing.begin(request_timeout=self.placement.timeout)
        rows = store.lease_for_verification(
            tx,
            owner=lease.owner,
            before=lease.start - min_age,
            now=lease.start,
            until=lease.until,
            limit=limit,
        )
        if not rows:
            return None
        lease.taken(len(rows))
        hosts = {row["host"] for row in rows}
        stored = services.identities(tx, hosts)
        identities = {host: stored.get(host) for host in hosts}
        self._compute_nodes.preload(identities)
        return _Batch(lease, rows, identities)

    def _verify_batch(self, batch: _Batch) -> None:
        """Verify leased providers and record the results.

        A host without an answer stays leased, so that the next rounds do not begin with it. Raise
        Unavailable, after the results are recorded, if Placement has answered for no host.
        """
        hosts = reconciler.group_by_host(batch.rows)
        # One call for each host, however many providers it has: the generation says whether the
        # contents may have changed.
        states = self._map(lambda item: self._read_host(batch, *item), hosts)
        suspects: list[_Suspect] = []
        now = self.uow.clock()
        for (_, rows), state in zip(hosts, states, strict=True):
            if state is not None:
                for row in rows:
                    self._judge(batch, row, state, now, suspects)
        # Two calls more for each provider, so only for those whose generation has changed, and,
        # seldom, for the others.
        if suspects and not batch.is_unanswered:
            self._compare(batch, suspects)
        self.uow.run(lambda tx: self._record(tx, batch))
        if batch.different:
            self.wake_publisher()
        if batch.failure is None:
            return
        if not batch.has_answers:
            raise Unavailable(batch.failure.message)
        self._failure_log.warn(
            "%s; verification of resource providers is delayed, retrying", batch.failure.message
        )

    def _map(self, func: Callable[[T], R], items: Sequence[T]) -> list[R]:
        return map_parallel("verification", func, items, self.conf.conductor.max_placement_calls)

    def _must_stop(self, batch: _Batch) -> bool:
        return self._stopped.is_set() or not batch.lease.has_time() or batch.is_unanswered

    def _read_host(
        self, batch: _Batch, host: str, rows: Sequence[store.VerifiedProviderRow]
    ) -> _HostState | None:
        """Read the providers of a host; return None if there is no answer."""
        if self._must_stop(batch):
            return None
        own = {row["uuid"] for row in rows}
        parents = {row["placement_parent"] for row in rows}
        # Placement returns the whole tree for any of its providers. The parent, a compute node,
        # still exists if one of ours was deleted.
        anchor = next((uuid for uuid in sorted(filter(None, parents)) if uuid not in own), None)
        with log_fields(host=host):
            try:
                tree = self.placement.tree(anchor or rows[0]["uuid"])
                root = next((node for node in tree.values() if node.parent_uuid is None), None)
                has_root = root is not None and self._is_compute_node(batch, host, root)
            except CyborgError as exc:
                batch.add_failure(host, exc)
                return None
        batch.add_answer()
        return _HostState(tree, has_root)

    def _is_compute_node(self, batch: _Batch, host: str, root: ProviderSummary) -> bool:
        """Return whether a root provider is the compute node of a host."""
        try:
            # Without a call, for nearly all hosts.
            if core.is_certain(host, parse_identity(batch.identities[host]), root.uuid, root.name):
                return True
            return self._compute_nodes.find(host).uuid == root.uuid
        except (NotFound, Invalid):
            return False  # the publisher records the error

    def _judge(
        self,
        batch: _Batch,
        row: store.VerifiedProviderRow,
        state: _HostState,
        now: datetime,
        suspects: list[_Suspect],
    ) -> None:
        """Sort a provider into the unchanged ones, the different ones and the suspects."""
        summary = state.tree.get(row["uuid"])
        if (
            summary is None
            or not state.has_root
            or (summary.name, summary.parent_uuid) != (row["name"], row["placement_parent"])
        ):
            batch.different.append(row["id"])
        elif summary.generation != row["placement_generation"] or core.is_comparison_due(
            row["uuid"], row["compared_at"], now
        ):
            suspects.append(_Suspect(row, summary))
        else:
            batch.unchanged.append(row["id"])

    def _compare(self, batch: _Batch, suspects: Sequence[_Suspect]) -> None:
        """Compare the contents of providers with the desired state."""
        uuids = [suspect.row["uuid"] for suspect in suspects]
        rows = self.uow.run(lambda tx: deployables.desired_state(tx, uuids))
        # Without the uuid of the root: ``_judge`` has compared the parents.
        desired = reconciler.desired_providers("", rows)
        # Without a desired state the provider was removed meanwhile: it is stale.
        present = [suspect for suspect in suspects if suspect.row["uuid"] in desired]
        actuals = self._map(lambda suspect: self._read_provider(batch, suspect), present)
        for suspect, actual in zip(present, actuals, strict=True):
            if actual is None:
                continue
            expected = desired[actual.uuid]
            if (actual.inventories, actual.traits) != (expected.inventories, expected.traits):
                batch.different.append(suspect.row["id"])
                continue
            # The generation that was read first: a later change is found by the next verification.
            state = store.PlacementState(suspect.summary.generation, suspect.summary.parent_uuid)
            batch.compared[suspect.row["id"]] = state

    def _read_provider(self, batch: _Batch, suspect: _Suspect) -> core.Provider | None:
        if self._must_stop(batch):
            return None
        uuid = suspect.summary.uuid
        try:
            inventories, traits = self.placement.inventories(uuid), self.placement.traits(uuid)
        except CyborgError as exc:
            batch.add_failure(suspect.row["host"], exc)
            return None
        return reconciler.actual_provider(suspect.summary, inventories, traits)

    def _record(self, tx: sa.Connection, batch: _Batch) -> None:
        """Write the results of a batch, and release the providers without one."""
        now = self.uow.clock()
        store.record_unchanged(tx, batch.lease.owner, batch.unchanged, now)
        store.record_compared(tx, batch.lease.owner, batch.compared, now)
        store.schedule_verification_of_leased(tx, batch.lease.owner, batch.different, now)
        done = {*batch.unchanged, *batch.compared, *batch.different}
        rest = [
            row["uuid"]
            for row in batch.rows
            if row["id"] not in done and row["host"] not in batch.failed_hosts
        ]
        # Those of failed hosts stay leased: the next round would begin with them and wait again.
        store.release(tx, batch.lease.owner, rest)
        batch.lease.ended()
