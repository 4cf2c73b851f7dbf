# SPDX-License-Identifier: Apache-2.0
"""What operators decide about devices."""

from collections.abc import Callable
from datetime import datetime

import sqlalchemy as sa
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor.notices import Notices
from cyborg.core.errors import Invalid, NotFound
from cyborg.core.notification import Event
from cyborg.core.request import parse_uuid
from cyborg.db.read import devices as read
from cyborg.db.store import devices as store
from cyborg.db.store import outbox, providers
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

ENABLED = "enabled"
MAINTAINING = "maintaining"


class Devices:
    """What may be done to devices."""

    def __init__(
        self,
        uow: UnitOfWork,
        wake_publisher: Callable[[], None] = lambda: None,
        notices: Notices | None = None,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
    ) -> None:
        """``wake_publisher`` is called after a commit that Placement must be told of."""
        self._uow = uow
        self._notices = notices
        self._wake_publisher = wake_publisher
        self._now = now

    def set_status(self, uuid: str, status: str) -> None:
        """Open a device to new requests (enabled) or close it (maintaining).

        What is bound stays bound. To ask for what is so already is fine. Raises Invalid, NotFound.
        """
        if status not in (ENABLED, MAINTAINING):
            raise Invalid(
                f"status {str(status)[:40]!r} is neither {ENABLED!r} nor {MAINTAINING!r}",
                field="status",
            )
        device = parse_uuid(uuid, "device uuid")
        now = self._now()

        def write(tx: sa.Connection) -> bool:
            changed = store.set_status(tx, device, status)
            if changed is None:
                raise NotFound(f"no device {device}", device=device)
            if changed:
                providers.mark_device(tx, device, now)
                self._tell(tx, device, status)
            return changed

        if self._uow.run(write):
            LOG.info("Device %s is %s now", device, status)
            self._wake_publisher()

    def _tell(self, tx: sa.Connection, device: str, status: str) -> None:
        if self._notices is not None and self._notices.enabled:
            event = Event.DEVICE_ENABLED if status == ENABLED else Event.DEVICE_DISABLED
            outbox.add_all(tx, self._notices.rows(event, read.find(tx, uuids=[device])))
