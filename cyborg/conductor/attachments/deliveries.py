# SPDX-License-Identifier: Apache-2.0
"""Record whether running guests have the devices that agents attach to them."""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from cyborg.conductor.common.calls import make_stale_error
from cyborg.conductor.notifications.notifications import ArqEventRecorder
from cyborg.core.attachments.delivery import Delivery, load_deliveries
from cyborg.core.binding.states import ArqState
from cyborg.core.log import get_logger
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.attachments import handles
from cyborg.db.binding import write as arqs
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.telemetry.recorder import GUEST_DEVICES, MetricRecorder

LOG = get_logger(__name__)

# Outcomes of GUEST_DEVICES.
ATTACHED, FAILED = "attached", "failed"

Rows = list[arqs.ArqRow]


@dataclass(frozen=True, slots=True)
class GuestDeliveries:
    """Recorder of the reports of agents.

    A report changes no state of an ARQ: a guest may get its device at any later check.
    """

    uow: UnitOfWork
    recorder: ArqEventRecorder
    metrics: MetricRecorder

    def record(self, host: str, epoch: str, devices: Any) -> None:
        """Record a report; see ``rpc.contract``. Ignore ARQs that the agent does not attach.

        Raise Invalid, and Stale if the epoch is unknown.
        """
        host, epoch = check_text("host", host), parse_uuid(epoch, "epoch")
        deliveries = load_deliveries(devices)

        def write(tx: sa.Connection) -> tuple[Rows, Rows]:
            """Return the ARQs whose guests have the device, and those that newly lack it."""
            if not handles.is_current_agent(tx, host, epoch):
                raise make_stale_error(host, epoch)
            expected = {row["uuid"] for row in handles.of_host(tx, host)}
            # An ARQ may have been unbound since the last statement: this is its former device.
            rows = [
                row
                for row in arqs.lock(tx, expected & deliveries.keys())
                if row["state"] == ArqState.BOUND and row["instance_uuid"] is not None
            ]
            stopped = [row for row in rows if not deliveries[row["uuid"]].is_running]
            self._record_stopped(tx, stopped)
            running = [row for row in rows if deliveries[row["uuid"]].is_running]
            attached = [row for row in running if deliveries[row["uuid"]].error is None]
            self._record_attached(tx, attached)
            return attached, self._record_failed(tx, running, deliveries)

        attached, failed = self.uow.run_once(write)
        for outcome, count in ((ATTACHED, len(attached)), (FAILED, len(failed))):
            self.metrics.count(GUEST_DEVICES, outcome, amount=count)
        for row in failed:
            LOG.warning(
                "A running guest lacks the device of an accelerator request, the agent retries: %s",
                deliveries[row["uuid"]].error,
                host=host,
                instance=row["instance_uuid"],
                arq=row["uuid"],
            )

    def _record_stopped(self, tx: sa.Connection, rows: Rows) -> None:
        """Clear the errors of ARQs whose guests do not run: they lack no device."""
        if ids := [row["id"] for row in rows if row["attach_error"] is not None]:
            arqs.record_delivery(tx, ids, None, error=None)

    def _record_attached(self, tx: sa.Connection, rows: Rows) -> None:
        if rows:
            ids = [row["id"] for row in rows]
            arqs.record_delivery(tx, ids, self.uow.clock(), error=None)
            self.recorder.record_attached(tx, rows)

    def _record_failed(
        self, tx: sa.Connection, rows: Rows, deliveries: dict[str, Delivery]
    ) -> Rows:
        """Record the errors; return the ARQs that had none before, of which listeners learn."""
        all_new: Rows = []
        # One UPDATE for each text, and these are few: a host has one reason for all its guests, or
        # one guest has a reason.
        texts = {deliveries[row["uuid"]].error for row in rows}
        for text in sorted(filter(None, texts)):
            failed = [row for row in rows if deliveries[row["uuid"]].error == text]
            arqs.record_delivery(tx, [row["id"] for row in failed], self.uow.clock(), error=text)
            new = [row for row in failed if row["attach_error"] is None]
            self.recorder.record_attach_failed(tx, new, text)
            all_new += new
        return all_new
