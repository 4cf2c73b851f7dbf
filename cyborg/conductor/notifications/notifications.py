# SPDX-License-Identifier: Apache-2.0
"""Record notifications and events for Nova in the outbox, in the transaction of the change.

A separate worker sends them. No notification is written if ``[oslo_messaging_notifications]
driver`` is not set.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_context import context

from cyborg.core.binding.states import ArqState
from cyborg.core.notification import OPTIONAL_FIELDS, SCHEMAS, Event
from cyborg.core.text import to_iso
from cyborg.db.binding.write import ArqRow, NewArqRow
from cyborg.db.deployables import read as deployables
from cyborg.db.devices import read as devices
from cyborg.db.outbox import write as outbox
from cyborg.db.outbox.write import Message
from cyborg.rpc import notifications as notifier

# Kind of outbox messages to notification listeners.
NOTIFICATION = "notification"

# Kind of outbox messages to Nova.
NOVA_EVENT = "nova-event"
COMPLETED = "completed"
FAILED = "failed"


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
        # Stored in the message: the worker that sends it later has no request.
        caller = context.get_current()
        request_id = None if caller is None else caller.request_id
        occurred_at = to_iso(self._now())
        object_type, _, _ = event.partition(".")
        schema = SCHEMAS[object_type]
        return [
            Message(
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


Rows = Sequence[ArqRow]


@dataclass(frozen=True, slots=True)
class ArqEventRecorder:
    """Recorder of ARQ events in the outbox, for Nova and for notification listeners.

    An ARQ without an instance is not bound, but under the lease of its device context: its bind is
    recorded when it gets its instance. Each method executes one INSERT for the messages to Nova
    and to the listeners.
    """

    conf: cfg.ConfigOpts
    notifications: NotificationBuilder

    def record_created(self, tx: sa.Connection, rows: Sequence[NewArqRow]) -> None:
        """Record the creation of ARQs."""
        unbound = {"hostname": None, "device_rp_uuid": None, "instance_uuid": None}
        self._add(tx, self._build(Event.REQUEST_CREATED, rows, **unbound))

    def record_replaced(self, tx: sa.Connection, old: Rows, new: Rows) -> None:
        """Record that ARQs under a lease have new uuids: the former ones do not exist any more."""
        deleted = self._build(Event.REQUEST_DELETED, old, state=ArqState.DELETING)
        self._add(tx, deleted, self._build(Event.REQUEST_CREATED, new))

    def record_bind_started(self, tx: sa.Connection, rows: Rows) -> None:
        """Record that host work for ARQs starts. Nova gets an event at its end only."""
        rows, state = _with_instance(rows), ArqState.BIND_STARTED
        self._add(tx, self._build(Event.BIND_STARTED, rows, state=state))

    def record_bound(self, tx: sa.Connection, rows: Rows, *, has_nova_event: bool = True) -> None:
        """Record that ARQs are Bound; without ``has_nova_event`` for listeners only."""
        rows = _with_instance(rows)
        messages = self._build(Event.BOUND, rows, state=ArqState.BOUND)
        events = self._nova_messages(rows, COMPLETED) if has_nova_event else []
        self._add(tx, events, messages)

    def record_bind_failed(self, tx: sa.Connection, rows: Rows, error: str | None) -> None:
        """Record that the bind of ARQs failed."""
        rows = _with_instance(rows)
        messages = self._build(Event.BIND_FAILED, rows, state=ArqState.BIND_FAILED, error=error)
        self._add(tx, self._nova_messages(rows, FAILED), messages)

    def record_released(
        self,
        tx: sa.Connection,
        rows: Rows,
        *,
        keep: bool,
        failed: Rows = (),
        event: Event | None = None,
    ) -> None:
        """Record that ARQs were unbound if ``keep`` is True, else that they were deleted.

        The ARQs of a device context were unbound in any case. ``event`` replaces UNBOUND and
        REQUEST_DELETED. ``failed`` are other ARQs, whose bind failed because of this. Nova gets
        events only for ``failed``, because Nova itself requested the unbind or the deletion.
        """
        failed = _with_instance(failed)
        unbound = [row for row in rows if keep or row["context_id"] is not None]
        deleted = [row for row in rows if not keep and row["context_id"] is None]
        error = "an ARQ of the same instance was unbound or deleted"
        self._add(
            tx,
            self._nova_messages(failed, FAILED),
            self._build(event or Event.UNBOUND, unbound, state=ArqState.UNBOUND),
            self._build(event or Event.REQUEST_DELETED, deleted, state=ArqState.DELETING),
            self._build(Event.BIND_FAILED, failed, state=ArqState.BIND_FAILED, error=error),
        )

    def record_deleted(self, tx: sa.Connection, rows: Rows) -> None:
        """Record that the ARQs of a device context were deleted with the context."""
        self._add(tx, self._build(Event.REQUEST_DELETED, rows, state=ArqState.DELETING))

    def record_unbind_failed(self, tx: sa.Connection, rows: Rows, host: str, error: str) -> None:
        """Record that a host could not clean the former handles of unbound ARQs in time."""
        state, text = ArqState.UNBIND_FAILED, f"host {host}: {error}"
        self._add(tx, self._build(Event.UNBIND_FAILED, rows, state=state, error=text))

    def record_unbound(self, tx: sa.Connection, rows: Rows) -> None:
        """Record that ARQs in UnbindFailed are Unbound, because their former handles are clean."""
        self._add(tx, self._build(Event.UNBOUND, rows, state=ArqState.UNBOUND))

    def record_restored(self, tx: sa.Connection, rows: Rows) -> None:
        """Record that the devices of Bound ARQs were prepared again. Nova gets no event."""
        self._add(tx, self._build(Event.REQUEST_RESTORED, rows))

    def record_restore_failed(self, tx: sa.Connection, rows: Rows, error: str | None) -> None:
        """Record that a host could not prepare the devices of Bound ARQs again, and will retry."""
        self._add(tx, self._build(Event.RESTORE_FAILED, rows, error=error))

    def record_attached(self, tx: sa.Connection, rows: Rows) -> None:
        """Record that running guests got the devices of Bound ARQs. Nova gets no event."""
        self._add(tx, self._build(Event.REQUEST_ATTACHED, rows))

    def record_attach_failed(self, tx: sa.Connection, rows: Rows, error: str) -> None:
        """Record that running guests lack the devices of Bound ARQs; the agent will retry."""
        self._add(tx, self._build(Event.ATTACH_FAILED, rows, error=error))

    def _build(
        self, event: Event, rows: Iterable[Mapping[Any, Any]], **common: Any
    ) -> list[Message]:
        return self.notifications.build_messages(event, rows, **common)

    def _add(self, tx: sa.Connection, *messages: Iterable[Message]) -> None:
        outbox.add_all(tx, itertools.chain.from_iterable(messages))

    def _nova_messages(self, rows: Rows, status: str) -> list[Message]:
        if not self.conf.nova.send_events:
            return []
        # Nova does not know of an ARQ under a lease: it has no instance.
        return [
            Message(NOVA_EVENT, instance, _event(row, instance, status))
            for row in rows
            if (instance := row["instance_uuid"]) is not None
        ]


def _with_instance(rows: Rows) -> Rows:
    return [row for row in rows if row["instance_uuid"] is not None]


def _event(row: ArqRow, instance: str, status: str) -> dict[str, str]:
    return {
        "name": "accelerator-request-bound",
        "server_uuid": instance,
        "tag": str(row["uuid"]),
        "status": status,
    }
