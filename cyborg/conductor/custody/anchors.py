# SPDX-License-Identifier: Apache-2.0
"""A notification each day with the last record of each custody log.

A listener keeps it where nobody can change it with the database: later it shows whether the chain
of a device still has this record. Of several conductors one notifies of a chain, because it locks
the head.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from uuid import uuid4

import sqlalchemy as sa

from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.custody.chain import Link
from cyborg.core.custody.verify import format_anchors
from cyborg.core.wire.notification import Event
from cyborg.db.custody import chains
from cyborg.db.outbox import write as outbox
from cyborg.db.unit_of_work import UnitOfWork

INTERVAL = timedelta(days=1)
MAX_CHAINS = 200  # of one notification: about 30 kB


class CustodyAnchors:
    """Writer of the daily notifications; safe to run in several conductors."""

    def __init__(
        self, uow: UnitOfWork, notices: NotificationBuilder, now: Callable[[], datetime]
    ) -> None:
        self._uow = uow
        self._notices = notices
        self._now = now

    def sweep(self) -> int:
        """Write a notification of up to MAX_CHAINS chains whose last one is a day old.

        A head that no conductor wrote is left out. Return the number of chains.
        """
        if not self._notices.enabled:
            return 0
        now = self._now()
        return self._uow.run(lambda tx: self._write(tx, now))

    def _write(self, tx: sa.Connection, now: datetime) -> int:
        due = chains.lock_unanchored(tx, now - INTERVAL, MAX_CHAINS)
        if not due:
            return 0
        tips = {
            head["device_uuid"]: Link(head["sequence"], head["hash"])
            for head in due
            if chains.find_fault(tx, head) is None
        }
        row = {"uuid": str(uuid4()), "chains": format_anchors(tips)}
        outbox.add_all(tx, self._notices.build_messages(Event.CUSTODY_ANCHORED, [row]))
        chains.mark_anchored(tx, [head["id"] for head in due], now)
        return len(tips)
