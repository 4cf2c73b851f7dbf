# SPDX-License-Identifier: Apache-2.0
"""Notifications: written to the outbox with what they tell of, sent by a loop of their own.

With ``[oslo_messaging_notifications] driver`` unset nothing is written at all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_context import context
from oslo_utils import timeutils

from cyborg.conductor.delivery import Delivery, Route
from cyborg.core.notification import Event, notification
from cyborg.db.read import deployables
from cyborg.db.store import outbox
from cyborg.db.store.outbox import Message
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc import notifier

NOTIFICATION = "notification"
"""The kind of the outbox's messages to listeners."""

LONGEST_PAUSE = 600.0
"""Seconds between two tries of a notification: nobody waits for it, and a broker may be long."""


class Sender(Protocol):
    """What sends notifications: ``cyborg.rpc.notifier.Notifier``."""

    seconds: float

    def send(self, messages: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Send messages and return for each why it was not sent, None when it was."""


class Notices:
    """What is told to listeners, as messages for ``outbox.add_all``."""

    def __init__(
        self, conf: cfg.ConfigOpts, *, now: Callable[[], datetime] = timeutils.utcnow
    ) -> None:
        """``enabled`` tells whether anybody is told at all."""
        self.enabled = notifier.is_wanted(conf)
        self._now = now

    def rows(
        self, event: Event, objects: Iterable[Mapping[Any, Any]], **more: Any
    ) -> list[Message]:
        """Return a message for each object; none, and no cost, when nobody is told.

        An object is a row with at least the fields of its schema; ``more`` holds those that are
        the same for all, such as ``state`` or ``error``.
        """
        if not self.enabled:
            return []
        asker = context.get_current()
        request_id = None if asker is None else asker.request_id
        now = self._now()
        return [
            (
                NOTIFICATION,
                str(row["uuid"]),
                notification(
                    event, {**row, **more}, id_=str(uuid4()), at=now, request_id=request_id
                ),
            )
            for row in objects
        ]

    def programming(self, tx: sa.Connection, deployable: str, image: str) -> None:
        """Tell that a deployable begins to be loaded with an image."""
        self._of_deployable(tx, Event.PROGRAM_STARTED, deployable, image=image)

    def programmed(
        self, tx: sa.Connection, deployable: str, image: str, *, good: bool, error: str | None
    ) -> None:
        """Tell how loading a deployable with an image ended."""
        event = Event.PROGRAMMED if good else Event.PROGRAM_FAILED
        self._of_deployable(tx, event, deployable, image=image, error=error)

    def _of_deployable(self, tx: sa.Connection, event: Event, uuid: str, **more: Any) -> None:
        if self.enabled:
            outbox.add_all(tx, self.rows(event, deployables.find(tx, uuids=[uuid]), **more))


def delivery(conf: cfg.ConfigOpts, uow: UnitOfWork, sender: Sender, **clocks: Any) -> Delivery:
    """Return the one who sends what ``Notices`` has written; ``clocks`` are those of Delivery."""
    route = Route(
        NOTIFICATION, "notification listeners", sender.send, sender.seconds, LONGEST_PAUSE
    )
    return Delivery(conf, uow, route, **clocks)
