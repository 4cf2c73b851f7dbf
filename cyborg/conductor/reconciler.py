# SPDX-License-Identifier: Apache-2.0
"""Holding every bound request against Placement's allocations, and freeing what Nova has leaked.

The conductors take turns: of those who would begin a round, the one whose UPDATE hits does. A round
reads requests provider by provider and asks Placement once for each provider. What it writes is
guarded, so that two rounds at once do no harm, and a round that is cut off is made up for by the
next.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc
from oslo_log import log
from oslo_utils import timeutils

from cyborg.clients.placement import Placement
from cyborg.conductor import unbinding
from cyborg.conductor.events import Telling
from cyborg.conductor.notices import Notices
from cyborg.conductor.owners import Owners
from cyborg.core import orphans
from cyborg.core.deed import Deed
from cyborg.core.errors import CyborgError, Unavailable
from cyborg.core.orphans import Findings, Held
from cyborg.db.store import deeds
from cyborg.db.store import orphans as store
from cyborg.db.store import requests as request_store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

PAGE = 500  # requests that are read, or deleted, together
FREED = 100  # orphans of one transaction
MOST_FREED = 2000  # orphans of one round; the next round has the rest
MOST_EXPIRED = 20  # pages of one round
DEFAULT_GRACE = 600.0  # seconds, in an installation with Nova


@dataclass(slots=True)
class Tally:
    """What a round has come to."""

    judged: int = 0
    orphans: int = 0
    suspected: int = 0
    recovered: int = 0
    freed: int = 0
    settled: int = 0
    expired: int = 0
    due: list[Held] = field(default_factory=list)  # orphans that this round may free


class Reconciler:
    """The one who looks; several conductors may each have one."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        placement: Placement,
        wake_jobs: Callable[[], None] = lambda: None,
        notices: Notices | None = None,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
    ) -> None:
        """``wake_jobs`` is called after the commit of work for hosts; ``now`` is naive UTC."""
        self._conf = conf
        self._uow = uow
        self._placement = placement
        self._owners = Owners(placement)
        self._wake_jobs = wake_jobs
        self._telling = Telling(conf, notices or Notices(conf))
        self._now = now
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Have ``run_once`` return after the provider it is at."""
        self._stopped.set()

    def run_once(self) -> Tally | None:
        """Make a round, unless one was begun within the interval: then return None.

        Raises Unavailable when Placement is away: what was found out until then is kept, and
        nothing is freed.
        """
        if not self._turn():
            return None
        tally = Tally()
        self._expire(tally)
        grace = self._grace()
        if grace is not None:
            for provider, held in itertools.groupby(self._held(), key=lambda one: one.provider):
                self._look(provider, held, grace, tally)
            self._free(tally)
        if tally.suspected or tally.recovered or tally.freed or tally.settled or tally.expired:
            LOG.info(
                "Looked at %s bound requests: %s newly without an allocation, %s with theirs back, "
                "%s freed, %s given to their instance's project; %s unbound ones deleted for age",
                tally.judged,
                tally.suspected,
                tally.recovered,
                tally.freed,
                tally.settled,
                tally.expired,
            )
        return tally

    def _turn(self) -> bool:
        now = self._now()
        before = now - timedelta(seconds=self._conf.conductor.reconcile_interval)
        try:
            return self._uow.run(lambda tx: deeds.take_turn(tx, Deed.RECONCILED, before, now))
        except db_exc.DBDuplicateEntry:
            return False

    def _grace(self) -> timedelta | None:
        """Return the time of grace, 0 to free nothing; None where nobody allocates."""
        seconds = self._conf.conductor.orphan_grace
        if seconds is None:
            seconds = DEFAULT_GRACE if self._conf.nova.notify else None
        return None if seconds is None else timedelta(seconds=seconds)

    def _held(self) -> Iterator[Held]:
        """Give bound requests, provider by provider, a page of them in memory."""
        provider, last = "", 0
        while not self._stopped.is_set():
            rows = self._uow.run(
                lambda tx, provider=provider, last=last: store.page(  # type: ignore[misc]
                    tx, provider, last, PAGE
                )
            )
            yield from map(Held.of, rows)
            if len(rows) < PAGE:
                return
            provider, last = rows[-1]["device_rp_uuid"], rows[-1]["id"]

    def _look(self, provider: str, held: Iterator[Held], grace: timedelta, tally: Tally) -> None:
        """Judge the requests of one provider. What is bound after the question is too young."""
        if self._stopped.is_set():
            return
        consumers, now = self._consumers(provider), self._now()
        # With no grace to go by, a bind is given until the next round to be complete.
        settle = grace or timedelta(seconds=self._conf.conductor.reconcile_interval)
        while some := list(itertools.islice(held, PAGE)):
            found = orphans.judge(
                some, {provider: consumers}, now, settle=settle, grace=grace or None
            )
            tally.judged += found.judged
            tally.orphans += len(found.orphans)
            tally.due += found.orphans[: MOST_FREED - len(tally.due)]
            if found.suspects or found.recovered:
                self._note(found, now, now - settle, tally)
            if found.unowned:
                self._settle(found, tally)

    def _consumers(self, provider: str) -> frozenset[str] | None:
        """Return who has allocations on a provider; None when that cannot be told."""
        try:
            found = self._placement.allocations(provider)
        except Unavailable:
            raise
        except CyborgError as bad:
            LOG.warning("Allocations of resource provider %s: %s", provider, bad.message)
            return None
        return None if found is None else frozenset(found)

    def _note(self, found: Findings, now: datetime, bound_before: datetime, tally: Tally) -> None:
        suspects = [one.id for one in found.suspects]

        def write(tx: sa.Connection) -> tuple[int, int]:
            new = store.suspect(tx, suspects, now, bound_before)
            deeds.add(tx, Deed.ORPHANS_SUSPECTED, new, now)
            return new, store.clear(tx, [one.id for one in found.recovered])

        suspected, recovered = self._uow.run(write)
        tally.suspected += suspected
        tally.recovered += recovered
        for one in found.suspects:
            LOG.info(
                "Request %s: instance %s has no allocation on resource provider %s",
                *(one.uuid, one.instance, one.provider),
            )

    def _settle(self, found: Findings, tally: Tally) -> None:
        """Ask whose the instances are that are known to have an allocation."""
        instances = sorted({one.instance for one in found.unowned})
        known = {instance: self._owners.project_of(instance) for instance in instances}
        now = self._now()

        def write(tx: sa.Connection) -> int:
            count = sum(
                store.settle(tx, ids, instance, project)
                for (instance, project), ids in orphans.owners(found.unowned, known).items()
            )
            deeds.add(tx, Deed.OWNERS_SETTLED, count, now)
            return count

        tally.settled += self._uow.run(write)

    def _free(self, tally: Tally) -> None:
        if self._stopped.is_set() or not tally.due:
            return
        if not orphans.believable(tally.orphans, tally.judged):
            LOG.error(
                "%s of %s bound requests have no allocation in Placement: that is too many to be "
                "believed, and none is freed. If Placement's database was restored or made anew, "
                "run 'nova-manage placement heal_allocations'; otherwise delete them yourself",
                tally.orphans,
                tally.judged,
            )
            return
        for provider, group in itertools.groupby(tally.due, key=lambda one: one.provider):
            if self._stopped.is_set():
                return
            # Asked again: the round may have taken minutes until here.
            consumers = self._consumers(provider)
            if consumers is None:
                continue
            still = (one for one in group if one.instance not in consumers)
            while some := list(itertools.islice(still, FREED)):
                self._release(some, tally)

    def _release(self, due: Sequence[Held], tally: Tally) -> None:
        by_uuid = {one.uuid: one for one in due}
        now = self._now()

        def write(tx: sa.Connection) -> tuple[list[Held], int]:
            rows = request_store.lock(tx, sorted(by_uuid))
            rows = [row for row in rows if orphans.unchanged(row, by_uuid[row["uuid"]])]
            if not rows:
                return [], 0
            done = unbinding.release(tx, rows, keep=True, now=now)
            self._telling.released(tx, rows, keep=True, failed=done.failed, orphans=True)
            deeds.add(tx, Deed.ORPHANS_FREED, done.count, now)
            return [by_uuid[row["uuid"]] for row in rows], done.jobs

        freed, jobs = self._uow.run(write)
        tally.freed += len(freed)
        for one in freed:
            LOG.warning(
                "Request %s is an orphan and was unbound: instance %s has had no allocation on "
                "resource provider %s since %s",
                *(one.uuid, one.instance, one.provider, one.orphan_since),
            )
        if jobs:
            self._wake_jobs()

    def _expire(self, tally: Tally) -> None:
        """Delete requests that were never bound, or not again, for longer than is wished."""
        seconds = self._conf.conductor.unbound_ttl
        if not seconds:
            return
        now = self._now()
        before = now - timedelta(seconds=seconds)

        def write(tx: sa.Connection) -> int:
            count = store.expire(tx, before, PAGE)
            deeds.add(tx, Deed.UNBOUND_EXPIRED, count, now)
            return count

        for _ in range(MOST_EXPIRED):
            if self._stopped.is_set():
                return
            count = self._uow.run(write)
            tally.expired += count
            if count < PAGE:
                return
