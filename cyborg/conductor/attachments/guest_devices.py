# SPDX-License-Identifier: Apache-2.0
"""Steps ``plug`` and ``unplug`` of live attachments: jobs of the agent that change a running guest.

The uuid of the job is recorded with the job, in one transaction: a conductor that continues the
work of another one waits for the same job.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.attachments.guests import Guests
from cyborg.conductor.attachments.leased import LeasedAttachment, Wait
from cyborg.conductor.common.calls import make_stale_error
from cyborg.core.attachments.attachment import Step
from cyborg.core.errors import WrongState
from cyborg.core.jobs.job import JobKind, JobState, WorkItem
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.attachments import handles as store
from cyborg.db.jobs import write as jobs
from cyborg.db.unit_of_work import UnitOfWork

POLL_DELAY = 1.0  # seconds between two looks at a job
MAX_POLL_DELAY = 16.0  # the same at most, while a guest keeps a device
RETRY_DELAY = 10.0  # seconds until an unplug job that was ended without success is replaced
_ARQ_KEYS = ("uuid", "state", "attach_handle_type", "attach_handle_uuid", "attach_handle_info")


class GuestDevices:
    """The devices that agents attach to running guests."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        guests: Guests,
        wake_jobs: Callable[[], None],
        now: Callable[[], datetime],
    ) -> None:
        """``wake_jobs`` is called after a commit that adds a job."""
        self._conf = conf
        self._uow = uow
        self._guests = guests
        self._wake_jobs = wake_jobs
        self._now = now

    def list_of_host(self, host: str, epoch: str) -> dict[str, Any]:
        """Return the devices that the running guests of a host must have.

        Raise Invalid, and Stale if the epoch is unknown.
        """
        host, epoch = check_text("host", host), parse_uuid(epoch, "epoch")

        def read(tx: sa.Connection) -> list[store.GuestDeviceRow] | None:
            return store.of_host(tx, host) if store.is_current_agent(tx, host, epoch) else None

        rows = self._uow.run(read)
        if rows is None:
            raise make_stale_error(host, epoch)
        return {
            "devices": [
                {"instance": row["instance_uuid"], "ready": bool(row["ready"]), "arq": _to_arq(row)}
                for row in rows
            ]
        }

    def plug(self, work: LeasedAttachment) -> Wait | None:
        """Attach the devices to the running guest. Raise WrongState if this failed."""
        job = self._job(work, JobKind.PLUG)
        if job is None:
            seconds = self._conf.conductor.prepare_timeout
            if not self._enqueue(work, JobKind.PLUG, self._now() + timedelta(seconds=seconds)):
                raise WrongState("the accelerator requests of the attachment were deleted")
            return Wait(POLL_DELAY)
        if job["state"] == JobState.OPEN:
            return Wait(POLL_DELAY, job["error"])
        if job["state"] != JobState.DONE:
            raise WrongState(f"the guest did not get the devices: {job['error']}")
        return work.complete_step()

    def unplug(self, work: LeasedAttachment) -> Wait | None:
        """Detach the devices from the guest; retry until the guest has none of them.

        If Nova may have attached a device again meanwhile, the step ``guest`` is repeated.
        """
        job = self._job(work, JobKind.UNPLUG)
        if job is not None and job["state"] == JobState.DONE:
            if self._guests.is_unplug_final(work):
                work.complete_step()
            else:
                work.commit({"step": Step.GUEST, "guest_job": None, "attempts": 0})
            return None
        if job is not None and job["state"] == JobState.OPEN:
            return self._wait_for_unplug(work, job)
        expected = self._guests.expects_guest(work)
        # No deadline: as long as the guest may have the devices, nothing else may get them.
        if not self._enqueue(work, JobKind.UNPLUG, None, guest_expected=expected):
            # Its ARQs were deleted, as Nova does after it has ended the guest.
            return work.complete_step()
        return Wait(POLL_DELAY if job is None else RETRY_DELAY, job and job["error"])

    def _wait_for_unplug(self, work: LeasedAttachment, job: jobs.JobRow) -> Wait | None:
        """Wait for an open job; replace it if it expects a guest that has stopped since."""
        if job["error"] is None:
            return Wait(POLL_DELAY)
        if job["arguments"].get("guest_expected") and not self._guests.expects_guest(work):

            def end(tx: sa.Connection) -> None:
                jobs.end(tx, [job["id"]], JobState.FAILED, "replaced by a later job")

            work.commit({"step": Step.GUEST, "attempts": 0}, end)
            return None
        delay = min(MAX_POLL_DELAY, POLL_DELAY * 2.0 ** min(work.row["attempts"], 6))
        return Wait(delay, job["error"])

    def _job(self, work: LeasedAttachment, kind: JobKind) -> jobs.JobRow | None:
        """Return the last job of the attachment if it is of a kind, or None."""
        uuid = work.row["guest_job"]
        job = None if uuid is None else self._uow.run(lambda tx: jobs.get(tx, uuid))
        return job if job is not None and job["kind"] == kind else None

    def _enqueue(
        self,
        work: LeasedAttachment,
        kind: JobKind,
        deadline: datetime | None,
        *,
        guest_expected: bool = False,
    ) -> bool:
        """Enqueue a job; return False if no ARQ of the attachment owns a device."""
        row, uuid, previous = work.row, str(uuid4()), work.row["guest_job"]

        def enqueue(tx: sa.Connection) -> bool:
            devices = store.of_attachment(tx, row["id"])
            if not devices:
                return False
            if previous is not None and (old := jobs.get(tx, previous)) is not None:
                jobs.end(tx, [old["id"]], JobState.FAILED, "replaced by a later job")
            jobs.enqueue(
                tx,
                kind=kind,
                host=devices[0]["host"],
                subject=work.instance,
                arguments={
                    "items": [_to_item(device).to_dict() for device in devices],
                    "instance": work.instance,
                    "devices": [_to_arq(device) for device in devices],
                    "guest_expected": guest_expected,
                    # A job that is late must not begin after the one that undoes it.
                    "cancels": [previous] if previous is not None else [],
                },
                now=self._now(),
                deadline=deadline,
                uuid=uuid,
            )
            return True

        if not work.commit({"guest_job": uuid}, enqueue):
            return False
        self._wake_jobs()
        return True


def _to_arq(row: store.GuestDeviceRow) -> dict[str, Any]:
    return {key: row[key] for key in _ARQ_KEYS}  # type: ignore[literal-required]


def _to_item(row: store.GuestDeviceRow) -> WorkItem:
    return WorkItem(
        backend=row["backend"],
        device=row["device"],
        deployable=row["deployable"],
        handle=row["handle"],
    )
