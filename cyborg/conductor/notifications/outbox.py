# SPDX-License-Identifier: Apache-2.0
"""Deliver events to Nova, and let operators retry or delete dead letters of the outbox.

An event may be delivered twice, which is harmless: Nova ignores events that it does not wait for.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.notifications.notifications import NOVA_EVENT
from cyborg.conductor.notifications.outbox_worker import Channel, OutboxWorker
from cyborg.core.errors import NotFound, WrongState
from cyborg.core.log import get_logger
from cyborg.core.validation import parse_uuid
from cyborg.db import old_rows
from cyborg.db.outbox import read
from cyborg.db.outbox import write as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

MAX_RETRY_DELAY = 30.0
"""Maximum seconds between two attempts. Short, because nova-compute waits 300 s for an event."""

PURGE_BATCH = 1000  # dead letters deleted in one sweep


class Sender(Protocol):
    """Interface of ``cyborg.clients.nova.Nova``."""

    def send(self, events: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Send events; return, for each event, its error, or None if no retry is needed."""


def create_nova_worker(
    conf: cfg.ConfigOpts, uow: UnitOfWork, nova: Sender, **options: Any
) -> OutboxWorker:
    """Create the worker that sends events to Nova; ``options`` are passed to OutboxWorker."""

    # The client is first used at the first event: a conductor that sends none may have no client.
    def send(events: Sequence[Mapping[str, Any]]) -> list[str | None]:
        return nova.send(events)

    channel = Channel(
        NOVA_EVENT, "Nova", send, conf.nova.request_timeout, MAX_RETRY_DELAY, "instance"
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
        def write(tx: sa.Connection) -> None:
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
