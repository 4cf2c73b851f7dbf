# SPDX-License-Identifier: Apache-2.0
"""Deliver the messages of the outbox, to Nova and to notification listeners.

The life of a message, up to the operator who retries or deletes a dead letter:

1. A transaction that changes an object writes the message of the change. So there is a message for
   each change that was committed, and none for a change that was rolled back.
2. A worker leases the messages that are due (``WorkLease``), with the older ones of their subjects,
   such as an instance: the messages of a subject are sent in the order in which they were written.
3. It sends them in batches, outside of any transaction: the destination may take seconds.
4. What was delivered is deleted. What was refused is due again later, after growing delays, and the
   later messages of its subject wait for it. If the destination is unavailable, the messages that
   were not sent are released.
5. After ``[conductor] outbox_attempts`` failed attempts the message is a dead letter: it is kept
   until an operator retries or deletes it, or it expires (``DeadLetters``).

If a conductor is killed between 3 and 4, its lease expires and another one sends the messages
again. So a message is delivered at least once, and its receiver ignores what it already knows.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import sqlalchemy as sa
from oslo_config import cfg

from cyborg import tracing
from cyborg.conductor.common.work_lease import Leasing, WorkLease
from cyborg.conductor.notifications.notifications import NOTIFICATION, NOVA_EVENT
from cyborg.core.errors import Invalid, NotFound, Unavailable, WrongState
from cyborg.core.log import MAX_TRACED_ATTEMPTS, get_logger
from cyborg.core.text import sanitize
from cyborg.core.validation import parse_uuid
from cyborg.db import old_rows
from cyborg.db.outbox import read
from cyborg.db.outbox import write as store
from cyborg.db.outbox.write import LeasedMessageRow
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.telemetry.recorder import DELIVERY_SECONDS, MetricRecorder
from cyborg.threads.failures import JITTER, RateLimitedLogger, compute_delay

LOG = get_logger(__name__)

BATCH = 64  # messages sent together
PURGE_BATCH = 1000  # dead letters deleted in one sweep
# Seconds between two attempts, at most: nova-compute waits 300 s for an event, and notifications
# are not urgent.
MAX_EVENT_DELAY = 30.0
MAX_NOTIFICATION_DELAY = 600.0
BLOCKED = "an older message of the same subject failed"


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


class _Round(NamedTuple):
    """Number of messages of a lease that were delivered, and whether all of them were tried."""

    delivered: int
    complete: bool


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
        self._metrics = metrics or MetricRecorder()
        self._leasing = Leasing(
            conf,
            f"messages to {channel.destination}",
            now=self._now,
            clock=clock,
            requests=2,  # a lease lasts for one that times out, and for the one after it
        )
        self._failure_log = RateLimitedLogger(clock, LOG)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Make ``run_once`` return after the current request; the other messages are released."""
        self._stopped.set()

    def run_once(self) -> int:
        """Deliver due messages until none is left or the destination fails; return their number."""
        delivered = 0
        while True:
            lease = self._leasing.begin(request_timeout=self._channel.send_timeout)
            rows = self._uow.run(partial(self._take, lease))
            round_ = self._deliver(lease, rows)
            delivered += round_.delivered
            if not round_.complete:
                self._uow.run(partial(store.release, owner=lease.owner))
            if rows:
                lease.ended()
            # Fewer messages than one lease can have: no other one is due.
            if not round_.complete or len(rows) < BATCH:
                return delivered

    def _take(self, lease: WorkLease, tx: sa.Connection) -> Sequence[LeasedMessageRow]:
        """Lease due messages and return them."""
        rows = store.lease(
            tx,
            self._channel.kind,
            owner=lease.owner,
            now=lease.start,
            until=lease.until,
            limit=BATCH,
        )
        if rows:
            lease.taken(len(rows), min(row["next_try_at"] for row in rows))
        return rows

    def _deliver(self, lease: WorkLease, rows: Sequence[LeasedMessageRow]) -> _Round:
        """Send leased messages, in batches, and record what became of each."""
        delivered, failed_subjects = 0, set[str]()
        batches = deque(_batches(rows))
        while batches:
            # Before each request: another conductor may send the rest when the lease has expired.
            if self._stopped.is_set() or not lease.has_time():
                return _Round(delivered, complete=False)
            batch = batches.popleft()
            # Sent now, they would overtake the failed one: a listener would see the end of a bind
            # before its start.
            if blocked := [row for row in batch if row["subject"] in failed_subjects]:
                self._record_failures(lease, blocked, BLOCKED)
            ready = [row for row in batch if row["subject"] not in failed_subjects]
            if not ready:
                continue
            match self._send(ready):
                case list(errors):
                    failed_subjects |= self._record_answers(lease, ready, errors)
                    delivered += errors.count(None)
                case Invalid() if len(subjects := _by_subject(ready)) > 1:
                    # One message may make the destination refuse all. So each subject is sent
                    # by itself, before the other batches.
                    batches.extendleft(reversed(subjects))
                case Invalid(message=error):
                    failed_subjects |= self._record_failures(lease, ready, error)
                case Unavailable(message=error):
                    self._failure_log.warn(
                        f"Cannot deliver {len(ready)} or more messages to "
                        f"{self._channel.destination}: {error}; retrying"
                    )
                    self._record_failures(lease, ready, error)
                    return _Round(delivered, complete=False)
        return _Round(delivered, complete=True)

    def _send(self, rows: Sequence[LeasedMessageRow]) -> list[str | None] | Invalid | Unavailable:
        """Send messages together; return the answers, or why the destination takes none of them.

        Invalid: it has refused the batch as a whole. Unavailable: it would take no further message.
        """
        traces = [row["trace_context"] for row in rows if row["attempts"] < MAX_TRACED_ATTEMPTS]
        try:
            with tracing.remote_spans(
                f"outbox.deliver {self._channel.kind}", traces, messages=len(rows)
            ):
                return [*self._channel.send([row["payload"] for row in rows])]
        except (Invalid, Unavailable) as exc:
            return exc  # ``_deliver`` decides, by the rest of the messages

    def _record_answers(
        self, lease: WorkLease, rows: Sequence[LeasedMessageRow], errors: Sequence[str | None]
    ) -> set[str]:
        """Delete the delivered messages, and record the errors of the others.

        Return the subjects that have failed.
        """
        self._failure_log.recovered(self._channel.destination)
        delivered = [row for row, error in zip(rows, errors, strict=True) if error is None]
        if delivered:
            ids = [row["id"] for row in delivered]
            # Rows of another owner stay: a message that another conductor has leased since is
            # delivered twice, not lost.
            self._uow.run(lambda tx: store.delete_delivered(tx, lease.owner, ids))
            now = self._now()
            for row in delivered:
                seconds = (now - row["created_at"]).total_seconds()
                self._metrics.observe(DELIVERY_SECONDS, seconds, self._channel.kind)
        failed_subjects = set[str]()
        # By error: all messages with the same error are one UPDATE.
        for error in sorted({error for error in errors if error is not None}):
            failed = [row for row, answer in zip(rows, errors, strict=True) if answer == error]
            failed_subjects |= self._record_failures(lease, failed, error)
        return failed_subjects

    def _record_failures(
        self, lease: WorkLease, rows: Sequence[LeasedMessageRow], error: str
    ) -> set[str]:
        """Record a failed attempt for due messages; messages sent early keep their schedule.

        Return the subjects of all of them.
        """
        error = sanitize(error)  # may contain text of the destination
        due = [row for row in rows if row["next_try_at"] <= lease.start]
        delays = {row["id"]: self._draw_delay(row) for row in due}
        early = [row["id"] for row in rows if row["id"] not in delays]

        def write(tx: sa.Connection) -> None:
            if delays:
                store.record_failure(tx, lease.owner, delays, error, self._now())
            if early:
                store.release(tx, lease.owner, early)

        self._uow.run(write)
        for row in due:
            if delays[row["id"]] is None:
                self._log_dead(row, error)
        return {row["subject"] for row in rows}

    def _draw_delay(self, row: LeasedMessageRow) -> float | None:
        """Return the seconds until the next try, None if the message becomes a dead letter."""
        if row["attempts"] + 1 >= self._conf.conductor.outbox_attempts:
            return None
        return compute_delay(row["attempts"], self._channel.max_retry_delay, JITTER.random())

    def _log_dead(self, row: LeasedMessageRow, error: str) -> None:
        name = self._channel.subject_field
        fields: dict[str, Any] = {name: row["subject"]} if name else {}
        LOG.error(
            "Delivery to %s of a message about %s failed %d times, moved to dead letters, retry or "
            "delete it: %s",
            self._channel.destination,
            row["subject"],
            self._conf.conductor.outbox_attempts,
            error,
            message_id=row["uuid"],
            **fields,
        )


