# SPDX-License-Identifier: Apache-2.0
"""Compare all bound ARQs with the allocations in Placement and release orphaned ARQs.

Only one conductor runs a round: the conductor whose UPDATE of the last start time succeeds. A round
reads the ARQs page by page and queries Placement once for each provider, with up to ``[conductor]
max_placement_calls`` queries at a time. All writes are guarded, so concurrent rounds do no harm,
and the next round completes an interrupted one.

Each provider is queried in each round. Placement has no query for the consumers of several
providers, and the deletion of allocations (DELETE, as Nova does when it deletes a server) leaves
the generation of the provider, so a provider with an old generation may have an orphan.
Alternative not taken: conductors that share a round. The safety limit compares the orphans with all
ARQs that have an allocation, which only the conductor knows that has read all providers.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.binding.binder import OwnerResolver
from cyborg.conductor.notifications.notifications import ArqEventRecorder, NotificationBuilder
from cyborg.conductor.orphans import release
from cyborg.core.errors import CyborgError, Unavailable, attempt
from cyborg.core.log import get_logger
from cyborg.core.orphans import orphans
from cyborg.core.orphans.orphans import BoundArq, Classification, Presence
from cyborg.core.self_heal import CorrectiveAction
from cyborg.core.text import join_limited
from cyborg.db.binding.write import ArqRow
from cyborg.db.orphans import write as store
from cyborg.db.totals import write as self_heal
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.threads.calls import map_parallel
from cyborg.threads.failures import RateLimitedLogger

LOG = get_logger(__name__)

PAGE = 500  # ARQs read, or deleted, in one transaction
MAX_RELEASED = 2000  # orphans of one round without Nova; the next round releases the rest
MAX_EXPIRED_PAGES = 20  # pages of one round
MAX_NOVA_FAILURES = 3  # failed queries of Nova after which a round queries it no more
MAX_NAMED = 10  # instances listed in one log line
MAX_QUERIES = 500  # instances of orphans, and of failed binds, queried in Nova in one round
DEFAULT_GRACE = 600.0  # seconds, in an installation with Nova


@dataclass(slots=True)
class RoundStats:
    """Statistics of one round."""

    checked: int = 0
    orphans: int = 0
    suspected: int = 0
    cleared: int = 0
    released: int = 0
    owners_assigned: int = 0
    expired: int = 0
    postponed: int = 0  # orphans whose instance was not queried, because Nova failed: not released
    in_use: int = 0  # orphans whose instance is on the host in Nova: not released
    releasable: list[BoundArq] = field(default_factory=list)  # orphans this round may release


class OrphanCollector:
    """Periodic collector of orphaned ARQs. Safe to run in several conductors."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        placement: Placement,
        wake_jobs: Callable[[], None] = lambda: None,
        notifications: NotificationBuilder | None = None,
        nova: Nova | None = None,
        *,
        now: Callable[[], datetime] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wake_publisher: Callable[[], None] = lambda: None,
    ) -> None:
        """``wake_jobs`` and ``wake_publisher`` are those of ``OrphanReleaser``, as is ``now``.

        ``clock`` returns monotonic seconds. ``nova`` is None in an installation without Nova.
        """
        self._conf = conf
        self._uow = uow
        self._placement = placement
        self._owners = OwnerResolver(placement)
        self._nova = nova
        self._now = now or uow.clock
        event_recorder = ArqEventRecorder(
            conf, notifications or NotificationBuilder(conf, now=self._now)
        )
        self._releaser = release.OrphanReleaser(
            uow, event_recorder, wake_jobs, self._now, wake_publisher
        )
        self._clock = clock
        self._late_log = RateLimitedLogger(clock, LOG)
        self._stopped = threading.Event()
        self._dropped = None if nova is None else release.DroppedArqs(uow, nova, self._stopped)

    def stop(self) -> None:
        """Make ``run_once`` return after the current queries."""
        self._stopped.set()

    def run_once(self) -> RoundStats | None:
        """Run a round; return None if a round started less than an interval ago.

        Raise Unavailable if Placement is unavailable: recorded findings are kept, and nothing is
        released.
        """
        if not self._acquire_turn():
            return None
        stats = RoundStats()
        started_at, start = self._now(), self._clock()
        # First, and with a budget of its own: it needs no answer of Placement, which may be away.
        self._expire(stats, self._new_query())
        grace = self._grace_period()
        # Without Nova there are no allocations: each ARQ would look like an orphan.
        if grace is not None:
            # An allocation precedes its bind: each ARQ bound now must have one when Placement is
            # queried. Without a grace period, a bind has one interval to complete.
            interval = timedelta(seconds=self._conf.conductor.orphan_scan_interval)
            bound_before = started_at if grace else started_at - interval
            for page in self._pages():
                self._judge(page, grace, bound_before, stats)
            self._report_duration(self._clock() - start)
            # A new query budget: old failed ARQs must not use up the queries for orphans.
            self._release_orphans(stats, self._new_query())
        changes = (stats.suspected, stats.cleared, stats.released, stats.owners_assigned)
        if any(changes) or stats.expired:
            LOG.info(
                "Orphan scan: checked=%d suspected=%d cleared=%d released=%d owners_assigned=%d "
                "expired=%d",
                stats.checked,
                *changes,
                stats.expired,
            )
        return stats

    def _new_query(self) -> release.InstanceQuery:
        return release.InstanceQuery(self._nova, limit=MAX_QUERIES, max_failures=MAX_NOVA_FAILURES)

    def _report_duration(self, seconds: float) -> None:
        options = self._conf.conductor
        if seconds <= options.orphan_scan_interval or self._stopped.is_set():
            self._late_log.reset()
            return
        self._late_log.warn(
            "An orphan scan took %.0f s, [conductor] orphan_scan_interval is %g s. Increase "
            "[conductor] max_placement_calls (%d now) if Placement can serve more, or increase the "
            "interval",
            seconds,
            options.orphan_scan_interval,
            options.max_placement_calls,
        )

    def _acquire_turn(self) -> bool:
        now = self._now()
        started_before = now - timedelta(seconds=self._conf.conductor.orphan_scan_interval)
        return release.acquire_turn(self._uow, CorrectiveAction.ORPHAN_SCANS, started_before, now)

    def _grace_period(self) -> timedelta | None:
        """Return the grace period; 0 means that no orphan is released.

        Return None in an installation without Nova.
        """
        seconds = self._conf.conductor.orphan_grace
        if seconds is None:
            seconds = DEFAULT_GRACE if self._conf.nova.send_events else None
        return None if seconds is None else timedelta(seconds=seconds)

    # By provider, then row id, so that a page goes on where the last one ended, whatever was bound
    # or deleted meanwhile.
    def _bound_arqs(self) -> Iterator[BoundArq]:
        """Yield the bound ARQs by provider, with at most one page of rows in memory."""
        provider, last = "", 0
        while not self._stopped.is_set():
            rows = self._uow.run(
                partial(store.next_bound, provider=provider, after=last, limit=PAGE)
            )
            yield from map(BoundArq.from_row, rows)
            if len(rows) < PAGE:
                return
            provider, last = rows[-1]["device_rp_uuid"], rows[-1]["id"]

    def _pages(self) -> Iterator[list[BoundArq]]:
        """Yield pages of about PAGE bound ARQs; all ARQs of a provider are on the same page.

        The handles of a provider limit the number of its ARQs.
        """
        page: list[BoundArq] = []
        for _, arqs in itertools.groupby(self._bound_arqs(), key=lambda arq: arq.provider):
            page += arqs
            if len(page) >= PAGE:
                yield page
                page = []
        if page:
            yield page

    def _judge(
        self,
        page: Sequence[BoundArq],
        grace: timedelta,
        bound_before: datetime,
        stats: RoundStats,
    ) -> None:
        """Classify the ARQs of a page and write the suspected and the recovered ARQs.

        ARQs bound after ``bound_before`` are not classified: their allocation may be newer than
        the answer of Placement.
        """
        providers = sorted({arq.provider for arq in page})
        max_calls = self._conf.conductor.max_placement_calls
        found_consumers = map_parallel("orphan scan", self._list_consumers, providers, max_calls)
        # After a stop the answers are incomplete: a provider that was not queried has none.
        if self._stopped.is_set():
            return
        now = self._now()
        classes = orphans.classify(
            page,
            dict(zip(providers, found_consumers, strict=True)),
            now,
            bound_before=bound_before,
            grace_period=grace or None,  # a configured 0 means that there are no orphans
        )
        stats.checked += classes.checked
        stats.orphans += len(classes.orphans)
        # With Nova, a round releases only orphans whose instance it can query.
        max_releasable = MAX_RELEASED if self._nova is None else MAX_QUERIES
        stats.releasable += classes.orphans[: max_releasable - len(stats.releasable)]
        if classes.suspects or classes.recovered:
            suspected, cleared = release.record_suspects(
                self._uow,
                suspects=classes.suspects,
                recovered=classes.recovered,
                now=now,
                bound_before=bound_before,
            )
            stats.suspected += suspected
            stats.cleared += cleared
        if classes.unowned:
            self._assign_owners(classes, stats)

    def _list_consumers(self, provider: str) -> frozenset[str] | None:
        """Return the consumers with allocations of a provider.

        Return None if the provider does not exist, if Placement rejects the request, or if the
        collector is stopped.
        """
        if self._stopped.is_set():
            return None
        allocations = attempt(partial(self._placement.allocations, provider))
        # While Placement is away, the round ends.
        if isinstance(allocations, Unavailable):
            raise allocations
        if isinstance(allocations, CyborgError):
            LOG.warning(
                "Cannot read allocations in Placement, retrying in the next scan: %s",
                allocations.message,
                provider=provider,
            )
            return None
        return None if allocations is None else frozenset(allocations)

    def _assign_owners(self, classes: Classification, stats: RoundStats) -> None:
        """Determine and write the projects of ARQs whose instances have an allocation."""
        instances = sorted({arq.instance for arq in classes.unowned})
        projects = {
            instance: self._owners.find_allocations(instance).project for instance in instances
        }
        now = self._now()

        def write(tx: sa.Connection) -> int:
            # Without the instances whose project is unknown.
            by_owner = orphans.group_by_owner(classes.unowned, projects)
            count = sum(
                store.assign_project(tx, ids, instance, project)
                for (instance, project), ids in by_owner.items()
            )
            self_heal.increment(tx, CorrectiveAction.OWNERS_VERIFIED, count, now)
            return count

        stats.owners_assigned += self._uow.run(write)

    def _release_orphans(self, stats: RoundStats, query: release.InstanceQuery) -> None:
        """Release the suspected ARQs that still have no allocation, unless Nova has them."""
        if self._stopped.is_set() or not stats.releasable:
            return
        # A Placement database that was restored or recreated has no allocations: each bound ARQ
        # would look like an orphan.
        if not orphans.within_safety_limit(stats.orphans, stats.checked):
            LOG.error(
                "Orphan scan: %s of %s bound ARQs have no allocation in Placement, too many to "
                "release them automatically. If the Placement database was restored or recreated, "
                "shelve and unshelve the servers, which allocates again; otherwise delete these "
                "ARQs",
                stats.orphans,
                stats.checked,
            )
            return
        in_use: list[BoundArq] = []
        postponed: list[BoundArq] = []
        # After all pages: the safety limit compares the orphans of the whole cloud.
        for provider, group in itertools.groupby(stats.releasable, key=lambda arq: arq.provider):
            if self._stopped.is_set():
                return
            # Queried again: minutes may have passed since the first query.
            consumers = self._list_consumers(provider)
            if consumers is None:
                continue
            by_presence: dict[Presence, list[BoundArq]] = {}
            for arq in group:
                if arq.instance in consumers or self._stopped.is_set():
                    continue
                presence = query.get_presence(arq.instance, arq.hostname)
                if self._nova is not None and query.was_skipped(arq.instance):
                    # Nova was not asked, and could have the instance on the host.
                    postponed.append(arq)
                else:
                    by_presence.setdefault(presence, []).append(arq)
            in_use += by_presence.pop(Presence.ON_HOST, ())
            # Also if Nova did not answer: then the grace period decides, as without Nova.
            for presence, arqs in by_presence.items():
                self._release_batches(arqs, stats, keep=presence is not Presence.NOT_FOUND)
        _report_kept(stats, postponed, in_use)

    def _release_batches(self, arqs: Iterable[BoundArq], stats: RoundStats, *, keep: bool) -> None:
        remaining = iter(arqs)
        while batch := list(itertools.islice(remaining, release.RELEASE_BATCH)):
            released = self._releaser.release(batch, keep=keep, unchanged=orphans.is_unchanged)
            stats.released += len(released)
            release.log_released(released, keep=keep)

    def _expire(self, stats: RoundStats, query: release.InstanceQuery) -> None:
        """Delete ARQs that have been unbound for ``unbound_ttl`` or ``dropped_ttl`` seconds."""
        now, unbound_ttl = self._now(), self._conf.conductor.unbound_ttl
        unbound_before = now - timedelta(seconds=unbound_ttl)
        if unbound_ttl:
            self._expire_unbound(stats, unbound_before, now)
        if self._dropped is not None and (dropped_ttl := self._conf.conductor.dropped_ttl):
            stats.expired += self._dropped.delete(dropped_ttl, now)
        if unbound_ttl:
            self._expire_failed(stats, query, unbound_before, now)

    def _expire_unbound(self, stats: RoundStats, unbound_before: datetime, now: datetime) -> None:
        """Delete ARQs that nobody has bound since ``unbound_before``."""
        for _ in range(MAX_EXPIRED_PAGES):
            if self._stopped.is_set():
                return
            count = self._uow.run(lambda tx: release.delete_expired(tx, unbound_before, PAGE, now))
            stats.expired += count
            if count < PAGE:
                return

    def _expire_failed(
        self,
        stats: RoundStats,
        query: release.InstanceQuery,
        failed_before: datetime,
        now: datetime,
    ) -> None:
        """Delete ARQs whose bind failed and whose instance no longer exists.

        The ARQs of a device context are unbound, so that the context can be used again.
        While the instance exists, Nova reads its ARQs at each hard reboot, and the reboot fails if
        there are none.
        """
        rows = self._uow.run(lambda tx: store.failed_binds(tx, failed_before, PAGE))
        deletable: list[int] = []
        of_contexts: list[BoundArq] = []
        kept: list[int] = []
        for row in rows:
            if self._stopped.is_set():
                return
            # Without Nova, or without an instance, no reboot of an instance can need the ARQ.
            presence = Presence.NOT_FOUND
            if self._nova is not None and row["instance_uuid"] is not None:
                presence = query.get_presence(row["instance_uuid"], row["hostname"])
            if presence is Presence.NOT_FOUND and row["context_id"] is not None:
                of_contexts.append(_failed_arq(row))
            elif presence is Presence.NOT_FOUND:
                deletable.append(row["id"])
            elif presence is not Presence.UNKNOWN:  # else the next scan queries Nova again
                kept.append(row["id"])
        if of_contexts:
            unchanged = orphans.is_same_failure
            released = self._releaser.release(of_contexts, keep=True, unchanged=unchanged)
            stats.released += len(released)
            for arq in released:
                LOG.warning(
                    "ARQ of a device context was unbound: its bind failed and its instance no "
                    "longer exists",
                    arq=arq.uuid,
                    instance=arq.instance or None,
                )
        if not deletable and not kept:
            return

        def write(tx: sa.Connection) -> int:
            # ``kept`` look new: otherwise each scan would query Nova about the same ARQs.
            store.reset_failed_age(tx, kept, failed_before, now)
            count = store.delete_failed(tx, deletable, failed_before)
            self_heal.increment(tx, CorrectiveAction.UNBOUND_EXPIRED, count, now)
            return count

        stats.expired += self._uow.run(write)


