# SPDX-License-Identifier: Apache-2.0
"""Check the ARQs of the instances that Nova's notifications or lists name; release orphans.

The queue of the instances to check has one entry for each, and is limited in size.

Without notifications, the list of deleted servers names them: Nova deletes no ARQ of a port if the
user who deletes the server may not read the binding profile of the port. One conductor at a time
asks Nova for the deleted servers, in one list for the cloud. So a scan costs one query to Nova, one
query of the database for each batch of servers, and queries to Placement and Nova only for servers
that have ARQs.
"""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any

import sqlalchemy as sa

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.orphans import release
from cyborg.core.errors import CyborgError, Unavailable, attempt
from cyborg.core.log import get_logger
from cyborg.core.orphans.hints import (
    Decision,
    Hint,
    decide,
    next_check,
    parse_notification,
    postpone,
)
from cyborg.core.orphans.orphans import BoundArq
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.attachments import write as attachment_store
from cyborg.db.orphans import write as store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.threads.failures import JITTER, RateLimitedLogger

LOG = get_logger(__name__)

MAX_INSTANCES = 10_000

BATCH_INTERVAL = 1.0  # seconds between two batches
BATCH = 500  # instances of one batch, in one query
MAX_PROVIDERS = 100  # providers of one batch whose allocations are read; the others wait
MAX_QUERIES = 100  # instances of one batch queried in Nova; the others wait
MAX_FAILURES = 3  # failed queries to Nova, and unexpected errors, that end a batch
MAX_SECONDS = 30.0  # after this time, a batch starts no further query
QUERY_SECONDS = 5.0  # timeout of one query
SCAN_INTERVAL = 30.0  # seconds between two scans
# Age of the deletions that a scan lists.
#
# Each is listed several times: a conductor may be away, and a check may find the allocation that
# Nova is about to delete. Nova's clock may differ.
WINDOW = timedelta(minutes=5)


class Added(StrEnum):
    """The result of adding a hint."""

    QUEUED = "queued"
    COALESCED = "coalesced"  # the instance was in the queue
    DROPPED = "dropped"  # the queue was full


