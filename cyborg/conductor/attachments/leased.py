# SPDX-License-Identifier: Apache-2.0
"""An attachment that this conductor has leased; every write checks the lease."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast

import sqlalchemy as sa

from cyborg.core.attachments.attachment import (
    AttachmentState,
    Mode,
    Step,
    describe_target,
    next_step,
)
from cyborg.core.attachments.selector import describe
from cyborg.db.attachments import write as store
from cyborg.db.unit_of_work import UnitOfWork

T = TypeVar("T")


class AttachmentTaken(Exception):
    """Another conductor has taken over the work on the attachment. Not an error."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A step is not complete; it is repeated after some seconds.

    ``reason`` is shown as the error of the attachment, None for an ordinary wait.
    """

    seconds: float
    reason: str | None = None


class LeasedAttachment:
    """A leased attachment; ``row`` has the last values that were committed."""

    def __init__(
        self,
        uow: UnitOfWork,
        row: store.AttachmentRow,
        owner: str,
        seconds: float,
        now: Callable[[], datetime],
    ) -> None:
        """``seconds`` is the duration of the lease, which every commit renews."""
        self._uow = uow
        self._owner = owner
        self._seconds = seconds
        self._now = now
        self.row = row

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
        return describe_target(self.row["instance_uuid"], self.row["hostname"])

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
    def _expected(self) -> dict[str, Any]:
        """Return the columns that a commit expects to be unchanged."""
        return {"step": self.row["step"], "state": self.row["state"]}

    def commit(
        self, values: Mapping[str, Any], work: Callable[[sa.Connection], T | None] = lambda _: None
    ) -> T | None:
        """Write columns and run ``work`` in one transaction; return the result.

        The row is locked before ``work`` runs. Raise AttachmentTaken, also if the recorded step has
        changed: an earlier commit, whose outcome was unknown, has taken effect. It is also raised
        if the attach was cancelled meanwhile, and at its end if a reboot was requested.
        """
        renewed = {**values, "lease_until": self._now() + timedelta(seconds=self._seconds)}
        expected = self._expected
        if values.get("state") == AttachmentState.ATTACHED:
            # A concurrent request for a reboot must not be lost: the next lease reads it.
            expected = {**expected, "reboot": self.row["reboot"]}

        def run(tx: sa.Connection) -> T | None:
            if not store.write(tx, self.row["id"], self._owner, renewed, expected):
                raise AttachmentTaken
            return work(tx)

        result = self._uow.run(run)
        self.row = cast(store.AttachmentRow, {**self.row, **values})
        return result

    def complete_step(
        self,
        work: Callable[[sa.Connection], T | None] = lambda _: None,
        **values: Any,
    ) -> T | None:
        """Record that a step is complete, and the next step; run ``work`` as ``commit`` does.

        After the last step of the attach, the attachment is attached. Raise AttachmentTaken.
        """
        following = next_step(self.step, self.mode, reboot=self.row["reboot"])
        result: dict[str, Any] = {"step": following, "error": self.row["failure"], "attempts": 0}
        if following is None:
            result["state"] = AttachmentState.ATTACHED
        return self.commit({**result, **values}, work)

    def set_attached(self, work: Callable[[sa.Connection], T | None] = lambda _: None) -> None:
        """Record that the attachment is complete; keep its failure as error.

        Raise AttachmentTaken.
        """
        values = {
            "state": AttachmentState.ATTACHED,
            "step": None,
            "error": self.row["failure"],
            "failure": None,
            "attempts": 0,
        }
        self.commit(values, work)

    def finish(self, work: Callable[[sa.Connection], object], **values: Any) -> None:
        """Run ``work``; then delete the attachment, or keep it in error if its attach failed.

        ``values`` are columns of an attachment in error. Raise AttachmentTaken.
        """
        if self.row["failure"] is None:
            self._delete(work)
            return
        failed = {
            "state": AttachmentState.ERROR,
            "step": None,
            "request_key": None,  # a failed attachment does not prevent the next one
            "error": self.row["failure"],
            "intent": None,
            "allocation_key": None,
        }
        self.commit({**failed, **values}, lambda tx: work(tx) and None)

    def release(self, next_try_at: datetime, **values: Any) -> None:
        """End the lease; the work continues at ``next_try_at``, or now if it was cancelled."""
        free = {"owner": None, "lease_until": None}
        row, id_ = {**values, **free, "next_try_at": next_try_at}, self.row["id"]

        def run(tx: sa.Connection) -> None:
            if not store.write(tx, id_, self._owner, row, {"state": self.row["state"]}):
                store.write(tx, id_, self._owner, free)

        self._uow.run(run)

    def _delete(self, work: Callable[[sa.Connection], object]) -> None:
        def run(tx: sa.Connection) -> None:
            # Locks the row before the ARQs, as all transactions on attachments do.
            if not store.write(tx, self.row["id"], self._owner, {"step": None}, self._expected):
                raise AttachmentTaken
            work(tx)
            store.delete(tx, self.row["id"], self._owner)

        self._uow.run(run)
        self.row = cast(store.AttachmentRow, {**self.row, "step": None})