def _failed_arq(row: ArqRow) -> BoundArq:
    """Return an ARQ whose bind failed, as ``OrphanReleaser`` takes it; it has no provider."""
    return BoundArq(
        id=row["id"],
        uuid=row["uuid"],
        instance=row["instance_uuid"] or "",
        provider="",
        bound_at=row["updated_at"] or row["created_at"],
        hostname=row["hostname"],
    )


def _report_kept(
    stats: RoundStats, postponed: Sequence[BoundArq], in_use: Sequence[BoundArq]
) -> None:
    """Count and log the suspected ARQs that stay bound."""
    if postponed:
        stats.postponed = len(postponed)
        LOG.warning(
            "Orphan scan: %s bound ARQs have no allocation in Placement. They stay bound, "
            "because Nova was not queried about their instances after %s failed queries; the "
            "next scan queries it again",
            len(postponed),
            MAX_NOVA_FAILURES,
            arq=[arq.uuid for arq in postponed],
        )
    if in_use:
        stats.in_use = len(in_use)
        instances = sorted({arq.instance for arq in in_use})
        LOG.warning(
            "Orphan scan: %s bound ARQs have no allocation in Placement. They stay bound, "
            "because Nova has their instances on the host of the device. Shelve and unshelve "
            "these servers, which allocates again: %s",
            len(in_use),
            join_limited(instances, MAX_NAMED),
            instance=instances,
            arq=[arq.uuid for arq in in_use],
        )
