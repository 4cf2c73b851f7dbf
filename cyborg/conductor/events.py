# SPDX-License-Identifier: Apache-2.0
"""What Nova and listeners are told of requests, recorded with the state it tells of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.notices import Notices
from cyborg.core.notification import Event
from cyborg.core.states import RequestState
from cyborg.db.store import outbox

Rows = Sequence[Mapping[Any, Any]]

EVENT = "nova-event"
"""The kind of the outbox's messages to Nova."""

COMPLETED = "completed"
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Telling:
    """Who is told: Nova unless ``conf`` has none, and listeners; one INSERT for both."""

    conf: cfg.ConfigOpts
    notices: Notices

    def made(self, tx: sa.Connection, rows: Rows) -> None:
        """Tell of new requests."""
        unbound = {"hostname": None, "device_rp_uuid": None, "instance_uuid": None}
        outbox.add_all(tx, self.notices.rows(Event.REQUEST_CREATED, rows, **unbound))

    def started(self, tx: sa.Connection, rows: Rows) -> None:
        """Tell of requests whose host work begins; Nova waits for its end."""
        state = RequestState.BIND_STARTED
        outbox.add_all(tx, self.notices.rows(Event.BIND_STARTED, rows, state=state))

    def bound(self, tx: sa.Connection, rows: Rows) -> None:
        """Tell of requests that are Bound."""
        told = self.notices.rows(Event.BOUND, rows, state=RequestState.BOUND)
        outbox.add_all(tx, [*self._events(rows, COMPLETED), *told])

    def failed(self, tx: sa.Connection, rows: Rows, error: str | None) -> None:
        """Tell of requests whose bind failed."""
        state = RequestState.BIND_FAILED
        told = self.notices.rows(Event.BIND_FAILED, rows, state=state, error=error)
        outbox.add_all(tx, [*self._events(rows, FAILED), *told])

    def released(
        self, tx: sa.Connection, rows: Rows, *, keep: bool, failed: Rows = (), orphans: bool = False
    ) -> None:
        """Tell of requests that are unbound (``keep``) or deleted, and of others that this fails.

        Nova hears of the latter alone: it knows what it unbinds itself.
        """
        state = RequestState.UNBOUND if keep else RequestState.DELETING
        event = Event.UNBOUND if keep else Event.REQUEST_DELETED
        told = self.notices.rows(Event.ORPHAN_FREED if orphans else event, rows, state=state)
        why = "a request of the same instance was unbound or deleted"
        told += self.notices.rows(
            Event.BIND_FAILED, failed, state=RequestState.BIND_FAILED, error=why
        )
        outbox.add_all(tx, [*self._events(failed, FAILED), *told])

    def _events(self, rows: Rows, status: str) -> list[outbox.Message]:
        if not self.conf.nova.notify:
            return []
        return [(EVENT, str(row["instance_uuid"]), _event(row, status)) for row in rows]


def _event(row: Mapping[Any, Any], status: str) -> dict[str, str]:
    return {
        "name": "accelerator-request-bound",
        "server_uuid": str(row["instance_uuid"]),
        "tag": str(row["uuid"]),
        "status": status,
    }
