# SPDX-License-Identifier: Apache-2.0
"""An attachment that this conductor has leased; every write checks the lease."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast

import sqlalchemy as sa

from cyborg.conductor.common.work_lease import LeaseLost, WorkLease
from cyborg.core.attachments import attachment as core
from cyborg.core.attachments.allocation import Intent
from cyborg.core.attachments.attachment import AttachmentState, Mode, Step
from cyborg.core.attachments.selector import describe
from cyborg.db.attachments import write as store
from cyborg.db.unit_of_work import UnitOfWork

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """A step is not complete; it is repeated after some seconds.

    ``reason`` is shown as the error of the attachment, None for an ordinary wait.
    """

    seconds: float
    reason: str | None = None


@dataclass(eq=False, slots=True)
class LeasedAttachment:
    """A leased attachment; ``row`` has the last values that were committed.

    Every commit renews the lease in the row; of ``lease``, only the owner and the seconds are used.
    """

    uow: UnitOfWork
    row: store.AttachmentRow
    lease: WorkLease

    @property
    def instance(self) -> str:
        """Return the uuid of the instance. Do not call this in the mode host."""
        instance = self.row["instance_uuid"]
        if instance is None:
            raise TypeError(
                f"attachment {self.row['uuid']} in the mode {self.mode} has no instance"
            )
        return instance

    @property
    def consumer(self) -> str:
        """Return the uuid of the consumer in Placement: the instance, or the attachment itself."""
        return self.row["instance_uuid"] or self.row["uuid"]

    @property
    def target(self) -> str:
        """Return the text that names the server or the host to which the devices are attached."""
        return core.describe_target(self.row["instance_uuid"], self.row["hostname"])

    @property
    def mode(self) -> Mode:
        """Return how the guest gets the devices."""
        return Mode(str(self.row["mode"]))

    @property
    def step(self) -> Step:
        """Return the next step."""
        return Step(str(self.row["step"]))

    @property
    def selected(self) -> str:
        """Return the text that names the profile, context or accelerator that is attached."""
        return describe(
            self.row["device_profile_name"], self.row["device_context"], self.row["accelerator"]
        )

    @property
    def has_turn(self) -> bool:
        """Return whether this attachment may change the allocation of its consumer now."""
        return self.row["allocation_key"] is not None

    @property
    def is_successor(self) -> bool:
        """Return whether the attachment replaces devices of a device context."""
        return self.row["maintained_device"] is not None

    @property
    def recorded_intent(self) -> Intent | None:
        """Return the recorded change of the allocation, or None."""
        recorded = self.row["intent"]
        return None if recorded is None else Intent.from_dict(recorded)

    @property
    def intent(self) -> Intent:
        """Return the change of the allocation, which the step ``allocate`` has recorded."""
        intent = self.recorded_intent
        assert intent is not None
        return intent

    def backoff(self, first: float, longest: float) -> float:
        """Return the seconds until the next attempt of the step: doubled at each attempt."""
        # An attachment that waits for an operator has thousands of attempts: no float is so large.
        return float(min(longest, first * 2.0 ** min(self.row["attempts"], 6)))

    def commit(
        self, values: Mapping[str, Any], work: Callable[[sa.Connection], T | None] = lambda _: None
    ) -> T | None:
        """Write columns and run ``work`` in one transaction; return the result.

        The row is locked before ``work`` runs. Raise LeaseLost, also if the recorded step has
        changed: an earlier commit, whose outcome was unknown, has taken effect. It is also raised
        if the attach was cancelled meanwhile, and at its end if a reboot was requested.
        """
        lease = self.lease
        renewed = {**values, "lease_until": lease.now() + timedelta(seconds=lease.seconds)}
        expected: dict[str, Any] = {"step": self.row["step"], "state": self.row["state"]}
        if values.get("state") == AttachmentState.ATTACHED:
            # A concurrent request for a reboot must not be lost: the next lease reads it.
            expected["reboot"] = self.row["reboot"]

        def run(tx: sa.Connection) -> T | None:
            # Locks the row before the ARQs, as all transactions on attachments do.
            if not store.write(tx, self.row["id"], lease.owner, renewed, expected):
                raise LeaseLost
            return work(tx)

        result = self.uow.run(run)
        self.row = cast(store.AttachmentRow, {**self.row, **values})
        return result

    def complete_step(
        self,
        work: Callable[[sa.Connection], T | None] = lambda _: None,
        **values: Any,
    ) -> T | None:
        """Record that a step is complete, and the next step; run ``work`` as ``commit`` does.

        ``values`` are more columns to write. After the last step of the attach, the attachment is
        attached. Raise LeaseLost.
        """
        following = core.next_step(self.step, self.mode, reboot=self.row["reboot"])
        # The error of a retry is over; an undo still shows its reason.
        error = self.row["failure"]
        columns: dict[str, Any] = {"step": following, "error": error, "attempts": 0}
        if following is None:
            columns["state"] = AttachmentState.ATTACHED
        return self.commit({**columns, **values}, work)

    def finish(self, work: Callable[[sa.Connection], object], **values: Any) -> None:
        """Run ``work``; then delete the attachment, or keep it in error if its attach failed.

        ``values`` are columns of an attachment in error. Raise LeaseLost.
        """
        is_deleted = self.row["failure"] is None
        columns_in_error = {
            "state": AttachmentState.ERROR,
            "request_key": None,  # a failed attachment does not prevent the next one
            "error": self.row["failure"],
            "intent": None,
            "allocation_key": None,
            **values,
        }

        def end(tx: sa.Connection) -> None:
            work(tx)
            if is_deleted:
                store.delete(tx, self.row["id"], self.lease.owner)

        self.commit({"step": None, **({} if is_deleted else columns_in_error)}, end)

    def release(self, next_try_at: datetime, **values: Any) -> None:
        """End the lease; the work continues at ``next_try_at``, or now if it was cancelled."""
        free = {"owner": None, "lease_until": None}
        columns, id_ = {**values, **free, "next_try_at": next_try_at}, self.row["id"]

        def run(tx: sa.Connection) -> None:
            if not store.write(tx, id_, self.lease.owner, columns, {"state": self.row["state"]}):
                # A request has changed the state, and has set its own time: that stays.
                store.write(tx, id_, self.lease.owner, free)

        self.uow.run(run)
