# SPDX-License-Identifier: Apache-2.0
"""Delivering what has been promised to Nova: at least once, outside transactions, not for ever.

A delivery may be repeated (a conductor may die between Nova's answer and its own commit); Nova
takes an event that it has had as one that nobody waits for.
"""

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor.binding import EVENT
from cyborg.conductor.periodic import Complaints
from cyborg.core.errors import Invalid, Unavailable
from cyborg.db.store import outbox as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

BATCH = 64  # events of one POST
LONGEST_DELAY = 300.0  # seconds; nova-compute waits as long for an event
TAKEN = frozenset({200, 404, 422})
"""Nova's codes after which an event is done: taken; the instance is gone; it has no host yet."""


class Sender(Protocol):
    """What posts events: `cyborg.clients.nova.Nova`."""

    def send(self, events: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Post events and return the status code of each."""


class Outbox:
    """The one who delivers; several conductors may each have one."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        nova: Sender,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``now`` is the database's kind of time, naive UTC; ``clock`` counts seconds upwards."""
        self._conf = conf
        self._uow = uow
        self._nova = nova
        self._now = now
        self._clock = clock
        self._complaints = Complaints(clock)

    def run_once(self) -> int:
        """Deliver what is due, until nothing is or Nova fails; return how many were delivered."""
        delivered = 0
        while True:
            lease = _Lease(self._conf, self._now(), self._clock())
            rows = self._take(lease)
            if not rows:
                return delivered
            delivered += self._deliver(lease, rows)
            if lease.over:
                self._give_back(lease)
                return delivered

    def _take(self, lease: "_Lease") -> Sequence[sa.RowMapping]:
        return self._uow.run(
            lambda tx: store.lease(
                tx, EVENT, owner=lease.owner, now=lease.start, until=lease.until, limit=BATCH
            )
        )

    def _give_back(self, lease: "_Lease") -> None:
        self._uow.run(lambda tx: store.give_back(tx, lease.owner))

    def _deliver(self, lease: "_Lease", rows: Sequence[sa.RowMapping]) -> int:
        """Post messages at once; what Nova refuses as a whole, again instance by instance."""
        if lease.over or not lease.has_time(self._clock()):
            lease.over = True
            return 0
        try:
            codes = self._nova.send([row["payload"] for row in rows])
        except Unavailable as bad:
            lease.over = True
            self._complaints.wrong(f"{len(rows)} or more events for Nova wait: {bad.message}")
            self._failed(lease, rows, bad.message)
            return 0
        except Invalid as bad:
            instances = _by_subject(rows)
            if len(instances) > 1:
                return sum(self._deliver(lease, one) for one in instances)
            self._failed(lease, rows, bad.message)
            return 0
        self._complaints.right("Nova")
        done = [row["id"] for row, code in zip(rows, codes, strict=True) if code in TAKEN]
        if done:
            self._uow.run(lambda tx: store.done(tx, lease.owner, done))
        for code in sorted(set(codes) - TAKEN):
            refused = [row for row, its in zip(rows, codes, strict=True) if its == code]
            self._failed(lease, refused, f"Nova answered {code} for this event")
        return len(done)

    def _failed(self, lease: "_Lease", rows: Sequence[sa.RowMapping], error: str) -> None:
        most = self._conf.conductor.outbox_attempts
        delays = {
            row["id"]: None if row["attempts"] + 1 >= most else _delay(row["attempts"])
            for row in rows
        }
        self._uow.run(lambda tx: store.failed(tx, lease.owner, delays, error, self._now()))
        for row in rows:
            if delays[row["id"]] is None:
                LOG.error(
                    "Gave up telling Nova of request %s of instance %s after %s attempts: %s",
                    row["payload"].get("tag"),
                    row["subject"],
                    most,
                    error,
                )


class _Lease:
    """The time for which a batch is ours: long enough for two requests that run out of time.

    It is ``over`` before that when Nova is away: what was not tried is given back.
    """

    def __init__(self, conf: cfg.ConfigOpts, now: datetime, clock: float) -> None:
        self.owner = str(uuid4())
        self.start = now
        self._one = conf.nova.request_timeout
        length = max(conf.conductor.lease, 2 * self._one)
        self.until = now + timedelta(seconds=length)
        self._end = clock + length
        self.over = False

    def has_time(self, clock: float) -> bool:
        """Tell whether a request that starts now ends within the lease."""
        return bool(clock + self._one <= self._end)


def _by_subject(rows: Sequence[sa.RowMapping]) -> list[list[sa.RowMapping]]:
    ordered = sorted(rows, key=lambda row: str(row["subject"]))
    return [list(group) for _, group in itertools.groupby(ordered, lambda row: row["subject"])]


def _delay(attempts: int) -> float:
    """Return the seconds until the next try: doubled each time, and never two alike."""
    return min(LONGEST_DELAY, 2.0**attempts) * random.uniform(0.5, 1.5)  # noqa: S311
