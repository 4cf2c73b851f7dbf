# SPDX-License-Identifier: Apache-2.0
"""Delivering what has been promised: at least once, in order, outside transactions, not for ever.

A delivery may be repeated: a conductor may die between a neighbour's answer and its own commit.
What fails is tried again after growing pauses, and in the end put aside as dead.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor.periodic import Complaints
from cyborg.core.backoff import pause
from cyborg.core.errors import Invalid, Unavailable
from cyborg.core.text import clean
from cyborg.db.store import outbox as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

BATCH = 64  # messages that are sent together


@dataclass(frozen=True, slots=True)
class Route:
    """How messages of one kind leave.

    ``send`` is given payloads in the order of writing and returns for each why it failed, or None
    when nothing is left to do about it. It raises Unavailable when the neighbour is away, and
    Invalid when it refuses them as a whole. It returns within ``seconds``. The pauses between two
    tries of a message grow to about ``longest`` seconds. ``neighbour`` is for the log.
    """

    kind: str
    neighbour: str
    send: Callable[[Sequence[Mapping[str, Any]]], Sequence[str | None]]
    seconds: float
    longest: float


class Delivery:
    """The one who delivers messages of one kind; several conductors may each have one."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        route: Route,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``now`` is the database's kind of time, naive UTC; ``clock`` counts seconds upwards."""
        self._conf = conf
        self._uow = uow
        self._route = route
        self._now = now
        self._clock = clock
        self._complaints = Complaints(clock)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Have ``run_once`` return after the request that is under way; the rest is given back."""
        self._stopped.set()

    def run_once(self) -> int:
        """Deliver what is due, until nothing is or the neighbour fails; return how many went."""
        delivered = 0
        while True:
            lease = _Lease(self._conf, self._route, self._now(), self._clock())
            rows = self._take(lease)
            # Those behind one that failed wait for it.
            failed: set[str] = set()
            for batch in _batches(rows):
                delivered += self._deliver(lease, batch, failed)
            if lease.over:
                self._uow.run(lambda tx, owner=lease.owner: store.give_back(tx, owner))  # type: ignore[misc]
            if lease.over or len(rows) < BATCH:
                return delivered

    def _take(self, lease: "_Lease") -> Sequence[sa.RowMapping]:
        return self._uow.run(
            lambda tx: store.lease(
                tx,
                self._route.kind,
                owner=lease.owner,
                now=lease.start,
                until=lease.until,
                limit=BATCH,
            )
        )

    def _deliver(self, lease: "_Lease", rows: Sequence[sa.RowMapping], failed: set[str]) -> int:
        """Send messages at once; what is refused as a whole, again subject by subject."""
        if lease.over or self._stopped.is_set() or not lease.has_time(self._clock()):
            lease.over = True
            return 0
        if behind := [row for row in rows if row["subject"] in failed]:
            self._failed(lease, behind, "an older message of the same subject failed", failed)
            rows = [row for row in rows if row["subject"] not in failed]
            if not rows:
                return 0
        try:
            answers = self._route.send([row["payload"] for row in rows])
        except Unavailable as bad:
            lease.over = True
            self._complaints.wrong(
                f"{len(rows)} or more messages for {self._route.neighbour} wait: {bad.message}"
            )
            self._failed(lease, rows, bad.message, failed)
            return 0
        except Invalid as bad:
            subjects = _by_subject(rows)
            if len(subjects) > 1:
                return sum(self._deliver(lease, one, failed) for one in subjects)
            self._failed(lease, rows, bad.message, failed)
            return 0
        self._complaints.right(self._route.neighbour)
        done = [row["id"] for row, why in zip(rows, answers, strict=True) if why is None]
        if done:
            self._uow.run(lambda tx: store.done(tx, lease.owner, done))
        for why in sorted({why for why in answers if why is not None}):
            bad_ones = [row for row, its in zip(rows, answers, strict=True) if its == why]
            self._failed(lease, bad_ones, why, failed)
        return len(done)

    def _failed(
        self, lease: "_Lease", rows: Sequence[sa.RowMapping], error: str, failed: set[str]
    ) -> None:
        """Count a failure against what was due; what only came along keeps its own time."""
        error = clean(error)  # it quotes what a neighbour said
        failed |= {row["subject"] for row in rows}
        most, longest = self._conf.conductor.outbox_attempts, self._route.longest
        delays = {
            row["id"]: None
            if row["attempts"] + 1 >= most
            else pause(row["attempts"], longest, random.random())  # noqa: S311
            for row in rows
            if row["next_try_at"] <= lease.start
        }
        early = [row["id"] for row in rows if row["id"] not in delays]

        def write(tx: sa.Connection) -> None:
            if delays:
                store.failed(tx, lease.owner, delays, error, self._now())
            if early:
                store.give_back(tx, lease.owner, early)

        self._uow.run(write)
        for row in rows:
            if delays.get(row["id"], 0.0) is None:
                LOG.error(
                    "Gave up telling %s of %s after %s attempts: %s. The message is kept as %s of "
                    "the outbox: retry or delete it",
                    *(self._route.neighbour, row["subject"], most, error, row["uuid"]),
                )


class _Lease:
    """The time for which a batch is ours: long enough for two requests that run out of time.

    It is ``over`` before that when the neighbour is away: what was not tried is given back.
    """

    def __init__(self, conf: cfg.ConfigOpts, route: Route, now: datetime, clock: float) -> None:
        self.owner = str(uuid4())
        self.start = now
        self._one = route.seconds
        length = max(conf.conductor.lease, 2 * self._one)
        self.until = now + timedelta(seconds=length)
        self._end = clock + length
        self.over = False

    def has_time(self, clock: float) -> bool:
        """Tell whether a request that starts now ends within the lease."""
        return bool(clock + self._one <= self._end)


def _batches(rows: Sequence[sa.RowMapping]) -> Iterator[list[sa.RowMapping]]:
    """Cut messages into batches; those of one subject stay together unless they fill more."""
    batch: list[sa.RowMapping] = []
    for group in _by_subject(rows):
        if batch and len(batch) + len(group) > BATCH:
            yield batch
            batch = []
        batch += group
        while len(batch) > BATCH:
            yield batch[:BATCH]
            batch = batch[BATCH:]
    if batch:
        yield batch


def _by_subject(rows: Sequence[sa.RowMapping]) -> list[list[sa.RowMapping]]:
    ordered = sorted(rows, key=lambda row: (str(row["subject"]), int(row["id"])))
    return [list(group) for _, group in itertools.groupby(ordered, lambda row: row["subject"])]
