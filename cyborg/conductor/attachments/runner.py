# SPDX-License-Identifier: Apache-2.0
"""Work on attachments: run the steps of each, in the conductor that has leased it.

If a conductor stops, another one repeats the recorded step. An attach that fails, is cancelled, or
is not complete in time, is undone. An undo and a detach are retried until they are done.
"""

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

from oslo_config import cfg

from cyborg import tracing
from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.attachments.allocations import AllocationLost, AllocationSteps
from cyborg.conductor.attachments.devices import AttachedDevices
from cyborg.conductor.attachments.guests import Guests
from cyborg.conductor.attachments.leased import LeasedAttachment, Wait
from cyborg.conductor.attachments.successors import Successors
from cyborg.conductor.common.work_lease import LeaseLost, Leasing
from cyborg.core.attachments import attachment as core
from cyborg.core.attachments.attachment import AttachmentState, Mode, Step
from cyborg.core.contexts.refusals import describe_to_owner
from cyborg.core.errors import NoHandle, Unavailable, is_expected
from cyborg.core.log import MAX_TRACED_ATTEMPTS, get_logger, log_fields
from cyborg.core.maintenance import retry_time
from cyborg.db.attachments import write as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

MAX_DELAY = 60.0  # seconds between two attempts
LOST_LIMIT = 250  # attachments that one sweep looks at
PURGE_LIMIT = 100
MAX_FAILURES = 1000  # successors whose last failure a conductor remembers
RETENTION = timedelta(days=7)  # how long failed attachments can be looked up
# Nova may have replaced the allocation since ``allocate``: no device is claimed, and none is shown
# to Nova, without its amounts.
_CHECKED_STEPS = frozenset({Step.BIND, Step.EXPOSE})
INTERNAL_ERROR = "internal error: the conductor's log has it"