class HintQueue:
    """Hints by instance. A hint for an instance that is in the queue is merged with its entry."""

    def __init__(self, max_instances: int = MAX_INSTANCES) -> None:
        self._max = max_instances
        self._hints: dict[str, Hint] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of instances in the queue."""
        return len(self._hints)

    def add(self, hint: Hint) -> Added:
        """Add a hint unless the queue is full."""
        with self._lock:
            present = self._hints.get(hint.instance)
            if present is None and len(self._hints) >= self._max:
                return Added.DROPPED
            self._hints[hint.instance] = hint if present is None else present.merge(hint)
            return Added.QUEUED if present is None else Added.COALESCED

    def take_due(self, now: float, limit: int) -> Sequence[Hint]:
        """Remove and return up to ``limit`` due hints, those with the fewest failures first.

        Among hints with equal failures, the hints that have been due longest come first. ``now`` is
        a time of the clock of the hints, in seconds.
        """
        with self._lock:
            due = sorted(
                (hint for hint in self._hints.values() if hint.due <= now),
                key=lambda hint: (hint.failures, hint.due),
            )[:limit]
            for hint in due:
                del self._hints[hint.instance]
            return due


IGNORED, MALFORMED = "ignored", "malformed"
# Results of a notification: values of the label of its metric.
RESULTS = (*Added, IGNORED, MALFORMED)


@dataclass(slots=True)
class _Batch:
    """State of the check of one batch."""

    query: release.InstanceQuery
    end: float  # on the monotonic clock
    started_at: datetime
    # Instances, by uuid:
    unanswered: set[str] = field(default_factory=set)
    postponed: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    errors: int = 0  # unexpected ones
    released: int = 0


class InstanceWatcher:
    """Receiver of Nova's notifications, and the checks that they cause."""

    def __init__(
        self,
        uow: UnitOfWork,
        placement: Placement,
        nova: Nova,
        releaser: release.OrphanReleaser,
        end_attachments: Callable[[Collection[str]], object],
        *,
        queue: HintQueue | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``end_attachments`` starts to end the attachments of instances whose ARQs are gone.

        ``clock`` returns monotonic seconds.
        """
        self._uow = uow
        self._placement = placement.with_timeout(QUERY_SECONDS)
        self._nova = nova.with_timeout(QUERY_SECONDS)
        self._releaser = releaser
        self._end_attachments = end_attachments
        self._queue = HintQueue() if queue is None else queue
        self._clock = clock
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._malformed_log = RateLimitedLogger(logger=LOG)
        self._dropped_log = RateLimitedLogger(logger=LOG)
        self._nova_log = RateLimitedLogger(logger=LOG)
        self._forbidden_log = RateLimitedLogger(logger=LOG)
        self._placement_log = RateLimitedLogger(logger=LOG)

    def receive(self, fields: Mapping[str, Any]) -> None:
        """Queue the instance of a notification for a check. Raise Invalid if it is malformed.

        Called in the thread of the listener: no I/O.
        """
        hint = parse_notification(fields, self._clock())
        result = IGNORED if hint is None else str(self._queue.add(hint))
        if result == Added.DROPPED:
            self._warn_dropped()
        self._count(result)

    def check(self, instance: str) -> None:
        """Queue an instance for a check now."""
        now = self._clock()
        if self._queue.add(Hint(instance, due=now, received=now)) is Added.DROPPED:
            self._warn_dropped()

    def refuse(self, reason: str) -> None:
        """Count and log a malformed notification."""
        self._count(MALFORMED)
        self._malformed_log.warn("Discarded a malformed notification of Nova: %s", reason)

    def counts(self) -> dict[str, int]:
        """Return the number of notifications by result."""
        with self._lock:
            return {str(result): self._counts[result] for result in RESULTS}

    def stop(self) -> None:
        """Make ``run_once`` return after the current query."""
        self._stopped.set()

    def run_once(self) -> int:
        """Check one batch of the instances that are due; return the number of released ARQs.

        An instance is checked again later if Placement or Nova does not answer.
        """
        # Taken out: a notification that arrives during the check queues the instance again.
        hints = self._queue.take_due(self._clock(), BATCH)
        if not hints:
            return 0
        try:
            return self._check(hints)
        except Exception:
            # The database is away, or a defect: the instances are not lost.
            self._requeue(self._next_check(hint, answered=False) for hint in hints)
            raise

    def _check(self, hints: Sequence[Hint]) -> int:
        """Check the ARQs of the named instances; return the number of released ones."""
        failures = {hint.instance: hint.failures for hint in hints}
        started_at = self._uow.clock()
        # The ARQs are read before Placement: an allocation precedes its bind, so the answer of
        # Placement has one for each of them.
        arqs, lost_attachment = self._uow.run(lambda tx: _read(tx, failures.keys()))
        batch = _Batch(
            query=release.InstanceQuery(
                self._nova,
                limit=MAX_QUERIES,
                seconds=MAX_SECONDS,
                max_failures=MAX_FAILURES,
                clock=self._clock,
                warn=self._nova_log.warn,
                warn_forbidden=self._forbidden_log.warn,
            ),
            end=self._clock() + MAX_SECONDS,
            started_at=started_at,
        )
        for number, group in enumerate(_group_by_provider(arqs, failures)):
            # The other providers wait for the next batch: ``stop`` and new notifications are not
            # delayed.
            if number < MAX_PROVIDERS and self._has_time(batch):
                self._try_provider(group[0].provider, group, batch)
            else:
                batch.postponed |= {arq.instance for arq in group}
        if batch.released or lost_attachment:
            self._try_end_attachments(failures.keys())
        self._requeue(self._following(hint, batch) for hint in hints)
        return batch.released

    def _has_time(self, batch: _Batch) -> bool:
        return not self._stopped.is_set() and self._clock() < batch.end

    def _try_provider(self, provider: str, arqs: Sequence[BoundArq], batch: _Batch) -> None:
        """Check the ARQs of a provider; an error delays only its own instances."""
        try:
            self._check_provider(provider, arqs, batch)
        except Exception:
            LOG.exception(
                "Unexpected error while checking ARQs after a notification of Nova; they are "
                "checked again later",
                provider=provider,
            )
            batch.unanswered |= {arq.instance for arq in arqs}
            batch.errors += 1
            if batch.errors >= MAX_FAILURES:
                batch.end = self._clock()  # probably the database

    def _try_end_attachments(self, instances: Collection[str]) -> None:
        try:
            self._end_attachments(instances)
        except Exception:
            LOG.exception("Cannot end attachments whose ARQs are gone; the next sweep ends them")

    def _check_provider(self, provider: str, arqs: Sequence[BoundArq], batch: _Batch) -> None:
        """Decide about the ARQs of one provider by its allocations, and act on it."""
        consumers = attempt(partial(self._placement.allocations, provider))
        if isinstance(consumers, CyborgError):
            self._placement_log.warn(
                "Cannot read allocations in Placement, ARQs are checked again later: %s",
                consumers.message,
                provider=provider,
            )
            if isinstance(consumers, Unavailable):
                batch.end = self._clock()  # the other providers would fail, too
            batch.unanswered |= {arq.instance for arq in arqs}
            return
        if consumers is None:
            # A provider that does not exist in Placement proves nothing about its consumers.
            batch.kept |= {arq.instance for arq in arqs}
            return
        by_decision: dict[Decision, list[BoundArq]] = {decision: [] for decision in Decision}
        for arq in arqs:
            by_decision[self._decide(arq, consumers, batch)].append(arq)
        for decision in (Decision.DELETE, Decision.UNBIND):
            self._release(by_decision[decision], batch, keep=decision is Decision.UNBIND)
        # Placement alone decides about a suspicion, as in the rounds of the collector.
        suspects = by_decision[Decision.SUSPECT] + by_decision[Decision.RETRY]
        release.record_suspects(
            self._uow,
            suspects=[arq for arq in suspects if arq.orphan_since is None],
            recovered=[arq for arq in by_decision[Decision.KEEP] if arq.orphan_since is not None],
            now=batch.started_at,
            bound_before=batch.started_at,
        )
        for arq in by_decision[Decision.RETRY]:
            if self._stopped.is_set() or batch.query.was_skipped(arq.instance):
                batch.postponed.add(arq.instance)
            else:
                batch.unanswered.add(arq.instance)
        for decision in (Decision.KEEP, Decision.SUSPECT):
            batch.kept |= {arq.instance for arq in by_decision[decision]}

    def _decide(self, arq: BoundArq, consumers: Collection[str], batch: _Batch) -> Decision:
        if arq.instance in consumers:
            return Decision.KEEP
        if self._stopped.is_set():
            return Decision.RETRY
        presence = batch.query.get_presence(arq.instance, arq.hostname)
        return decide(presence, batch.started_at - arq.bound_at)

    def _release(self, arqs: Sequence[BoundArq], batch: _Batch, *, keep: bool) -> None:
        for start in range(0, len(arqs), release.RELEASE_BATCH):
            released = self._releaser.release(
                arqs[start : start + release.RELEASE_BATCH], keep=keep
            )
            batch.released += len(released)
            release.log_released(released, keep=keep)

    def _following(self, hint: Hint, batch: _Batch) -> Hint | None:
        """Return the hint for the next check, None if no ARQ stays bound or no check is left."""
        if hint.instance in batch.unanswered:
            return self._next_check(hint, answered=False)
        if hint.instance in batch.postponed:
            return postpone(hint, self._clock(), JITTER.random())
        return self._next_check(hint, answered=True) if hint.instance in batch.kept else None

    def _next_check(self, hint: Hint, *, answered: bool) -> Hint | None:
        return next_check(hint, self._clock(), answered=answered, jitter=JITTER.random())

    def _requeue(self, hints: Iterable[Hint | None]) -> None:
        for hint in hints:
            if hint is not None and self._queue.add(hint) is Added.DROPPED:
                # Notifications have filled the queue during the check.
                self._warn_dropped()
                self._count(Added.DROPPED)

    def _warn_dropped(self) -> None:
        self._dropped_log.warn(
            "Too many instances wait for a check after their deletion or a notification of Nova; "
            "the orphan collector checks further ones"
        )

    def _count(self, result: str) -> None:
        with self._lock:
            self._counts[result] += 1


def _read(tx: sa.Connection, instances: Collection[str]) -> tuple[list[BoundArq], bool]:
    """Return the bound ARQs of some instances, and whether an attachment lost its ARQs."""
    arqs = [BoundArq.from_row(row) for row in store.bound_of_instances(tx, instances)]
    return arqs, bool(attachment_store.lost_of_instances(tx, instances))


def _group_by_provider(
    arqs: Iterable[BoundArq], failures: Mapping[str, int]
) -> list[list[BoundArq]]:
    """Return the ARQs of each provider; those whose checks failed before come last.

    ``arqs`` are ordered by provider; ``failures`` has the failed checks by instance.
    """
    groups = [
        sorted(group, key=lambda arq: failures[arq.instance])
        for _, group in itertools.groupby(arqs, key=lambda arq: arq.provider)
    ]
    return sorted(groups, key=lambda group: failures[group[0].instance])


class DeletionScan:
    """Periodic query of the deleted servers. Safe to run in several conductors."""

    def __init__(
        self,
        uow: UnitOfWork,
        nova: Nova,
        check: Callable[[str], object],
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """``check`` has the ARQs of an instance checked; ``now`` returns naive UTC."""
        self._uow = uow
        self._nova = nova
        self._check = check
        self._now = now or uow.clock
        self._log = RateLimitedLogger(logger=LOG)
        self._forbidden = False  # Nova refused the last list, which was logged

    def run_once(self) -> int:
        """Check the servers that were deleted lately; return their number.

        Return 0 if another scan began less than half an interval ago, or if Nova does not answer.
        """
        now = self._now()
        if not self._acquire_turn(now):
            return 0
        deleted = attempt(partial(self._nova.deleted_servers, now - WINDOW))
        if isinstance(deleted, CyborgError):
            self._log_failure(deleted)
            return 0
        self._log.reset()
        self._forbidden = False
        for instance in sorted(deleted):
            self._check(instance)
        return len(deleted)

    def _log_failure(self, error: CyborgError) -> None:
        """Log a failed list; log a missing permission once, until a list succeeds."""
        is_forbidden = error.details.get("status") == 403
        if not is_forbidden:
            self._log.warn(
                "Cannot list the deleted servers in Nova; the orphan scan releases their ARQs: %s",
                error.message,
            )
        elif not self._forbidden:
            self._forbidden = True
            LOG.warning(
                "The Nova user of [nova] cannot list the servers of all projects: ARQs that Nova "
                "leaves of deleted servers stay bound. Give the user this permission"
            )

    def _acquire_turn(self, now: datetime) -> bool:
        # Half an interval: the conductors' tasks do not start at the same time.
        cutoff = now - timedelta(seconds=SCAN_INTERVAL / 2)
        return release.acquire_turn(self._uow, CorrectiveAction.DELETION_SCANS, cutoff, now)
