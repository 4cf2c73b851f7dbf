# SPDX-License-Identifier: Apache-2.0
"""Record ARQ events for Nova and notification listeners in the transaction of the change."""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.arq.states import ArqState
from cyborg.core.wire.notification import Event
from cyborg.db.write import outbox
from cyborg.db.write.arqs import ArqRow, NewArqRow

Rows = Sequence[ArqRow]

NOVA_EVENT = "nova-event"
"""Kind of outbox messages to Nova."""

COMPLETED = "completed"
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ArqEventRecorder:
    """Recorder of ARQ events in the outbox, for Nova and for notification listeners.

    Each method executes one INSERT for the messages to Nova and to the listeners.
    """

    conf: cfg.ConfigOpts
    notifications: NotificationBuilder

    def record_created(self, tx: sa.Connection, rows: Sequence[NewArqRow]) -> None:
        """Record the creation of ARQs."""
        unbound = {"hostname": None, "device_rp_uuid": None, "instance_uuid": None}
        outbox.add_all(
            tx, self.notifications.build_messages(Event.REQUEST_CREATED, rows, **unbound)
        )

    def record_bind_started(self, tx: sa.Connection, rows: Rows) -> None:
        """Record that host work for ARQs starts. Nova gets an event at its end only."""
        state = ArqState.BIND_STARTED
        outbox.add_all(tx, self.notifications.build_messages(Event.BIND_STARTED, rows, state=state))

    def record_bound(self, tx: sa.Connection, rows: Rows) -> None:
        """Record that ARQs are Bound."""
        messages = self.notifications.build_messages(Event.BOUND, rows, state=ArqState.BOUND)
        outbox.add_all(tx, [*self._nova_messages(rows, COMPLETED), *messages])

    def record_bind_failed(self, tx: sa.Connection, rows: Rows, error: str | None) -> None:
        """Record that the bind of ARQs failed."""
        state = ArqState.BIND_FAILED
        messages = self.notifications.build_messages(
            Event.BIND_FAILED, rows, state=state, error=error
        )
        outbox.add_all(tx, [*self._nova_messages(rows, FAILED), *messages])

    def record_released(
        self, tx: sa.Connection, rows: Rows, *, keep: bool, failed: Rows = (), orphans: bool = False
    ) -> None:
        """Record that ARQs were unbound if ``keep`` is True, else that they were deleted.

        ``failed`` are other ARQs, whose bind failed because of this. Nova gets events only for
        ``failed``, because Nova itself requested the unbind or the deletion.
        """
        state = ArqState.UNBOUND if keep else ArqState.DELETING
        event = Event.UNBOUND if keep else Event.REQUEST_DELETED
        if orphans:
            event = Event.ORPHAN_FREED
        messages = self.notifications.build_messages(event, rows, state=state)
        error = "an ARQ of the same instance was unbound or deleted"
        messages += self.notifications.build_messages(
            Event.BIND_FAILED, failed, state=ArqState.BIND_FAILED, error=error
        )
        outbox.add_all(tx, [*self._nova_messages(failed, FAILED), *messages])

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
        return [(NOVA_EVENT, str(row["instance_uuid"]), _event(row, status)) for row in rows]


def _event(row: ArqRow, status: str) -> dict[str, str]:
    return {
        "name": "accelerator-request-bound",
        "server_uuid": str(row["instance_uuid"]),
        "tag": str(row["uuid"]),
        "status": status,
    }
