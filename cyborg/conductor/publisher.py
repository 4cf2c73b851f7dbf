# SPDX-License-Identifier: Apache-2.0
"""Bringing Placement to what the database wants, provider by provider.

What is wanted is rendered anew each time from the tables, never from what was told before. Several
conductors may publish at once: a lease keeps them apart, and where a lease ran out too early the
generations of Placement decide.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils

from cyborg.clients.placement import Known, Placement
from cyborg.conductor import rendering
from cyborg.conductor.provider_tree import Bringer, in_order
from cyborg.conductor.roots import Roots
from cyborg.core.deed import Deed
from cyborg.core.errors import CyborgError, InUse, NotFound, Unavailable
from cyborg.core.provider_tree import Provider
from cyborg.db.store import deeds, deployables
from cyborg.db.store import providers as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

BATCH = 64  # providers of one lease
LONGEST_DELAY = 60.0  # seconds; a compute node's provider appears when nova-compute first starts
QUIET = 60.0  # seconds between two complaints that Placement is away
MISSES = 16  # providers without an answer, one after another, that end a round in any case
INTERNAL = "internal error: the conductor's log has it"
NOBODY = "no-such-resource-provider"  # whom we ask for to see whether Placement answers

Row = Mapping[Any, Any]


@dataclass(slots=True)
class _Outcome:
    """What came of some providers: revisions by uuid, and errors by row."""

    published: dict[str, int] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)
    failed: list[tuple[Row, str, float]] = field(default_factory=list)
    unanswered: dict[str, str] = field(default_factory=dict)
    repaired: int = 0

    def covers(self, row: Row) -> bool:
        """Tell whether something came of this row."""
        uuid = row["uuid"]
        return (
            uuid in self.published
            or uuid in self.gone
            or uuid in self.unanswered
            or any(other["uuid"] == uuid for other, _, _ in self.failed)
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """A lease: whose, until when on our clock, of which rows, and what is wanted of them."""

    owner: str
    end: float
    rows: Sequence[Row]
    desired: Mapping[str, Row]


class Publisher:
    """The one who tells Placement; several conductors may each have one."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        placement: Placement,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``now`` is the database's kind of time, naive UTC; ``clock`` counts seconds upwards."""
        self._conf = conf
        self._uow = uow
        self._placement = placement
        self._roots = Roots(placement, uow)
        self._bringer = Bringer(placement)
        self._now = now
        self._clock = clock
        self._complained = -QUIET
        self._misses = 0
        self._away = False
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Have ``run_once`` return after the provider it is at."""
        self._stopped.set()

    def run_once(self) -> int:
        """Publish what is due until nothing is or Placement is away; return how many were.

        What got no answer is tried once a round, in which it stays leased, and is due again at the
        next: some providers that Placement fails at keep nobody else waiting.
        """
        count = 0
        self._misses, self._away = 0, False
        unanswered: list[tuple[str, str, str]] = []
        work = self._uow.run(self._take)
        while work is not None:
            outcome = self._batch(work)
            unanswered += [(work.owner, uuid, told) for uuid, told in outcome.unanswered.items()]
            count += len(outcome.published) + len(outcome.gone)
            work = self._uow.run(
                lambda tx, work=work, outcome=outcome: self._next(tx, work, outcome)  # type: ignore[misc]
            )
        if unanswered:
            self._uow.run(lambda tx: store.unanswered(tx, unanswered))
        return count

    def _take(self, tx: sa.Connection) -> _Work | None:
        """Lease what is due, and read after that what is wanted.

        Nothing is read in this transaction before the lease has its locks: a database that shows a
        transaction one moment of the past would show what was wanted before.
        """
        if self._stopped.is_set():
            return None
        timeout = self._conf.placement.request_timeout
        length = max(self._conf.conductor.lease, 3 * timeout)
        owner, end, now = str(uuid4()), self._clock() + length - timeout, self._now()
        until = now + timedelta(seconds=length)
        rows = store.lease(tx, owner=owner, now=now, until=until, limit=BATCH)
        if not rows:
            return None
        desired = deployables.desired(tx, [row["uuid"] for row in rows])
        return _Work(owner, end, rows, {row["uuid"]: row for row in desired})

    def _next(self, tx: sa.Connection, work: _Work, outcome: _Outcome) -> _Work | None:
        """Record what came of a lease and take the next one, unless Placement is away."""
        self._record(tx, work, outcome)
        return None if self._away else self._take(tx)

    def _batch(self, work: _Work) -> _Outcome:
        """Publish leased rows until the lease is about to end or Placement is away."""
        outcome, rows, desired, end = _Outcome(), work.rows, work.desired, work.end
        ordered = sorted(rows, key=lambda row: str(row["host"]))
        self._roots.told({row["host"]: row["identity"] for row in desired.values()})
        for host, group in itertools.groupby(ordered, key=lambda row: str(row["host"])):
            some = list(group)
            try:
                self._host(host, some, desired, end, outcome)
            except Unavailable as bad:
                self._missed([row for row in some if not outcome.covers(row)], bad, outcome)
            except CyborgError as bad:
                self._all_failed(some, bad.message, outcome)
            except Exception:
                LOG.exception("Publishing what %s has failed for a reason nobody foresaw", host)
                self._all_failed(some, INTERNAL, outcome)
            if self._away:
                break
        if self._away:
            told = next(reversed(outcome.unanswered.values()))
            left = [row["uuid"] for row in rows if not outcome.covers(row)]
            outcome.unanswered |= dict.fromkeys(left, told)
        return outcome

    def _host(
        self,
        host: str,
        rows: Sequence[Row],
        desired: Mapping[str, Row],
        end: float,
        outcome: _Outcome,
    ) -> None:
        if self._is_over(end):
            return
        root, missing = None, None
        if any(row["uuid"] in desired for row in rows):
            root, missing = self._root(host, anew=any(row["audited"] for row in rows))
        tree = self._tree(host, root, rows)
        mine = [desired[row["uuid"]] for row in rows if row["uuid"] in desired]
        wanted = rendering.wanted(root.uuid, mine) if root else {}
        for row in in_order(rows, tree, wanted):
            if self._is_over(end):
                return
            uuid = row["uuid"]
            try:
                if uuid in desired and missing is not None:
                    self._close(desired[uuid], tree.get(uuid), end)
                    raise missing
                self._provider(row, wanted.get(uuid), tree, outcome, end)
            except Unavailable as bad:
                self._missed([row], bad, outcome)
                continue
            except CyborgError as bad:
                if not isinstance(bad, InUse):
                    # Perhaps what was taken for the compute node's provider is none any longer.
                    self._roots.forget(host)
                self._failed(outcome, row, bad.message)
            except Exception:
                LOG.exception("Publishing %s failed for a reason nobody foresaw", row["name"])
                self._failed(outcome, row, INTERNAL)
            else:
                gone = uuid not in desired
                (outcome.gone if gone else outcome.published)[uuid] = row["revision"]
            self._misses = 0

    def _is_over(self, end: float) -> bool:
        return self._stopped.is_set() or self._away or self._clock() > end

    def _root(self, host: str, *, anew: bool) -> tuple[Known | None, NotFound | None]:
        """Find the provider of a compute node, ``anew`` without what is remembered of it."""
        if anew:
            self._roots.forget(host)
        try:
            return self._roots.find(host), None
        except NotFound as missing:
            return None, missing

    def _tree(self, host: str, root: Known | None, rows: Sequence[Row]) -> dict[str, Known]:
        """Return what Placement has of these rows and what is around it, in as few calls as may be.

        A row that Placement was never told of is taken for one that it does not have: if it is
        there all the same, making it is a conflict. One row is asked for by itself, as the tree
        of a large host is a large answer.
        """
        told = [row for row in rows if row["published"]]
        tree: dict[str, Known] = {}
        if len(told) > 1:
            # Any of them leads to its tree, if nobody knows where that should hang.
            tree = self._placement.tree(root.uuid if root else told[0]["uuid"])
            if not tree:
                self._roots.forget(host)
        for row in told:
            # Somebody may have moved it to another tree.
            if row["uuid"] not in tree and (known := self._placement.get(row["uuid"])):
                tree[known.uuid] = known
        return tree

    def _close(self, row: Row, known: Known | None, end: float) -> None:
        """Close what must be closed where it is, as long as nobody knows where it should be."""
        if known is None or not rendering.closed(row):
            return
        (wanted,) = rendering.wanted(known.uuid, [row]).values()
        wanted = replace(wanted, name=known.name, parent_uuid=known.parent_uuid)
        self._bringer.bring(known.uuid, wanted, known, late=lambda: self._clock() > end)

    def _provider(
        self,
        row: Row,
        wanted: Provider | None,
        tree: Mapping[str, Known],
        outcome: _Outcome,
        end: float,
    ) -> None:
        uuid, known = row["uuid"], tree.get(row["uuid"])
        done = self._bringer.bring(
            uuid, wanted, known, audited=row["audited"], late=lambda: self._clock() > end
        )
        if done:
            outcome.repaired += 1
            LOG.warning(
                "Resource provider %s was repaired, which somebody else had changed: %s",
                row["name"],
                "; ".join(done),
            )

    def _missed(self, rows: Sequence[Row], bad: Unavailable, outcome: _Outcome) -> None:
        """Note what got no answer, and find out whether nothing would get one."""
        self._misses += 1
        outcome.unanswered |= {row["uuid"]: bad.message for row in rows}
        self._complain(bad)
        self._away = self._misses >= MISSES or not self._answers()

    def _answers(self) -> bool:
        try:
            self._placement.find(NOBODY)
        except Unavailable:
            return False
        except CyborgError:
            return True  # a refusal is an answer
        return True

    def _all_failed(self, rows: Sequence[Row], error: str, outcome: _Outcome) -> None:
        """Record that a host cannot be published, which must keep no other waiting."""
        for row in [row for row in rows if not outcome.covers(row)]:
            self._failed(outcome, row, error)

    def _failed(self, outcome: _Outcome, row: Row, error: str) -> None:
        level = LOG.debug if row["attempts"] else LOG.warning
        level("Resource provider %s is not published: %s", row["name"], error)
        delay = min(LONGEST_DELAY, 2.0 ** min(row["attempts"], 16))
        outcome.failed.append((row, error, delay))

    def _record(self, tx: sa.Connection, work: _Work, outcome: _Outcome) -> None:
        now, owner = self._now(), work.owner
        store.published(tx, owner, outcome.published)
        store.gone(tx, owner, outcome.gone)
        store.failed(
            tx,
            owner,
            [
                (row["uuid"], error, now + timedelta(seconds=delay))
                for row, error, delay in outcome.failed
            ],
        )
        deeds.add(tx, Deed.DRIFT_REPAIRED, outcome.repaired, now)
        if left := [row["uuid"] for row in work.rows if not outcome.covers(row)]:
            store.give_back(tx, owner, left)

    def _complain(self, bad: CyborgError) -> None:
        if self._clock() - self._complained >= QUIET:
            self._complained = self._clock()
            LOG.warning("%s; resource providers wait to be published", bad.message)