def _batches(rows: Sequence[LeasedMessageRow]) -> Iterator[list[LeasedMessageRow]]:
    """Split messages into batches of at most BATCH messages.

    The messages of one subject are in one batch, unless they are more than BATCH.
    """
    batch: list[LeasedMessageRow] = []
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


def _by_subject(rows: Sequence[LeasedMessageRow]) -> list[list[LeasedMessageRow]]:
    # By row id within a subject: that is the order in which the messages were written.
    ordered = sorted(rows, key=lambda row: (row["subject"], row["id"]))
    return [list(group) for _, group in itertools.groupby(ordered, lambda row: row["subject"])]


class Sender(Protocol):
    """Interface of ``cyborg.clients.nova.Nova``."""

    def send(self, messages: Sequence[Mapping[str, Any]], /) -> list[str | None]:
        """Send messages; return, for each, its error, or None if it needs no retry."""


class TimedSender(Sender, Protocol):
    """Interface of ``cyborg.rpc.notifications.Notifier``."""

    timeout: float


def create_nova_worker(
    conf: cfg.ConfigOpts, uow: UnitOfWork, nova: Sender, **options: Any
) -> OutboxWorker:
    """Create the worker that sends events to Nova; ``options`` are passed to OutboxWorker."""
    channel = Channel(
        kind=NOVA_EVENT,
        destination="Nova",
        # Looked up at the first event: a conductor that sends none may have no client.
        send=lambda events: nova.send(events),  # noqa: PLW0108
        send_timeout=conf.nova.request_timeout,
        max_retry_delay=MAX_EVENT_DELAY,
        subject_field="instance",
    )
    # A second delivery does no harm: Nova ignores events that it does not wait for.
    return OutboxWorker(conf, uow, channel, **options)


