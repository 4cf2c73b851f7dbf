# SPDX-License-Identifier: Apache-2.0
"""The outbox: what Nova has been promised, and what operators do about what nobody took.

Nova takes an event that it has had before as one that nobody waits for, so that it may get one
twice.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor.delivery import BATCH, Delivery, Route
from cyborg.conductor.events import EVENT
from cyborg.core.errors import NotFound, WrongState
from cyborg.core.request import parse_uuid
from cyborg.db.store import outbox as store
from cyborg.db.unit_of_work import UnitOfWork

__all__ = ["BATCH", "DeadLetters", "Outbox"]

LOG = log.getLogger(__name__)

LONGEST_PAUSE = 30.0
"""Seconds between two tries of an event: nova-compute waits 300, so that a Nova that comes back is
to hear of it soon."""

TAKEN = frozenset({200, 404, 422})
"""Nova's codes after which an event is done: taken; the instance is gone; it has no host yet."""

PURGED = 1000  # dead messages that one sweep forgets


class Sender(Protocol):
    """What posts events: `cyborg.clients.nova.Nova`."""

    def send(self, events: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Post events and return the status code of each."""


class Outbox(Delivery):
    """The one who delivers Nova's events; several conductors may each have one."""

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

        def send(events: Sequence[Mapping[str, Any]]) -> list[str | None]:
            codes = nova.send(events)
            return [None if c in TAKEN else f"Nova answered {c} for this event" for c in codes]

        route = Route(EVENT, "Nova", send, conf.nova.request_timeout, LONGEST_PAUSE)
        super().__init__(conf, uow, route, now=now, clock=clock)


class DeadLetters:
    """What may be done about messages that nobody took in the end."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        wake: Callable[[], None] = lambda: None,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
    ) -> None:
        """``wake`` is called after the commit of a message that is to be delivered again."""
        self._conf = conf
        self._uow = uow
        self._wake = wake
        self._now = now

    def retry(self, uuid: str) -> None:
        """Have a dead message delivered now. Raises Invalid, NotFound, WrongState."""
        letter, now = parse_uuid(uuid, "uuid"), self._now()
        self._change(letter, "retried", lambda tx: store.retry(tx, letter, now))
        LOG.info("Message %s of the outbox is tried again", letter)
        self._wake()

    def delete(self, uuid: str) -> None:
        """Forget a dead message. Raises Invalid, NotFound, WrongState."""
        letter = parse_uuid(uuid, "uuid")
        self._change(letter, "deleted", lambda tx: store.delete(tx, letter))
        LOG.info("Message %s of the outbox was deleted", letter)

    def sweep(self) -> int:
        """Forget what has been dead for longer than is wished; return how many that were."""
        before = self._now() - timedelta(seconds=self._conf.conductor.outbox_keep)
        return self._uow.run(lambda tx: store.purge(tx, before, PURGED))

    def _change(self, letter: str, done: str, change: Callable[[sa.Connection], bool]) -> None:
        def write(tx: sa.Connection) -> None:
            if change(tx):
                return
            state = store.state_of(tx, letter)
            if state is None:
                raise NotFound(f"the outbox has no message {letter}", uuid=letter)
            raise WrongState(
                f"message {letter} is {state}: only a dead one can be {done}",
                uuid=letter,
                state=state,
            )

        self._uow.run(write)
