# SPDX-License-Identifier: Apache-2.0
"""Publish the resource providers of devices: reconcile Placement with the database.

The desired state is always computed from the tables, never from earlier messages. Several
conductors may publish concurrently: each leases the providers that it publishes. If a lease expires
too early, the generations in Placement prevent lost updates.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import sqlalchemy as sa
from oslo_config import cfg

from cyborg import tracing
from cyborg.clients.placement import Placement, ProviderSummary
from cyborg.conductor.common.work_lease import Leasing, WorkLease
from cyborg.conductor.placement import offers, reconciler
from cyborg.conductor.placement.batches import Batch, BatchResult, FailedRow, HostState, Rows
from cyborg.conductor.placement.compute_nodes import ComputeNodeResolver
from cyborg.core.errors import CyborgError, InUse, NotFound, Unavailable, attempt
from cyborg.core.inventory.device_set import OfferState
from cyborg.core.log import get_logger, log_fields
from cyborg.core.self_heal import CorrectiveAction
from cyborg.core.text import join_limited
from cyborg.db.deployables import write as deployables
from cyborg.db.deployables.write import DesiredProviderRow
from cyborg.db.device_sets import offers as offer_store
from cyborg.db.providers import write as store
from cyborg.db.providers.write import LeasedProviderRow
from cyborg.db.totals import write as self_heal
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.threads.calls import map_parallel
from cyborg.threads.failures import RateLimitedLogger

LOG = get_logger(__name__)

# Seconds of one run, and up to one batch more.
MAX_RUN = 10.0
# Providers of one lease.
BATCH = 64
# Maximum seconds between two attempts; nova-compute creates the compute node when it first starts.
MAX_RETRY_DELAY = 60.0
# Seconds between two checks whether a consumer still has an allocation of a withdrawn device set,
# and the number of these checks. Placement does not tell when Nova deletes the allocation of a
# server that it does not build; the devices of the set are in no other set until then.
WITHDRAWAL_INTERVAL = 2.0
MAX_WITHDRAWAL_CHECKS = 150
# Consecutive providers without an answer that end a run. Placement may answer the probe and still
# fail for everything that is written.
MAX_CONSECUTIVE_FAILURES = 16
INTERNAL = "internal error, see the log of cyborg-conductor"
# A query for a name that no provider has checks whether Placement answers: the answer is empty.
PROBE_NAME = "no-such-resource-provider"
# Consumers of a device set that an error names.
MAX_CONSUMERS = 3


@dataclass(eq=False)
class Publisher:
    """Publisher of resource providers. Safe to run in several conductors.

    ``clock`` returns monotonic seconds.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    placement: Placement
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._compute_nodes = ComputeNodeResolver(self.placement, self.uow)
        self._reconciler = reconciler.ProviderReconciler(self.placement)
        self._leasing = Leasing(
            self.conf, "providers to publish", now=self.uow.clock, clock=self.clock, requests=3
        )
        self._failure_log = RateLimitedLogger(self.clock, LOG)
        self._failure_lock = threading.Lock()  # of the next two
        self._consecutive_failures = 0
        self._placement_down = False
        self._failed: set[int] = set()  # row ids, of one run
        self._stopped = threading.Event()
        # Whether the last run ended before all due providers were published.
        self.unfinished = False

    def stop(self) -> None:
        """Make ``run_once`` return after the current providers."""
        self._stopped.set()

    def run_once(self) -> int:
        """Publish all due providers unless Placement is unavailable; return their number.

        If Placement does not answer about a provider, the provider stays leased until the end of
        the run and is retried in the next run, so it does not delay other providers. One that
        fails is not leased again in the run, even if it is due: it is among the longest stale, and
        a batch of such providers would come before all others again and again. New stale
        providers could extend a run without end. So a run ends after MAX_RUN seconds;
        ``unfinished`` is True if it was ended so.
        """
        count, end = 0, self.clock() + MAX_RUN
        self.unfinished = False
        self._consecutive_failures, self._placement_down = 0, False
        self._failed.clear()
        unanswered: list[store.Unanswered] = []
        # The next batch is leased in the transaction that records the last one: a run of many
        # batches costs half the transactions.
        batch = self.uow.run(self._lease_batch)
        while batch is not None:
            batch = self._plan_offers(batch)
            result = self._publish_batch(batch)
            self._end_withdrawals(batch, result)
            unanswered += [
                store.Unanswered(batch.lease.owner, uuid, error)
                for uuid, error in result.unanswered.items()
            ]
            count += len(result.published) + len(result.deleted)
            batch = self.uow.run(
                partial(self._record_and_lease, batch=batch, result=result, end=end)
            )
        if unanswered:
            self.uow.run(lambda tx: store.release_unanswered(tx, unanswered))
        return count

    def _lease_batch(self, tx: sa.Connection) -> Batch | None:
        """Lease due rows, then read their desired state.

        The lease locks its rows before anything is read. With snapshot isolation, an earlier read
        would return an outdated desired state.
        """
        if self._stopped.is_set():
            return None
        lease = self._leasing.begin(request_timeout=self.placement.timeout)
        rows = store.lease(
            tx,
            owner=lease.owner,
            now=lease.start,
            until=lease.until,
            limit=BATCH,
            excluded=self._failed,
        )
        if not rows:
            return None
        lease.taken(len(rows))
        with_sets = offer_store.hosts_with_sets(tx, {row["host"] for row in rows})
        # With sets, the desired state is read after the plan.
        return Batch(lease, rows, with_sets, {} if with_sets else _read_desired(tx, rows))

    def _plan_offers(self, batch: Batch) -> Batch:
        """Plan the offers of the hosts of a batch; return it with the desired state after that."""
        if not batch.hosts_with_sets:
            return batch
        planned = offers.plan_hosts(self.uow, batch.hosts_with_sets, batch.lease.start)
        # The plans have raised the revisions of the rows whose offers they change: with those of
        # the lease, these rows would stay stale and be published twice. The revision in the table
        # may be that of a later change, which no plan has seen: such a row must stay stale.
        revisions = {row["id"]: row["revision"] + planned.marked[row["uuid"]] for row in batch.rows}

        def read(tx: sa.Connection) -> Batch:
            leased = store.read_leased(tx, batch.lease.owner, list(revisions))
            for row in leased:
                row["revision"] = revisions[row["id"]]
            desired = _read_desired(tx, leased)
            return replace(batch, rows=leased, desired=desired, unplanned=planned.failed)

        return self.uow.run(read)

    def _end_withdrawals(self, batch: Batch, result: BatchResult) -> None:
        """Plan the offers of the hosts again whose sets are withdrawn now.

        The plan of a host ends its withdrawals in the same transaction: after it nothing else lets
        a publisher plan the host.
        """
        ended = [row for row in batch.rows if row["uuid"] in result.withdrawn]
        if not ended:
            return
        hosts = sorted({row["host"] for row in ended})
        planned = offers.plan_hosts(self.uow, hosts, self.uow.clock(), result.withdrawn)
        for row in ended:
            if row["host"] in planned.failed:
                # Not published: a failure is tried again, and then plans the host.
                del result.published[row["uuid"]]
                self._record_failure(result, row, INTERNAL)

    def _record_and_lease(
        self, tx: sa.Connection, batch: Batch, result: BatchResult, end: float
    ) -> Batch | None:
        """Record the results of a batch; lease and return the next batch.

        Return None, and lease no rows, if Placement is unavailable or the run ends.
        """
        self._record(tx, batch, result)
        self._failed.update(item.row["id"] for item in result.failed)
        if self._placement_down:
            return None
        self.unfinished = self.clock() >= end
        return None if self.unfinished else self._lease_batch(tx)

    def _publish_batch(self, batch: Batch) -> BatchResult:
        """Publish leased rows until the lease is about to end or Placement is unavailable.

        Several hosts are published at a time. The providers of one host are published one after the
        other, parents first.
        """
        result = BatchResult()
        self._compute_nodes.preload(
            {row["host"]: row["identity"] for row in batch.desired.values()}
        )
        hosts = reconciler.group_by_host(batch.rows)
        max_calls = self.conf.conductor.max_placement_calls
        # By host, not by provider: a child needs its parent first, and the writes of one tree would
        # conflict with each other.
        for host_result in map_parallel(
            "publisher", lambda item: self._publish_host_safely(*item, batch), hosts, max_calls
        ):
            result.add(host_result)
        # The flag was set for a provider without an answer, whose error is here.
        if self._placement_down:
            # Nothing is unanswered if the database failed after the last row of its host.
            last_error = next(reversed(result.unanswered.values()), "Placement does not answer")
            remaining = [row["uuid"] for row in batch.rows if not result.has_result(row)]
            result.unanswered |= dict.fromkeys(remaining, last_error)
        return result

    def _publish_host_safely(self, host: str, rows: Rows, batch: Batch) -> BatchResult:
        """Publish the rows of a host and record its errors; other hosts are not affected."""
        result = BatchResult()
        try:
            kind = tracing.SpanKind.INTERNAL
            # A new trace: no client waits for the publishing.
            span = tracing.root_span("placement.publish", None, kind, host=host)
            with log_fields(host=host), span:
                if host in batch.unplanned:
                    raise CyborgError(INTERNAL)
                self._publish_host(host, rows, batch, result)
        except CyborgError as exc:
            failure = exc
        except Exception:
            LOG.exception(
                "Unexpected error while publishing the resource providers of a host", host=host
            )
            failure = CyborgError(INTERNAL)
        else:
            return result
        rest = [row for row in rows if not result.has_result(row)]
        if isinstance(failure, Unavailable):
            self._record_unreachable(rest, failure, result)
        else:
            for row in rest:
                self._record_failure(result, row, failure.message)
        return result

    def _publish_host(self, host: str, rows: Rows, batch: Batch, result: BatchResult) -> None:
        """Publish the providers of a host, parents first; add to ``result``."""
        if self._must_stop(batch.lease):
            return
        state = self._read_host(host, rows, batch, result)
        for row in reconciler.order_by_depth(rows, state.tree, state.providers):
            if self._must_stop(batch.lease):
                return
            desired = batch.desired.get(row["uuid"])
            outcome = self._try_publish(row, desired, state, batch.lease)
            # Without an answer the outcome is unknown. The provider stays leased until the end of
            # the run: another conductor would ask the same Placement.
            if isinstance(outcome, Unavailable):
                self._record_unreachable([row], outcome, result)
                continue
            if isinstance(outcome, CyborgError):
                self._record_refusal(row, outcome, state, result)
            else:
                self._record_success(row, desired, outcome, result)
            # A refusal is an answer too: Placement runs, and the run need not end.
            with self._failure_lock:
                self._consecutive_failures = 0

    def _read_host(self, host: str, rows: Rows, batch: Batch, result: BatchResult) -> HostState:
        """Read from Placement what the providers of a host have in common."""
        root, missing_node = None, None
        desired = [batch.desired[row["uuid"]] for row in rows if row["uuid"] in batch.desired]
        # Only providers to delete need no parent.
        if desired:
            # A verification must not trust the cache: the compute node may have been replaced.
            if any(row["verify_only"] for row in rows):
                self._compute_nodes.forget(host)
            try:
                root = self._compute_nodes.find(host)
            except NotFound as exc:
                missing_node = exc
                result.hosts_without_compute_node.add(host)
        providers = reconciler.desired_providers(root.uuid, desired) if root else {}
        return HostState(root, missing_node, self._read_tree(host, root, rows), providers)

    def _record_success(
        self,
        row: LeasedProviderRow,
        desired: DesiredProviderRow | None,
        outcome: reconciler.Outcome,
        result: BatchResult,
    ) -> None:
        """Record that a provider was published, or deleted if ``desired`` is None."""
        if outcome.drift:
            result.repaired += 1
            LOG.warning(
                "Repaired drift in resource provider %s: %s",
                row["name"],
                "; ".join(outcome.drift),
                host=row["host"],
                provider=row["uuid"],
            )
        if desired is None:
            result.deleted[row["uuid"]] = row["revision"]
            return
        result.published[row["uuid"]] = store.Published(row["revision"], outcome.state)
        if desired["offer"] == OfferState.WITHDRAWING:
            self._check_withdrawn(row, result)

    def _record_refusal(
        self, row: LeasedProviderRow, failure: CyborgError, state: HostState, result: BatchResult
    ) -> None:
        """Record the error of a provider whose changes Placement rejected."""
        # InUse and an internal error do not depend on the parent of the provider.
        if not isinstance(failure, InUse) and failure.message != INTERNAL:
            # The cached compute node provider may no longer exist.
            self._compute_nodes.forget(row["host"])
            if state.root is not None and self.placement.get(state.root.uuid) is None:
                result.hosts_without_compute_node.add(row["host"])
        # ComputeNodeResolver logs a missing compute node once for the host.
        is_logged = failure is state.missing_node
        self._record_failure(result, row, failure.message, is_logged=is_logged)

    def _must_stop(self, lease: WorkLease) -> bool:
        return self._stopped.is_set() or self._placement_down or not lease.has_time()

    def _read_tree(
        self, host: str, root: ProviderSummary | None, rows: Rows
    ) -> dict[str, ProviderSummary]:
        """Read the providers of these rows and their tree, with the fewest calls.

        A row that was never published is assumed not to exist in Placement: if it exists, its
        creation is a conflict. A single row is read by itself, because the tree of a large host is
        a large answer.
        """
        published = [row for row in rows if row["published_revision"]]
        tree: dict[str, ProviderSummary] = {}
        if len(published) > 1:
            # Without a compute node, any published provider identifies the tree.
            tree = self.placement.tree(root.uuid if root else published[0]["uuid"])
            if not tree:
                self._compute_nodes.forget(host)
        for row in published:
            # Another client may have moved it to another tree.
            if row["uuid"] not in tree and (summary := self.placement.get(row["uuid"])):
                tree[summary.uuid] = summary
        return tree

    def _cordon_in_place(
        self, row: DesiredProviderRow, summary: ProviderSummary | None, lease: WorkLease
    ) -> None:
        """Cordon an existing provider, without moving it, while the compute node is missing."""
        if summary is None or not reconciler.is_cordoned(row):
            return
        # Any uuid does for the missing root: the provider keeps its parent.
        (desired,) = reconciler.desired_providers(summary.uuid, [row]).values()
        desired = replace(desired, name=summary.name, parent_uuid=summary.parent_uuid)
        self._reconciler.reconcile(
            summary.uuid, desired, summary, lease_expired=lambda: not lease.has_time()
        )

    def _try_publish(
        self,
        row: LeasedProviderRow,
        desired: DesiredProviderRow | None,
        state: HostState,
        lease: WorkLease,
    ) -> reconciler.Outcome | CyborgError:
        """Publish a provider, or delete it if ``desired`` is None; return what came of it.

        The provider of a device whose host has no compute node is only cordoned.
        """
        uuid = row["uuid"]
        try:
            if desired is not None and state.missing_node is not None:
                self._cordon_in_place(desired, state.tree.get(uuid), lease)
                return state.missing_node
            return self._reconciler.reconcile(
                uuid,
                state.providers.get(uuid),
                state.tree.get(uuid),
                verify_only=row["verify_only"],
                may_evict=lambda: (
                    row["evict"] and self.uow.run(lambda tx: store.may_evict(tx, uuid))
                ),
                lease_expired=lambda: not lease.has_time(),
            )
        except CyborgError as exc:
            return exc
        except Exception:
            LOG.exception(
                "Unexpected error while publishing resource provider %s",
                row["name"],
                host=row["host"],
                provider=uuid,
            )
            return CyborgError(INTERNAL)

    def _check_withdrawn(self, row: LeasedProviderRow, result: BatchResult) -> None:
        """Find out whether a consumer has an allocation of a device set that is now reserved.

        Such a consumer got its allocation before the set was reserved. The set is checked again
        later, until the server has its devices or Nova has removed the allocation.
        """
        # Once the server has the devices, no check is needed: their release makes the set stale.
        if self.uow.run(lambda tx: offer_store.is_owned(tx, row["uuid"])):
            return
        consumers = attempt(partial(self.placement.allocations, row["uuid"]))
        if not consumers:
            result.withdrawn[row["uuid"]] = row["revision"]
            return
        if isinstance(consumers, CyborgError):
            error = consumers.message
        else:
            names = join_limited(sorted(consumers), MAX_CONSUMERS)
            error = f"reserved, and still allocated to {names}"
        # Not published: a failure is tried again.
        del result.published[row["uuid"]]
        checks_left = row["attempts"] < MAX_WITHDRAWAL_CHECKS
        self._record_failure(result, row, error, delay=WITHDRAWAL_INTERVAL if checks_left else None)

    def _record_unreachable(self, rows: Rows, exc: Unavailable, result: BatchResult) -> None:
        """Record rows for which Placement gave no answer; check whether Placement is down."""
        result.unanswered |= {row["uuid"]: exc.message for row in rows}
        self._failure_log.warn(
            "%s; publishing of resource providers is delayed, retrying", exc.message
        )
        # Under the lock, so that calls that fail together check Placement once.
        with self._failure_lock:
            self._consecutive_failures += 1
            self._placement_down = (
                self._placement_down
                or self._consecutive_failures >= MAX_CONSECUTIVE_FAILURES
                or not self._placement_answers()
            )

    def _placement_answers(self) -> bool:
        # A refusal is an answer.
        return not isinstance(attempt(partial(self.placement.find, PROBE_NAME)), Unavailable)

    def _record_failure(
        self,
        result: BatchResult,
        row: LeasedProviderRow,
        error: str,
        *,
        is_logged: bool = False,
        delay: float | None = None,
    ) -> None:
        """Record the error of a provider; warn of it unless it is logged or stored already.

        ``delay`` is the time until the next try in seconds, by default a growing one.
        """
        write_log = LOG.debug if is_logged or error == row["error"] else LOG.warning
        write_log(
            "Resource provider %s is not published: %s",
            row["name"],
            error,
            host=row["host"],
            provider=row["uuid"],
        )
        # The limit of the exponent: attempts grow without end, and a float overflows at 1024.
        if delay is None:
            delay = min(MAX_RETRY_DELAY, 2.0 ** min(row["attempts"], 16))
        result.failed.append(FailedRow(row, error, delay))

    def _record(self, tx: sa.Connection, batch: Batch, result: BatchResult) -> None:
        """Write the results of a batch, and end its lease."""
        now, owner = self.uow.clock(), batch.lease.owner
        store.record_published(tx, owner, result.published, now)
        store.delete_published(tx, owner, result.deleted)
        store.record_failures(tx, owner, [item.to_failure(now) for item in result.failed])
        self_heal.increment(tx, CorrectiveAction.DRIFT_REPAIRED, result.repaired, now)
        # Nova deletes a compute node with all providers below it.
        store.schedule_verification_of_settled(tx, sorted(result.hosts_without_compute_node), now)
        if remaining := [row["uuid"] for row in batch.rows if not result.has_result(row)]:
            store.release(tx, owner, remaining)
        batch.lease.ended()


def _read_desired(tx: sa.Connection, rows: Rows) -> dict[str, DesiredProviderRow]:
    """Return the desired state of the providers by their uuids."""
    desired = deployables.desired_state(tx, [row["uuid"] for row in rows])
    return {row["uuid"]: row for row in desired}
