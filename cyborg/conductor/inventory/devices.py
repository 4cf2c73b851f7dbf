# SPDX-License-Identifier: Apache-2.0
"""Change the status of devices."""

from collections.abc import Callable
from datetime import datetime

import sqlalchemy as sa

from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.errors import Invalid, NotFound
from cyborg.core.log import get_logger
from cyborg.core.validation import parse_uuid
from cyborg.core.wire.notification import Event
from cyborg.db.devices import read, windows
from cyborg.db.devices import write as store
from cyborg.db.outbox import write as outbox
from cyborg.db.providers import write as providers
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

ENABLED = "enabled"
MAINTAINING = "maintaining"


class Devices:
    """Operations on devices."""

    def __init__(
        self,
        uow: UnitOfWork,
        wake_publisher: Callable[[], None] = lambda: None,
        notifications: NotificationBuilder | None = None,
        *,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """``wake_publisher`` is called after a commit that changes resource providers."""
        self._uow = uow
        self._notifications = notifications
        self._wake_publisher = wake_publisher
        self._now = now or uow.clock

    def set_status(self, uuid: str, status: str) -> None:
        """Allow new binds of a device (enabled) or cordon it (maintaining).

        Bound ARQs stay bound. Setting the current status is not an error. A maintenance window of
        the device ends if it is enabled; if it is disabled, it stays disabled after the window.
        Raise Invalid, NotFound.
        """
        if status not in (ENABLED, MAINTAINING):
            raise Invalid(
                f"unknown status {str(status)[:40]!r}, expected {ENABLED!r} or {MAINTAINING!r}",
                field="status",
            )
        device = parse_uuid(uuid, "device uuid")
        now = self._now()

        def write(tx: sa.Connection) -> bool:
            windows.lock_status(tx, device)
            changed = store.set_status(tx, device, status, now)
            if changed is None:
                raise NotFound(f"no device {device}", device=device)
            if status == MAINTAINING:
                windows.set_next_status(tx, device, status)
            elif windows.delete(tx, device):
                self._record_event(tx, device, Event.MAINTENANCE_ENDED)
            if changed:
                providers.mark_stale_of_device(tx, device, now)
                is_enabled = status == ENABLED
                self._record_event(
                    tx, device, Event.DEVICE_ENABLED if is_enabled else Event.DEVICE_DISABLED
                )
            return changed

        if self._uow.run_once(write):
            LOG.info("Set status of device to %s", status, device=device)
            self._wake_publisher()

    def _record_event(self, tx: sa.Connection, device: str, event: Event) -> None:
        if self._notifications is not None and self._notifications.enabled:
            outbox.add_all(
                tx, self._notifications.build_messages(event, read.find(tx, uuids=[device]))
            )