def create_worker(
    conf: cfg.ConfigOpts, uow: UnitOfWork, notifier: TimedSender, **options: Any
) -> OutboxWorker:
    """Create the worker that sends notifications; ``options`` are passed to OutboxWorker."""
    channel = Channel(
        kind=NOTIFICATION,
        destination="notification listeners",
        send=notifier.send,
        send_timeout=notifier.timeout,
        max_retry_delay=MAX_NOTIFICATION_DELAY,
    )
    return OutboxWorker(conf, uow, channel, **options)


class DeadLetters:
    """Operations on dead letters: messages whose delivery failed too many times."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        wake: Callable[[], None] = lambda: None,
        *,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """``wake`` is called after the commit of a retried message."""
        self._conf = conf
        self._uow = uow
        self._wake = wake
        self._now = now or uow.clock

    def retry(self, uuid: str) -> None:
        """Make a dead letter due for delivery again. Raise Invalid, NotFound, WrongState."""
        uuid_, now = parse_uuid(uuid, "uuid"), self._now()
        self._change(uuid_, "retried", lambda tx: store.retry(tx, uuid_, now))
        LOG.info("Retrying dead letter", message_id=uuid_)
        self._wake()

    def delete(self, uuid: str) -> None:
        """Delete a dead letter. Raise Invalid, NotFound, WrongState."""
        uuid_ = parse_uuid(uuid, "uuid")
        self._change(uuid_, "deleted", lambda tx: store.delete(tx, uuid_))
        LOG.info("Deleted dead letter", message_id=uuid_)

    def sweep(self) -> int:
        """Delete dead letters older than ``dead_letter_ttl`` seconds; return their number."""
        expires_before = self._now() - timedelta(seconds=self._conf.conductor.dead_letter_ttl)
        purge = old_rows.DEAD_LETTERS.purge
        return self._uow.run(lambda tx: purge(tx, expires_before, PURGE_BATCH))

    def _change(self, uuid_: str, action: str, change: Callable[[sa.Connection], bool]) -> None:
        """Change a dead letter. Raise NotFound, and WrongState for another message."""

        def write(tx: sa.Connection) -> None:
            # The guarded change decides; the query is for the error alone.
            if change(tx):
                return
            message = read.get(tx, uuid_)
            if message is None:
                raise NotFound(f"the outbox has no message {uuid_}", uuid=uuid_)
            state = message["state"]
            raise WrongState(
                f"message {uuid_} is {state}, only a dead letter can be {action}",
                uuid=uuid_,
                state=state,
            )

        self._uow.run_once(write)