class AttachmentRunner:
    """Runner of the work on attachments; safe to run in several conductors."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        placement: Placement,
        nova: Nova,
        devices: AttachedDevices,
    ) -> None:
        self._conf = conf
        self._uow = uow
        self._now = devices.now
        self._devices = devices
        self._allocations = allocations = AllocationSteps(uow, placement)
        self.guests = guests = Guests(conf, uow, nova, devices, devices.wake_jobs, devices.now)
        successors = Successors(placement, devices, guests)
        self._stopped = threading.Event()
        self._last_checked = 0  # the row id of the last attachment that a sweep has looked at
        self._failures: dict[str, str] = {}  # the last logged one of a successor, by its uuid
        # A step sends several requests to Nova and Placement: the lease must outlast all of them.
        self._leasing = Leasing(conf, "attachment", now=self._now, requests=5)
        self._steps: Mapping[Step, Callable[[LeasedAttachment], Wait | None]] = {
            Step.ALLOCATE: allocations.allocate,
            Step.BIND: devices.bind,
            Step.PREPARE: devices.prepare,
            Step.PLUG: guests.plug,
            Step.EXPOSE: guests.expose,
            Step.REBOOT: guests.reboot,
            Step.HIDE: guests.hide,
            Step.GUEST: guests.wait_for_guest,
            Step.UNPLUG: guests.unplug,
            Step.RELEASE: devices.release,
            Step.CLEAN: devices.clean,
            Step.SHRINK: self._shrink,
        }
        # What differs from the common steps, so that no step asks for which kind it runs.
        self._live_steps = {Step.GUEST: guests.wait_until_settled}
        self._successor_steps: Mapping[Step, Callable[[LeasedAttachment], Wait | None]] = {
            Step.ALLOCATE: successors.allocate,
            Step.BIND: successors.bind,
            Step.EXPOSE: successors.exchange,
            Step.GUEST: guests.wait_for_restart,
        }

    def run_once(self) -> int:
        """Work on the attachments that are due; return their number."""
        done = 0
        while not self._stopped.is_set():
            conf = self._conf
            slowest = max(
                conf.placement.request_timeout, conf.nova.request_timeout, conf.rpc.timeout
            )
            # A lease for each attachment: the work on many would outlast a lease of all.
            lease = self._leasing.begin(request_timeout=slowest)
            row = self._uow.run(
                partial(store.lease, owner=lease.owner, now=lease.start, until=lease.until)
            )
            if row is None:
                break
            done += 1
            work = LeasedAttachment(self._uow, row, lease)
            instance = row["instance_uuid"]
            with log_fields(
                attachment=row["uuid"],
                **({"host": row["hostname"]} if instance is None else {"instance": instance}),
            ):
                self._run(work)
        return done

    def sweep(self) -> int:
        """End attachments that have lost their ARQs; delete old attachments in error.

        Nova deletes the ARQs of an instance when it deletes, shelves or evacuates the instance.
        A sweep looks at LOST_LIMIT attachments, and the next one at those after them: a watcher of
        instances finds a loss at once. Return the number of attachments.
        """
        ids = self._uow.run(lambda tx: store.ids_after(tx, self._last_checked, LOST_LIMIT))
        self._last_checked = ids[-1] if len(ids) == LOST_LIMIT else 0
        lost = self._uow.run(lambda tx: store.find_lost(tx, ids)) if ids else ()
        cutoff = self._now() - RETENTION
        purged = self._uow.run(lambda tx: store.purge(tx, cutoff, PURGE_LIMIT))
        return self._detach_lost(lost) + purged

    def end_lost(self, instances: Collection[str]) -> int:
        """End the attachments of these instances that have lost their ARQs; return their number."""
        return self._detach_lost(self._uow.run(lambda tx: store.lost_of_instances(tx, instances)))

    def _detach_lost(self, ids: Collection[int]) -> int:
        if not ids:
            return 0

        def detach(tx: Any) -> int:
            # Read again with locks: the attachment may have changed since.
            lost = store.lock_lost(tx, ids)
            # Nova has ended the guest, so the steps before the release have nothing to do.
            return store.start_detach(tx, lost, self._now(), step=Step.RELEASE, reboot=False)

        detached = self._uow.run(detach)
        if detached:
            LOG.info("Detaching %d attachment(s) whose ARQs Nova has deleted", detached)
        return detached

    def stop(self) -> None:
        """Make ``run_once`` return after the current step."""
        self._stopped.set()

    def _run(self, work: LeasedAttachment) -> None:
        """Run steps until the work is complete, or must wait."""
        try:
            while work.row["step"] is not None:
                wait = self._run_step(work)
                if wait is not None:
                    self._pause(work, wait)
                    return
                if self._stopped.is_set():
                    break
            failed = work.row["state"] == AttachmentState.ERROR
            # A failed successor has the time of its next attempt, which must not change here.
            work.release(work.row["next_try_at"] if failed else self._now())
        except LeaseLost:
            LOG.info("Attachment lease lost, another conductor continues")
            # Nothing is written if another conductor has the lease; if a request has changed the
            # step or the state instead, the row is due again.
            work.release(self._now())

    def _run_step(self, work: LeasedAttachment) -> Wait | None:
        """Run one step. If an attach fails, start the undo."""
        if core.find_step(work.row["step"], work.mode) is None:
            self._leave_damaged_step(work)
            return None
        step = work.step
        is_attach = step in core.ATTACH_STEPS
        # A cancel keeps the step: only its conductor knows how much of it has been done.
        if is_attach and work.row["state"] == AttachmentState.DETACHING:
            LOG.info("Attach was cancelled at step %s and is undone", step)
            work.commit({"step": core.first_undo_step(step, work.mode), "attempts": 0})
            return None
        wait: Wait | None
        try:
            with self._make_span(work):
                if step in _CHECKED_STEPS:
                    self._allocations.check(work)
                wait = self._find_work(work)(work)
        except LeaseLost:
            raise
        except Exception as exc:  # noqa: BLE001  no error of a step may end the loop
            error = _describe_failure(step, exc)
            # While a service is away an undo would fail too: repeat the step until the deadline.
            # The same after an error of ours.
            if is_attach and is_expected(exc) and not isinstance(exc, Unavailable):
                # Without the intent, the undo removes nothing from the new allocation of Nova. The
                # allocation for a host is the attachment's own, and is removed.
                is_lost = isinstance(exc, AllocationLost) and work.mode is not Mode.HOST
                self._undo(work, error or step, values={"intent": None} if is_lost else {})
                return None
            wait = Wait(work.backoff(1.0, MAX_DELAY), error)
        if wait is not None and is_attach and self._now() >= work.row["deadline"]:
            seconds = self._conf.conductor.attachment_timeout
            error = f"not complete after {seconds:g} seconds: {wait.reason or step}"
            self._undo(work, error, values={})
            return None
        return wait

    def _find_work(self, work: LeasedAttachment) -> Callable[[LeasedAttachment], Wait | None]:
        """Return what runs the step of an attachment: that of its kind, or the common one."""
        own: Mapping[Step, Callable[[LeasedAttachment], Wait | None]] = {}
        if work.is_successor:
            own = self._successor_steps
        elif work.mode is Mode.LIVE:
            own = self._live_steps
        return own.get(work.step) or self._steps[work.step]

    def _make_span(self, work: LeasedAttachment) -> AbstractContextManager[None]:
        """Return the span of a step. After some attempts there is none, so that traces end."""
        row = work.row
        trace_context = row["trace_context"] if row["attempts"] < MAX_TRACED_ATTEMPTS else None
        return tracing.remote_span(
            f"attachment.{work.step}",
            trace_context,
            tracing.SpanKind.CONSUMER,
            attachment=row["uuid"],
            instance=row["instance_uuid"],
            host=row["hostname"],
        )

    def _leave_damaged_step(self, work: LeasedAttachment) -> None:
        """Undo an attach, or begin a detach again, whose recorded step its mode does not have.

        All of the undo runs, because what the attach has done is unknown.
        """
        row = work.row
        error = f"internal error: the mode {work.mode} has no step {row['step']}"
        LOG.error("Damaged attachment is detached from the first step on: %s", error)
        values: dict[str, Any] = {"step": core.first_detach_step(work.mode), "attempts": 0}
        if row["state"] == AttachmentState.ATTACHING:
            failure = row["failure"] or error
            values |= {"failure": failure, "error": failure}
        work.commit(values)

    def _undo(self, work: LeasedAttachment, error: str, *, values: Mapping[str, Any]) -> None:
        """Begin to undo a failed attach; ``values`` are more columns to write."""
        # A successor is tried again and again: a repeated error is no news.
        if error == self._failures.get(work.row["uuid"]):
            LOG.debug("Attach failed again and is undone: %s", error)
        else:
            LOG.warning("Attach failed and is undone: %s", error)
        if work.is_successor:
            self._remember_failure(work.row["uuid"], error)
        # ``failure`` stays until the end of the undo; ``error`` changes with each step that waits.
        work.commit(
            {
                **values,
                "step": core.first_undo_step(work.step, work.mode),
                "failure": error,
                "error": error,
                "attempts": 0,
            }
        )

    def _remember_failure(self, uuid: str, error: str) -> None:
        """Remember the last failure of a successor, whose work is retried."""
        self._failures.pop(uuid, None)
        self._failures[uuid] = error
        if len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]

    def _retry(self, work: LeasedAttachment) -> dict[str, Any]:
        """Return the columns with which a failed successor is retried; none for others.

        The ``request_key`` stays: while it is retried, no second successor can be recorded.
        """
        if not work.is_successor:
            return {}
        next_try_at = retry_time(work.row["created_at"], self._now())
        return {"request_key": work.row["request_key"], "next_try_at": next_try_at}

    def _pause(self, work: LeasedAttachment, wait: Wait) -> None:
        error = wait.reason or work.row["failure"]
        if wait.reason is not None and wait.reason != work.row["error"]:
            LOG.info("Step %s waits: %s", work.step, wait.reason)
        work.release(
            self._now() + timedelta(seconds=wait.seconds),
            error=error,
            attempts=work.row["attempts"] + 1,
        )

    def _shrink(self, work: LeasedAttachment) -> Wait | None:
        if self._devices.owns_devices(work):
            # A commit of the attach took effect after its undo had begun.
            work.commit({"step": core.first_detach_step(work.mode)})
            return None
        wait = self._allocations.shrink(work)
        # ARQs and attachment are deleted in one transaction: nothing else would delete the ARQs.
        if wait is None:
            work.finish(lambda tx: self._devices.delete(tx, work), **self._retry(work))
            LOG.info("Detached" if work.row["failure"] is None else "Attach undone")
        return wait


def _describe_failure(step: Step, exc: Exception) -> str:
    """Return why a step failed, for the owner of the attachment; log what others must not see."""
    if not is_expected(exc):
        LOG.exception("Unexpected error in the work on an attachment")
        return INTERNAL_ERROR
    if isinstance(exc, NoHandle) and (reasons := exc.details.get("reasons")):
        LOG.info("Step %s failed: %s", step, exc)
        return describe_to_owner(str(exc), reasons)
    return str(exc)
