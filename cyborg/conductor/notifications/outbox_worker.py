# SPDX-License-Identifier: Apache-2.0
"""Deliver outbox messages: at least once, in order, outside transactions, with limited retries.

A delivery is repeated if the conductor dies between the answer of the destination and its own
commit. A failed message is retried after increasing delays, and becomes a dead letter in the end.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from cyborg import tracing
from cyborg.conductor.common.work_lease import new_owner
from cyborg.core.errors import Invalid, Unavailable
from cyborg.core.log import MAX_TRACED_ATTEMPTS, get_logger
from cyborg.core.text import sanitize
from cyborg.db.outbox import write as store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.telemetry.recorder import DELIVERY_SECONDS, MetricRecorder
from cyborg.threads.failures import JITTER, RateLimitedLogger, compute_delay

LOG = get_logger(__name__)

BATCH = 64  # messages sent together


@dataclass(frozen=True, slots=True)
class Channel:
    """Delivery channel for messages of one kind.

    ``send`` gets payloads in the order in which they were written. For each it returns an error, or
    None if the message needs no retry. It raises Unavailable if the destination is unavailable, and
    Invalid if the destination rejects the batch. It returns within ``send_timeout`` seconds. Retry
    delays grow to about ``max_retry_delay`` seconds. ``destination`` is a name for the log,
    ``subject_field`` the log field that has the subject of a message.
    """

    kind: str
    destination: str
    send: Callable[[Sequence[Mapping[str, Any]]], Sequence[str | None]]
    send_timeout: float
    max_retry_delay: float
    subject_field: str | None = None


class OutboxWorker:
    """Outbox worker for one message kind. Safe to run in several conductors."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        channel: Channel,
        *,
        now: Callable[[], datetime] | None = None,
        clock: Callable[[], float] = time.monotonic,
        metrics: MetricRecorder | None = None,
    ) -> None:
        """``now`` returns naive UTC; ``clock`` returns monotonic seconds."""
        self._conf = conf
        self._uow = uow
        self._channel = channel
        self._now = now or uow.clock
        self._clock = clock
        self._metrics = metrics or MetricRecorder()
        self._failure_log = RateLimitedLogger(clock, LOG)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Make ``run_once`` return after the current request; the other messages are released."""
        self._stopped.set()

    def run_once(self) -> int:
        """Deliver due messages until none is left or the destination fails; return their number."""
        delivered = 0
        while True:
            lease = _Lease(self._conf, self._channel, self._now(), self._clock())
            rows = self._lease_messages(lease)
            # Later messages of a subject wait for a failed one.
            failed: set[str] = set()
            for batch in _batches(rows):
                delivered += self._deliver(lease, batch, failed)
            if lease.ended:
                self._uow.run(lambda tx, owner=lease.owner: store.release(tx, owner))  # type: ignore[misc]
            if lease.ended or len(rows) < BATCH:
                return delivered

    def _lease_messages(self, lease: "_Lease") -> Sequence[store.LeasedMessageRow]:
        return self._uow.run(
            lambda tx: store.lease(
                tx,
                self._channel.kind,
                owner=lease.owner,
                now=lease.start,
                until=lease.until,
                limit=BATCH,
            )
        )

    def _deliver(
        self, lease: "_Lease", rows: Sequence[store.LeasedMessageRow], failed: set[str]
    ) -> int:
        """Send messages together; if the batch is rejected, send each subject separately.

        Return the number of delivered messages. Add the subjects of failed messages to ``failed``.
        """
        if lease.ended or self._stopped.is_set() or not lease.has_time(self._clock()):
            lease.ended = True
            return 0
        if blocked := [row for row in rows if row["subject"] in failed]:
            self._record_failures(
                lease, blocked, "an older message of the same subject failed", failed
            )
            rows = [row for row in rows if row["subject"] not in failed]
            if not rows:
                return 0
        try:
            with tracing.remote_spans(
                f"outbox.deliver {self._channel.kind}",
                [row["trace_context"] for row in rows if row["attempts"] < MAX_TRACED_ATTEMPTS],
                messages=len(rows),
            ):
                answers = self._channel.send([row["payload"] for row in rows])
        except Unavailable as exc:
            lease.ended = True
            error = exc.message
        except Invalid as exc:
            error = exc.message
        else:
            return self._record_answers(lease, rows, answers, failed)
        if lease.ended:
            self._failure_log.warn(
                f"Cannot deliver {len(rows)} or more messages to {self._channel.destination}: "
                f"{error}; retrying"
            )
        elif len(subjects := _by_subject(rows)) > 1:
            return sum(self._deliver(lease, group, failed) for group in subjects)
        self._record_failures(lease, rows, error, failed)
        return 0

    def _record_answers(
        self,
        lease: "_Lease",
        rows: Sequence[store.LeasedMessageRow],
        answers: Sequence[str | None],
        failed: set[str],
    ) -> int:
        """Record the answer for each message; return the number of delivered messages."""
        self._failure_log.recovered(self._channel.destination)
        delivered = [row["id"] for row, error in zip(rows, answers, strict=True) if error is None]
        if delivered:
            self._uow.run(lambda tx: store.delete_delivered(tx, lease.owner, delivered))
            now = self._now()
            for row, error in zip(rows, answers, strict=True):
                if error is None:
                    seconds = (now - row["created_at"]).total_seconds()
                    self._metrics.observe(DELIVERY_SECONDS, seconds, self._channel.kind)
        for error in sorted({answer for answer in answers if answer is not None}):
            failed_rows = [
                row for row, answer in zip(rows, answers, strict=True) if answer == error
            ]
            self._record_failures(lease, failed_rows, error, failed)
        return len(delivered)

    def _record_failures(
        self, lease: "_Lease", rows: Sequence[store.LeasedMessageRow], error: str, failed: set[str]
    ) -> None:
        """Record a failed attempt for due messages; messages sent early keep their schedule."""
        error = sanitize(error)  # may contain text of the destination
        failed |= {row["subject"] for row in rows}
        max_attempts = self._conf.conductor.outbox_attempts
        max_delay = self._channel.max_retry_delay
        delays = {
            row["id"]: None
            if row["attempts"] + 1 >= max_attempts
            else compute_delay(row["attempts"], max_delay, JITTER.random())
            for row in rows
            if row["next_try_at"] <= lease.start
        }
        early = [row["id"] for row in rows if row["id"] not in delays]

        def write(tx: sa.Connection) -> None:
            if delays:
                store.record_failure(tx, lease.owner, delays, error, self._now())
            if early:
                store.release(tx, lease.owner, early)

        self._uow.run(write)
        for row in rows:
            if delays.get(row["id"], 0.0) is None:
                name = self._channel.subject_field
                fields: dict[str, Any] = {name: row["subject"]} if name else {}
                LOG.error(
                    "Delivery to %s of a message about %s failed %d times, moved to dead letters, "
                    "retry or delete it: %s",
                    self._channel.destination,
                    row["subject"],
                    max_attempts,
                    error,
                    message_id=row["uuid"],
                    **fields,
                )


class _Lease:
    """Lease of a batch of messages, long enough for two requests that time out.

    ``ended`` is set before this time if the destination is unavailable; messages that were not sent
    are then released.
    """

    def __init__(self, conf: cfg.ConfigOpts, channel: Channel, now: datetime, clock: float) -> None:
        self.owner = new_owner(conf.host)
        self.start = now
        self._send_timeout = channel.send_timeout
        length = max(conf.conductor.lease_timeout, 2 * self._send_timeout)
        self.until = now + timedelta(seconds=length)
        self._end = clock + length
        self.ended = False

    def has_time(self, clock: float) -> bool:
        """Return whether a request that starts now ends within the lease."""
        return bool(clock + self._send_timeout <= self._end)


def _batches(rows: Sequence[store.LeasedMessageRow]) -> Iterator[list[store.LeasedMessageRow]]:
    """Split messages into batches of at most BATCH messages.

    The messages of one subject are in one batch, unless they are more than BATCH.
    """
    batch: list[store.LeasedMessageRow] = []
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


def _by_subject(rows: Sequence[store.LeasedMessageRow]) -> list[list[store.LeasedMessageRow]]:
    ordered = sorted(rows, key=lambda row: (row["subject"], row["id"]))
    return [list(group) for _, group in itertools.groupby(ordered, lambda row: row["subject"])]
