# SPDX-License-Identifier: Apache-2.0
"""Write notifications to the outbox in the transaction of the change; a separate worker sends them.

Nothing is written if ``[oslo_messaging_notifications] driver`` is not set.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_context import context

from cyborg.conductor.notifications.outbox_worker import Channel, OutboxWorker
from cyborg.core.timestamps import to_iso
from cyborg.core.wire.notification import OPTIONAL_FIELDS, SCHEMAS, Event
from cyborg.db.deployables import read as deployables
from cyborg.db.devices import read as devices
from cyborg.db.outbox import write as outbox
from cyborg.db.outbox.write import Message
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc import notifiers as notifier

NOTIFICATION = "notification"
"""Kind of outbox messages to notification listeners."""

MAX_RETRY_DELAY = 600.0
"""Maximum seconds between two attempts. Long, because notifications are not urgent."""


class Sender(Protocol):
    """Interface of ``cyborg.rpc.notifiers.Notifier``."""

    timeout: float

    def send(self, messages: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Send messages; return, for each message, its error, or None if it was sent."""


class NotificationBuilder:
    """Builder of notifications, as messages for ``outbox.add_all``."""

    def __init__(self, conf: cfg.ConfigOpts, *, now: Callable[[], datetime]) -> None:
        """``enabled`` is False if notifications are not configured; ``now`` returns naive UTC."""
        self.enabled = notifier.is_enabled(conf)
        self._now = now

    def build_messages(
        self, event: Event, objects: Iterable[Mapping[Any, Any]], **common: Any
    ) -> list[Message]:
        """Return a message for each object, or nothing if notifications are disabled.

        An object is a row with at least the fields of the payload schema. ``common`` are fields
        with the same value for all objects, such as ``state`` or ``error``. Raise KeyError if an
        object lacks a field.
        """
        if not self.enabled:
            return []
        caller = context.get_current()
        request_id = None if caller is None else caller.request_id
        occurred_at = to_iso(self._now())
        schema = SCHEMAS[event.partition(".")[0]]
        return [
            (
                NOTIFICATION,
                str(row["uuid"]),
                {
                    "event_type": str(event),
                    "priority": "ERROR" if event.endswith(".error") else "INFO",
                    "payload": {
                        "schema": schema.name,
                        "version": schema.version,
                        "notification_id": str(uuid4()),  # by which listeners detect duplicates
                        "occurred_at": occurred_at,
                        "request_id": request_id,
                        "data": {name: _value_of(name, row, common) for name in schema.fields},
                    },
                },
            )
            for row in objects
        ]

    def record_program_started(self, tx: sa.Connection, deployable: str, image: str) -> None:
        """Record that programming a deployable with an image starts."""
        self._record_for_deployable(tx, Event.PROGRAM_STARTED, deployable, image=image)

    def record_program_finished(
        self, tx: sa.Connection, deployable: str, image: str, *, succeeded: bool, error: str | None
    ) -> None:
        """Record the result of programming a deployable with an image."""
        event = Event.PROGRAMMED if succeeded else Event.PROGRAM_FAILED
        self._record_for_deployable(tx, event, deployable, image=image, error=error)

    def record_layout_finished(
        self, tx: sa.Connection, device: str, layout: str, error: str | None
    ) -> None:
        """Record the result of applying a layout to a device; ``error`` is None if it succeeded."""
        if self.enabled:
            event = Event.LAYOUT_APPLIED if error is None else Event.LAYOUT_FAILED
            rows = devices.find(tx, uuids=[device])
            outbox.add_all(tx, self.build_messages(event, rows, layout=layout, error=error))

    def _record_for_deployable(
        self, tx: sa.Connection, event: Event, uuid: str, **fields: Any
    ) -> None:
        if self.enabled:
            rows = deployables.find(tx, uuids=[uuid])
            outbox.add_all(tx, self.build_messages(event, rows, **fields))


def _value_of(name: str, row: Mapping[Any, Any], common: Mapping[str, Any]) -> Any:
    if name in common:
        return common[name]
    return row.get(name) if name in OPTIONAL_FIELDS else row[name]


def create_worker(
    conf: cfg.ConfigOpts, uow: UnitOfWork, sender: Sender, **options: Any
) -> OutboxWorker:
    """Create the worker that sends notifications; ``options`` are passed to OutboxWorker."""
    channel = Channel(
        NOTIFICATION, "notification listeners", sender.send, sender.timeout, MAX_RETRY_DELAY
    )
    return OutboxWorker(conf, uow, channel, **options)
