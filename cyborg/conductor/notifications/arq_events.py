# SPDX-License-Identifier: Apache-2.0
"""Record ARQ events for Nova and notification listeners in the transaction of the change."""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.binding.states import ArqState
from cyborg.core.wire.notification import Event
from cyborg.db.binding.write import ArqRow, NewArqRow
from cyborg.db.outbox import write as outbox

Rows = Sequence[ArqRow]

NOVA_EVENT = "nova-event"
"""Kind of outbox messages to Nova."""

COMPLETED = "completed"
FAILED = "failed"


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
        outbox.add_all(
            tx, self.notifications.build_messages(Event.REQUEST_CREATED, rows, **unbound)
        )

    def record_replaced(self, tx: sa.Connection, old: Rows, new: Rows) -> None:
        """Record that ARQs under a lease have new uuids: the former ones do not exist any more."""
        state = ArqState.DELETING
        messages = self.notifications.build_messages(Event.REQUEST_DELETED, old, state=state)
        messages += self.notifications.build_messages(Event.REQUEST_CREATED, new)
        outbox.add_all(tx, messages)

    def record_bind_started(self, tx: sa.Connection, rows: Rows) -> None:
        """Record that host work for ARQs starts. Nova gets an event at its end only."""
        rows, state = _with_instance(rows), ArqState.BIND_STARTED
        outbox.add_all(tx, self.notifications.build_messages(Event.BIND_STARTED, rows, state=state))

    def record_bound(self, tx: sa.Connection, rows: Rows) -> None:
        """Record that ARQs are Bound."""
        rows = _with_instance(rows)
        messages = self.notifications.build_messages(Event.BOUND, rows, state=ArqState.BOUND)
        outbox.add_all(tx, [*self._nova_messages(rows, COMPLETED), *messages])

    def record_bind_failed(self, tx: sa.Connection, rows: Rows, error: str | None) -> None:
        """Record that the bind of ARQs failed."""
        rows = _with_instance(rows)
        state = ArqState.BIND_FAILED
        messages = self.notifications.build_messages(
            Event.BIND_FAILED, rows, state=state, error=error
        )
        outbox.add_all(tx, [*self._nova_messages(rows, FAILED), *messages])

    def record_released(
        self, tx: sa.Connection, rows: Rows, *, keep: bool, failed: Rows = (), orphans: bool = False
    ) -> None:
        """Record that ARQs were unbound if ``keep`` is True, else that they were deleted.

        The ARQs of a device context were unbound in any case.
        ``failed`` are other ARQs, whose bind failed because of this. Nova gets events only for
        ``failed``, because Nova itself requested the unbind or the deletion.
        """
        failed, messages = _with_instance(failed), []
        for kept, state, event in (
            (True, ArqState.UNBOUND, Event.UNBOUND),
            (False, ArqState.DELETING, Event.REQUEST_DELETED),
        ):
            released = [row for row in rows if (keep or row["context_id"] is not None) is kept]
            messages += self.notifications.build_messages(
                Event.ORPHAN_FREED if orphans else event, released, state=state
            )
        error = "an ARQ of the same instance was unbound or deleted"
        messages += self.notifications.build_messages(
            Event.BIND_FAILED, failed, state=ArqState.BIND_FAILED, error=error
        )
        outbox.add_all(tx, [*self._nova_messages(failed, FAILED), *messages])

    def record_deleted(self, tx: sa.Connection, rows: Rows) -> None:
        """Record that the ARQs of a device context were deleted with the context."""
        state = ArqState.DELETING
        messages = self.notifications.build_messages(Event.REQUEST_DELETED, rows, state=state)
        outbox.add_all(tx, messages)

    def record_unbind_failed(self, tx: sa.Connection, rows: Rows, host: str, error: str) -> None:
        """Record that a host could not clean the former handles of unbound ARQs in time."""
        messages = self.notifications.build_messages(
            Event.UNBIND_FAILED, rows, state=ArqState.UNBIND_FAILED, error=f"host {host}: {error}"
        )
        outbox.add_all(tx, messages)

    def record_unbound(self, tx: sa.Connection, rows: Rows) -> None:
        """Record that ARQs in UnbindFailed are Unbound, because their former handles are clean."""
        messages = self.notifications.build_messages(Event.UNBOUND, rows, state=ArqState.UNBOUND)
        outbox.add_all(tx, messages)

    def record_restored(self, tx: sa.Connection, rows: Rows) -> None:
        """Record that the devices of Bound ARQs were prepared again. Nova gets no event."""
        outbox.add_all(tx, self.notifications.build_messages(Event.REQUEST_RESTORED, rows))

    def record_restore_failed(self, tx: sa.Connection, rows: Rows, error: str | None) -> None:
        """Record that a host could not prepare the devices of Bound ARQs again, and will retry."""
        messages = self.notifications.build_messages(Event.RESTORE_FAILED, rows, error=error)
        outbox.add_all(tx, messages)

    def _nova_messages(self, rows: Rows, status: str) -> list[outbox.Message]:
        if not self.conf.nova.send_events:
            return []
        # Nova does not know of an ARQ under a lease: it has no instance.
        return [
            (NOVA_EVENT, instance, _event(row, instance, status))
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
