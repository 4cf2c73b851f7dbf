# SPDX-License-Identifier: Apache-2.0
"""Begin, change and end the maintenance windows of devices.

A window ends by itself: the periodic sweep of any conductor deletes it and sets the status that the
device has afterwards, in one transaction that is guarded by the end of the window.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.inventory.devices import MAINTAINING, record_event
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.attachments.attachment import AttachmentState, Mode, Step
from cyborg.core.errors import Conflict, Invalid, NotFound, WrongState
from cyborg.core.log import get_logger
from cyborg.core.maintenance import SuccessorMode, parse_window
from cyborg.core.notification import Event
from cyborg.core.validation import check_optional_text, parse_uuid
from cyborg.db.attachments import successors
from cyborg.db.attachments.write import restart
from cyborg.db.devices import write as store
from cyborg.db.providers import write as providers
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

# Windows that one sweep ends; the next sweep does the rest.
BATCH = 100
# Windows for whose devices one sweep plans successors, if they lack any: each device is read with
# all its handles. The next sweep goes on with the windows after them.
PLAN_BATCH = 50


@dataclass(eq=False)
class MaintenanceWindows:
    """Operations on maintenance windows.

    ``wake_publisher`` is called after a commit that changes resource providers,
    ``wake_attachments`` after one that adds successors. Without Nova there are no successors.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    notifications: NotificationBuilder
    wake_publisher: Callable[[], None] = lambda: None
    wake_attachments: Callable[[], None] = lambda: None
    has_nova: bool = True

    def __post_init__(self) -> None:
        self._last_planned = 0  # the row id of the last window whose successors a sweep planned

    def begin(self, request: Mapping[str, Any]) -> None:
        """Begin the window of a device, or change the one that it has.

        ``request`` has uuid (of the device), until, and optionally successor and user_id. The
        device gets the status ``maintaining`` at once; bound ARQs stay bound. Raise Invalid,
        NotFound, Conflict.
        """
        if not isinstance(request, Mapping):
            raise Invalid("expected an object", field="body")
        now = self.uow.clock()
        longest = timedelta(seconds=self.conf.conductor.max_maintenance)
        window = parse_window(request, now, longest)
        user = check_optional_text("user_id", request.get("user_id"))
        if window.successor is SuccessorMode.AUTO and not self.has_nova:
            raise Conflict(
                "successor: a successor needs Nova, and this installation has none: [nova] "
                "send_events is false",
                field="successor",
            )

        def write(tx: sa.Connection) -> None:
            status = store.lock_status(tx, window.device)
            if status is None:
                raise _not_found(window.device)
            values: dict[str, Any] = {"until": window.until, "user_id": user}
            if window.successor is not None:
                # A request without a mode leaves that of an existing window.
                is_auto = window.successor is SuccessorMode.AUTO
                values["successor"] = window.successor if is_auto else None
            is_new = store.put_window(tx, window.device, next_status=status, values=values)
            if store.set_status(tx, window.device, MAINTAINING, now):
                providers.mark_stale_of_devices(tx, [window.device], now)
            if is_new:
                record_event(tx, window.device, Event.MAINTENANCE_STARTED, self.notifications)
            # The operator asks now: failed successors do not wait for their next try.
            self._plan_successors(tx, window.device, now, is_due=True)

        self.uow.run_once(write)
        LOG.info("Maintenance until %sZ", window.until.isoformat(), device=window.device)
        self.wake_publisher()
        self.wake_attachments()

    def end(self, uuid: str) -> None:
        """End the window of a device now. Raise Invalid, NotFound, WrongState if it has none."""
        device = parse_uuid(uuid, "uuid")

        def write(tx: sa.Connection) -> None:
            if store.lock_status(tx, device) is None:
                raise _not_found(device)
            if not self._end(tx, device):
                raise WrongState(
                    f"device {device} has no maintenance window; device-enable enables a device "
                    "that an operator disabled",
                    device=device,
                )

        self.uow.run_once(write)
        self.wake_publisher()

    def sweep(self) -> int:
        """End the windows whose time has passed; plan missing successors in the open windows.

        Return the number of changes.
        """
        now = self.uow.clock()
        # A transaction for each device: an error does not undo the ends of the windows before it.
        due = self.uow.run(lambda tx: store.find_due_windows(tx, now, BATCH))
        ended = 0
        for device in due:
            if self.uow.run(partial(self._end_due, device=device, now=now)):
                ended += 1
                LOG.info("Maintenance window has ended", device=device)
        if ended:
            self.wake_publisher()
        planned = self._sweep_successors(now)
        return ended + planned + self.uow.run(lambda tx: self._purge(tx, now))

    def _purge(self, tx: sa.Connection, now: datetime) -> int:
        return store.purge_windows(tx, now, BATCH) + successors.purge(tx, SuccessorMode.AUTO, BATCH)

    def _sweep_successors(self, now: datetime) -> int:
        """Plan successors for contexts bound since the window began; retry failed successors."""
        mode, last = SuccessorMode.AUTO, self._last_planned
        ids = self.uow.run(lambda tx: successors.windows_after(tx, last, now, mode, PLAN_BATCH))
        self._last_planned = ids[-1] if len(ids) == PLAN_BATCH else 0
        if not ids:
            return 0
        devices = self.uow.run(lambda tx: successors.devices_to_plan(tx, now, mode, ids))
        planned = 0
        for device in devices:
            planned += self.uow.run(partial(self._plan_missing, device=device, now=now))
        if planned:
            self.wake_attachments()
        return planned

    def _plan_missing(self, tx: sa.Connection, device: str, now: datetime) -> int:
        """Plan the successors of a device, locked first: concurrent plans would insert the same."""
        if store.lock_status(tx, device) is None:
            return 0
        return self._plan_successors(tx, device, now)

    def _plan_successors(
        self, tx: sa.Connection, device: str, now: datetime, *, is_due: bool = False
    ) -> int:
        """Insert the missing successors of a locked device; retry the failed ones that are due.

        With ``is_due``, all failed successors are due. If the device has no open window with
        successors, do nothing: an operator may have ended it. Return the number of changes.
        """
        window = store.find_window(tx, device)
        if window is None or window["until"] <= now or window["successor"] != SuccessorMode.AUTO:
            return 0
        bound = {_to_key(row): row for row in successors.bound_contexts(tx, device)}
        # Those that have not exchanged their handles yet, also the failed ones.
        recorded = {_to_key(row): row for row in successors.recorded(tx, device)}
        deadline = now + timedelta(seconds=self.conf.conductor.attachment_timeout)
        new = [
            {
                **row,
                "uuid": str(uuid4()),
                "request_key": successors.record_key(
                    row["successor_of"], device, row["instance_uuid"]
                ),
                "maintained_device": device,
                "mode": str(Mode.NEXT_BOOT),
                "reboot": False,
                "state": str(AttachmentState.ATTACHING),
                "step": str(Step.ALLOCATE),
                "deadline": deadline,
                "created_at": now,
                "next_try_at": now,
            }
            for key, row in bound.items()
            if key not in recorded
        ]
        successors.insert_all(tx, new)
        due = [
            row["id"]
            for key, row in recorded.items()
            if row["state"] == AttachmentState.ERROR
            and key in bound
            and (is_due or row["next_try_at"] <= now)
        ]
        return len(new) + restart(tx, due, now, deadline)

    def _end_due(self, tx: sa.Connection, device: str, now: datetime) -> bool:
        return store.lock_status(tx, device) is not None and self._end(tx, device, now)

    def _end(self, tx: sa.Connection, device: str, due_by: datetime | None = None) -> bool:
        """Delete the window of a locked device and set its status; return False if it has none.

        The status is the one that the device has after the window. With ``due_by``, a window that
        ends later stays, as if there were none: an operator may have extended it.
        """
        window = store.find_window(tx, device)
        if window is None or not store.delete_window(tx, device, due_by):
            return False
        now = self.uow.clock()
        if store.set_status(tx, device, window["next_status"], now):
            providers.mark_stale_of_devices(tx, [device], now)
        record_event(tx, device, Event.MAINTENANCE_ENDED, self.notifications)
        return True


class _ContextInstance(NamedTuple):
    """A context and the instance that it is bound to: a device has one successor for each pair."""

    context: str
    instance: str


def _to_key(row: Mapping[str, Any]) -> _ContextInstance:
    """Return the key of a successor or of a bound context."""
    return _ContextInstance(row["successor_of"], row["instance_uuid"])


def _not_found(device: str) -> NotFound:
    return NotFound(f"no device {device}", device=device)
