# SPDX-License-Identifier: Apache-2.0
"""Changes by users: labels of accelerators, attributes of deployables, status of devices.

Reports of agents change none of these. The tombstones of removed devices keep them; they are
written, and devices are restored from them, by reports, and deleted here when they expire.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc

from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.binding.accelerator import parse_label
from cyborg.core.errors import Conflict, Invalid, NotFound, WrongState
from cyborg.core.log import get_logger
from cyborg.core.notification import Event
from cyborg.core.text import to_iso
from cyborg.core.validation import check_optional_text, check_text, parse_uuid
from cyborg.db import old_rows
from cyborg.db.binding import accelerators
from cyborg.db.binding import write as arqs
from cyborg.db.deployables import write as deployables
from cyborg.db.devices import read
from cyborg.db.devices import write as store
from cyborg.db.outbox import write as outbox
from cyborg.db.providers import write as providers
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

ENABLED = "enabled"
MAINTAINING = "maintaining"
# Tombstones deleted in one sweep.
BATCH = 256


@dataclass(frozen=True)
class Accelerators:
    """Operations on accelerators."""

    uow: UnitOfWork

    def update(
        self, uuid: str, label: Mapping[str, Any], project_scope: str | None
    ) -> dict[str, Any]:
        """Change the label of an accelerator; return its row as plain values.

        ``project_scope`` limits the call to accelerators of one project; None means all projects. A
        label belongs to the ARQ that is bound to the accelerator. Raise Invalid, NotFound, and
        WrongState if the accelerator is not bound.
        """
        accelerator = parse_uuid(uuid, "uuid")
        changes = parse_label(label)
        # An empty scope is that of a token without a project, which has no accelerators.
        scope = "" if project_scope == "" else check_optional_text("project_scope", project_scope)

        # Written first, then read: the row that is returned is the one that was written.
        def write(tx: sa.Connection) -> accelerators.AcceleratorRow:
            is_bound = arqs.write_label(tx, accelerator, changes, scope)
            row = accelerators.get(tx, accelerator, scope)
            if row is None:
                raise NotFound(f"no accelerator {accelerator}", accelerator=accelerator)
            if not is_bound:
                raise WrongState(
                    f"accelerator {accelerator} is not bound; only a bound accelerator can be "
                    "labelled",
                    accelerator=accelerator,
                )
            return row

        row = self.uow.run_once(write, _plain)
        LOG.info(
            "Updated label of accelerator: %s",
            ", ".join(sorted(changes)),
            accelerator=accelerator,
            arq=row["arq_uuid"],
            instance=row["instance_uuid"],
        )
        return _plain(row)


def _plain(row: accelerators.AcceleratorRow) -> dict[str, Any]:
    return {k: to_iso(v) if isinstance(v, datetime) else v for k, v in row.items()}


@dataclass(frozen=True)
class Attributes:
    """Operations on attributes of deployables."""

    uow: UnitOfWork

    def create(self, deployable: str, key: str, value: str) -> dict[str, Any]:
        """Add an attribute to the deployable with this uuid; return its row as plain values.

        The new attribute hides an attribute with the same key that the agent reports. Raise
        Invalid, NotFound, and Conflict if an operator has already added this key.
        """
        owner = parse_uuid(deployable, "deployable_id")
        now = self.uow.clock()
        row: dict[str, str | datetime] = {
            "uuid": str(uuid4()),
            "key": check_text("key", key),
            "value": check_text("value", value),
            "created_at": now,
        }
        # Built here, not read: an answer costs no second query.
        plain_row = {**row, "deployable_uuid": owner, "created_at": to_iso(now), "updated_at": None}

        def write(tx: sa.Connection) -> None:
            if not deployables.add_attribute(tx, owner, row):
                raise _no_deployable(owner)

        try:
            self.uow.run_once(write, answer=lambda _: plain_row)
        except db_exc.DBDuplicateEntry as exc:
            # A query before the INSERT could be outdated: the unique key decides.
            raise Conflict(
                f"deployable {owner} already has an attribute {key!r}, delete it first",
                deployable=owner,
                key=key,
            ) from exc
        except db_exc.DBReferenceError as exc:
            raise _no_deployable(owner) from exc
        LOG.info("Created attribute %s (%s)", row["uuid"], key, deployable=owner)
        return plain_row

    def delete(self, uuid: str) -> None:
        """Delete an attribute. Raise Invalid, NotFound."""
        attribute = parse_uuid(uuid, "uuid")

        def write(tx: sa.Connection) -> None:
            if not deployables.delete_attribute(tx, attribute):
                raise NotFound(f"no attribute {attribute}", attribute=attribute)

        self.uow.run_once(write)
        LOG.info("Deleted attribute %s", attribute)


def _no_deployable(uuid: str) -> NotFound:
    return NotFound(
        f"deployable_id: no deployable {uuid}; GET /v2/deployables lists the known ones",
        deployable=uuid,
    )


@dataclass(frozen=True)
class Devices:
    """Operations on devices.

    ``wake_publisher`` is called after a commit that changes resource providers.
    """

    uow: UnitOfWork
    notifications: NotificationBuilder
    wake_publisher: Callable[[], None] = lambda: None

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
        now = self.uow.clock()

        def write(tx: sa.Connection) -> bool:
            # The window of the device has the same lock: its end must not undo this status.
            store.lock_status(tx, device)
            changed = store.set_status(tx, device, status, now)
            if changed is None:
                raise NotFound(f"no device {device}", device=device)
            if status == MAINTAINING:
                store.set_next_status(tx, device, status)
            elif store.delete_window(tx, device):
                record_event(tx, device, Event.MAINTENANCE_ENDED, self.notifications)
            if changed:
                providers.mark_stale_of_devices(tx, [device], now)
                event = Event.DEVICE_ENABLED if status == ENABLED else Event.DEVICE_DISABLED
                record_event(tx, device, event, self.notifications)
            return changed

        if self.uow.run_once(write):
            LOG.info("Set status of device to %s", status, device=device)
            self.wake_publisher()


def record_event(
    tx: sa.Connection, device: str, event: Event, notifications: NotificationBuilder
) -> None:
    """Write the notification of an event of a device."""
    # The row is read for the notification only: without listeners it costs no query.
    if notifications.enabled:
        outbox.add_all(tx, notifications.build_messages(event, read.find(tx, uuids=[device])))


@dataclass(frozen=True)
class Tombstones:
    """Tombstones of removed devices."""

    conf: cfg.ConfigOpts
    uow: UnitOfWork

    def sweep(self) -> int:
        """Delete tombstones older than [conductor] tombstone_ttl seconds; return their number."""
        expires_before = self.uow.clock() - timedelta(seconds=self.conf.conductor.tombstone_ttl)
        return self.uow.run(lambda tx: old_rows.TOMBSTONES.purge(tx, expires_before, BATCH))
