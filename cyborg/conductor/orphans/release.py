# SPDX-License-Identifier: Apache-2.0
"""Query Nova about instances, and release orphaned ARQs and those that Nova will not bind.

For a user who cannot list the servers of all projects, Nova answers 404 for a server of another
project. So a 404 proves that an instance does not exist only if the user can list all servers.

Nova binds an ARQ within seconds of its creation. Nobody knows for which instance an unbound ARQ
was, so it is only deleted while Nova builds no server of its project.

A server that is deleted while it is built leaves a bound ARQ behind. Placement can allocate the
unit of this ARQ to another server immediately, and the bind for that server then finds no free
handle. The bind does not wait for the orphan collector: it compares the owners of the handles with
the allocations of the provider. An ARQ is released if its instance has no allocation there and does
not exist in Nova. Placement and Nova must agree, because there is no grace period here: nothing is
released if Placement lost its allocations, or if the Nova user cannot see all projects.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.binding import release as arq_release
from cyborg.conductor.binding.context_states import follow_arqs
from cyborg.conductor.notifications.notifications import ArqEventRecorder
from cyborg.core.errors import CyborgError, attempt
from cyborg.core.hosts import Instance
from cyborg.core.log import get_logger
from cyborg.core.notification import Event
from cyborg.core.orphans import orphans
from cyborg.core.orphans.orphans import BoundArq, Presence
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.binding import write as arq_store
from cyborg.db.orphans import write as store
from cyborg.db.totals import write as self_heal
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

RELEASE_BATCH = 100  # orphans released in one transaction

PAGE = 500  # ARQs deleted in one transaction, the only one of a round
MAX_PROJECTS = 50  # projects queried in Nova in one round

MAX_PROVIDERS = 8  # that the check of one bind compares
MAX_OWNERS = 512  # of one provider
MAX_QUERIES = 32  # instances queried in Nova for one bind
MAX_SECONDS = 5.0  # after this time, a bind starts no further query
QUERY_SECONDS = 3.0  # timeout of one query
MAX_CHECKS = 4  # concurrent checks, so that a Placement that hangs does not block all binds


@dataclass(eq=False)
class OrphanReleaser:
    """Releases orphaned ARQs and frees their handles, unless their bind has changed since.

    ``wake_jobs`` is called after a commit that adds host work, ``wake_publisher`` after one that
    changes the offers of device sets; ``now`` returns naive UTC.
    """

    uow: UnitOfWork
    recorder: ArqEventRecorder
    wake_jobs: Callable[[], None]
    now: Callable[[], datetime]
    wake_publisher: Callable[[], None] = lambda: None

    def release(
        self,
        orphan_arqs: Collection[BoundArq],
        *,
        keep: bool,
        unchanged: Callable[[orphans.LockedArqRow, BoundArq], bool] = orphans.is_same_bind,
    ) -> list[BoundArq]:
        """Unbind ARQs if ``keep`` is True, else delete them; return the released ARQs.

        The ARQs of a device context are unbound in any case.

        All is one transaction. ``unchanged`` compares a locked row with the ARQ as it was read
        before the lock; an ARQ that has changed is skipped.
        """
        by_uuid = {arq.uuid: arq for arq in orphan_arqs}
        now = self.now()
        recorder, timeout = self.recorder, self.recorder.conf.conductor.release_timeout

        def write(tx: sa.Connection) -> tuple[list[BoundArq], arq_release.ReleaseResult]:
            # Sorted: concurrent releases lock ARQs in one order.
            locked = arq_store.lock(tx, sorted(by_uuid))
            # Placement and Nova were asked before the lock: an ARQ that was bound again since is
            # another use.
            rows = [row for row in locked if unchanged(row, by_uuid[row["uuid"]])]
            if not rows:
                return [], arq_release.ReleaseResult(0)
            result = arq_release.release(tx, rows, keep=keep, now=now, timeout=timeout)
            failed = result.failed_arqs
            recorder.record_released(tx, rows, keep=keep, failed=failed, event=Event.ORPHAN_FREED)
            follow_arqs(tx, rows, recorder, now)
            follow_arqs(tx, failed, recorder, now, arq_release.make_cancelled(now))
            self_heal.increment(tx, CorrectiveAction.ORPHANS_RELEASED, result.count, now)
            return [by_uuid[row["uuid"]] for row in rows], result

        released, result = self.uow.run(write)
        if result.jobs_created:
            self.wake_jobs()
        if result.providers:
            self.wake_publisher()
        return released


def acquire_turn(
    uow: UnitOfWork, action: CorrectiveAction, started_before: datetime, now: datetime
) -> bool:
    """Return whether to run a round now: no conductor has begun one since ``started_before``."""
    try:
        return uow.run(lambda tx: self_heal.acquire_turn(tx, action, started_before, now))
    except db_exc.DBDuplicateEntry:
        return False  # the first round ever: another conductor has inserted the row


def record_suspects(
    uow: UnitOfWork,
    suspects: Sequence[BoundArq],
    recovered: Sequence[BoundArq],
    now: datetime,
    bound_before: datetime,
) -> tuple[int, int]:
    """Mark ARQs as suspected, end the suspicion of others; return the number of each.

    An ARQ that was bound after ``bound_before`` is not marked.
    """
    if not suspects and not recovered:
        return 0, 0

    def write(tx: sa.Connection) -> tuple[int, int]:
        new = store.mark_suspected(tx, [arq.id for arq in suspects], now, bound_before)
        self_heal.increment(tx, CorrectiveAction.ORPHANS_SUSPECTED, new, now)
        return new, store.clear_suspicion(tx, [arq.id for arq in recovered])

    counts = uow.run(write)
    for arq in suspects:
        LOG.info(
            "ARQ may be an orphan: its instance has no allocation on the resource provider",
            arq=arq.uuid,
            instance=arq.instance,
            provider=arq.provider,
        )
    return counts


def log_released(released: Iterable[BoundArq], *, keep: bool) -> None:
    """Log each released orphan; ``keep`` is that of ``OrphanReleaser.release``."""
    for arq in released:
        if not keep:
            text = (
                "Orphaned ARQ was deleted: its instance no longer exists and has no allocation on "
                "the resource provider"
            )
        # Not suspected before: only an offloaded instance loses its ARQ without a grace period.
        elif arq.orphan_since is None:
            text = (
                "Orphaned ARQ was unbound: its instance is shelved and offloaded and has no "
                "allocation on the resource provider"
            )
        else:
            text = (
                "Orphaned ARQ was unbound: its instance has had no allocation on the resource "
                f"provider since {arq.orphan_since}"
            )
        LOG.warning("%s", text, arq=arq.uuid, instance=arq.instance, provider=arq.provider)


def delete_expired(
    tx: sa.Connection,
    cutoff: datetime,
    limit: int,
    now: datetime,
    projects: Collection[str] | None = None,
) -> int:
    """Delete unbound ARQs as ``store.delete_expired`` does, and count the correction."""
    count = store.delete_expired(tx, cutoff, limit, projects)
    self_heal.increment(tx, CorrectiveAction.UNBOUND_EXPIRED, count, now)
    return count


class DroppedArqs:
    """Deletion of dropped ARQs by one conductor; ``stopped`` ends a round early."""

    def __init__(self, uow: UnitOfWork, nova: Nova, stopped: threading.Event) -> None:
        self._uow = uow
        self._nova = nova
        self._stopped = stopped
        self._last_project = ""  # the next round starts after it, so that none hides the others

    def delete(self, ttl: float, now: datetime) -> int:
        """Delete ARQs that have not changed for ``ttl`` seconds; return their number."""
        unbound_before = now - timedelta(seconds=ttl)
        idle = self._find_idle_projects(unbound_before)
        if not idle or self._stopped.is_set():
            return 0
        return self._uow.run(lambda tx: delete_expired(tx, unbound_before, PAGE, now, idle))

    def _find_idle_projects(self, unbound_before: datetime) -> list[str]:
        """Return projects that have old ARQs and of which Nova builds no server.

        Query at most MAX_PROJECTS projects, from the one after ``_last_project``, and resume there
        in the next round; begin again after the last project. If the credentials do not let Nova
        list the servers of all projects, return none: a server in build could be hidden, so nothing
        is deleted.
        """
        last, idle = self._last_project, list[str]()
        projects = self._uow.run(
            lambda tx: store.projects_of_expired(tx, unbound_before, last, MAX_PROJECTS)
        )
        try:
            if projects and self._nova.lists_all_projects():
                for project in projects:
                    if self._stopped.is_set():
                        return []
                    self._last_project = project  # also if the query fails
                    if not self._nova.is_building(project):
                        idle.append(project)
            # The last project was reached.
            if len(projects) < MAX_PROJECTS:
                self._last_project = ""
        except CyborgError as exc:
            # The projects of the earlier answers are idle all the same.
            LOG.warning(
                "Cannot query Nova about unbound ARQs, retrying in the next scan: %s", exc.message
            )
        return idle


class InstanceQuery:
    """Cached queries to Nova about instances.

    It queries at most ``limit`` instances, and starts no query after ``seconds`` or after
    ``max_failures`` failed queries. For an instance that is not queried the answer is UNKNOWN.
    """

    def __init__(
        self,
        nova: Nova | None,
        *,
        limit: int,
        seconds: float = float("inf"),
        max_failures: int = 1,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[..., object] = LOG.warning,
        warn_forbidden: Callable[..., object] = LOG.warning,
    ) -> None:
        """``nova`` is None in an installation without Nova: all answers are UNKNOWN.

        ``warn`` logs a failed query, ``warn_forbidden`` that Nova hides servers from the user; both
        take the arguments of a logger.
        """
        self._nova = nova
        self._queries_left = limit
        self._failures_left = max_failures
        self._clock = clock
        self._warn = warn
        self._warn_forbidden = warn_forbidden
        self._end = clock() + seconds
        # By instance, not by bind: an instance can have ARQs on several hosts.
        self._found: dict[str, Instance | None] = {}
        self._unknown: set[str] = set()
        self._not_queried: set[str] = set()
        self._sees_all: bool | None = None

    def get_presence(self, instance: str, hostname: str | None) -> Presence:
        """Return whether an instance exists in Nova, from the cache if it was queried before.

        ``hostname`` is the host of the device that is bound to the instance.
        """
        if instance not in self._found and instance not in self._unknown:
            self._query_nova(instance)
        if instance in self._unknown:
            return Presence.UNKNOWN
        return orphans.classify_presence(self._found[instance], hostname)

    def was_skipped(self, instance: str) -> bool:
        """Return whether an instance is unknown because a limit prevented its query."""
        return instance in self._not_queried

    def _query_nova(self, instance: str) -> None:
        """Record the answer of Nova about an instance, or that it is unknown."""
        if (
            self._nova is None
            or self._queries_left <= 0
            or self._failures_left <= 0
            or self._clock() >= self._end
        ):
            self._not_queried.add(instance)
            self._unknown.add(instance)
            return
        # Before the query: one that fails has cost its time, too.
        self._queries_left -= 1
        error = attempt(partial(self._ask, self._nova, instance))
        if error is not None:
            self._failures_left -= 1
            self._unknown.add(instance)
            self._warn(
                "Cannot query an instance in Nova, its ARQs are checked again later: %s",
                error.message,
                instance=instance,
            )

    def _ask(self, nova: Nova, instance: str) -> None:
        server = nova.get_server(instance)
        # A user who cannot list all projects gets 404 for servers that exist.
        is_missing = orphans.classify_presence(server, hostname=None) is Presence.NOT_FOUND
        if is_missing and not self._can_see_all(nova):
            self._unknown.add(instance)
        else:
            self._found[instance] = server

    def _can_see_all(self, nova: Nova) -> bool:
        if self._sees_all is None:
            self._sees_all = nova.lists_all_projects()
            if not self._sees_all:
                self._warn_forbidden(
                    "The Nova user of [nova] cannot list the servers of all projects, so a 404 "
                    "does not prove that a server is deleted; no orphaned ARQ is released"
                )
        return self._sees_all


class OrphanCheck:
    """Check for orphaned ARQs at the providers of one bind, limited to a few seconds."""

    def __init__(
        self,
        uow: UnitOfWork,
        placement: Placement,
        nova: Nova,
        releaser: OrphanReleaser,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` returns monotonic seconds."""
        self._uow = uow
        # Short, because a bind waits for the answers.
        self._placement = placement.with_timeout(QUERY_SECONDS)
        self._nova = nova.with_timeout(QUERY_SECONDS)
        self._releaser = releaser
        self._clock = clock
        self._slots = threading.BoundedSemaphore(MAX_CHECKS)

    def release_at(self, providers: Sequence[str]) -> bool:
        """Release the orphaned ARQs of these providers; return whether to retry the bind.

        Return True unless ``providers`` is empty, even if no orphan is found: another conductor or
        bind may have released orphans since the bind failed. If Placement or Nova is unavailable,
        nothing is released and nothing is raised.
        """
        if not providers:
            return False
        # Without a slot in time there is no check: the others may release what the bind needs.
        if self._slots.acquire(timeout=MAX_SECONDS):
            try:
                self._check(providers)
            finally:
                self._slots.release()
        return True

    def _check(self, providers: Sequence[str]) -> None:
        """Release the orphans of the first providers, until the limit of time.

        The errors of Placement and Nova are logged, not raised.
        """
        # ``end`` limits the requests to Placement, ``seconds`` the requests to Nova.
        end = self._clock() + MAX_SECONDS
        query = InstanceQuery(self._nova, limit=MAX_QUERIES, seconds=MAX_SECONDS, clock=self._clock)
        for provider in providers[:MAX_PROVIDERS]:
            if self._clock() >= end:
                break
            orphan_arqs = [
                arq
                for arq in self._unallocated(provider)
                if query.get_presence(arq.instance, arq.hostname) is Presence.NOT_FOUND
            ]
            if orphan_arqs:
                log_released(self._releaser.release(orphan_arqs, keep=False), keep=False)

    def _unallocated(self, provider: str) -> Iterable[BoundArq]:
        """Return the bound ARQs of a provider that have no allocation in Placement."""
        # The owners are read first: an allocation precedes its bind, so the answer of Placement
        # must have an allocation for each of them.
        rows = self._uow.run(lambda tx: store.bound_at_provider(tx, provider, MAX_OWNERS))
        consumers = attempt(partial(self._placement.allocations, provider))
        if isinstance(consumers, CyborgError):
            LOG.warning(
                "Cannot read allocations in Placement, releasing no orphan of this provider: %s",
                consumers.message,
                provider=provider,
            )
            return ()
        # A provider that does not exist in Placement proves nothing about its consumers.
        if consumers is None:
            return ()
        return orphans.without_allocation(map(BoundArq.from_row, rows), consumers)
