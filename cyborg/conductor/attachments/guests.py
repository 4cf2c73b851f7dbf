# SPDX-License-Identifier: Apache-2.0
"""Steps of attachments that depend on the guest: expose, reboot, hide, guest, plug and unplug.

Nova records an action of a server before it performs the action. Cyborg stores one of these actions
as the marker. The actions after the marker show whether the guest may have the devices, and whether
a reboot was already requested. So a conductor that continues the work of another one requests no
second reboot.

In the mode live, jobs of the agent change the running guest. The uuid of the job is recorded with
the job, in one transaction: a conductor that continues the work waits for the same job.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.clients.nova import Nova
from cyborg.conductor.attachments.checks import check_claimed
from cyborg.conductor.attachments.devices import POLL_DELAY, AttachedDevices, check_complete
from cyborg.conductor.attachments.leased import LeasedAttachment, Wait
from cyborg.conductor.common.calls import make_stale_error
from cyborg.core.attachments import server as core
from cyborg.core.attachments.attachment import AttachmentState, Step
from cyborg.core.attachments.server import Action, Event, Server
from cyborg.core.binding.states import ArqState
from cyborg.core.errors import NotFound, Unavailable, WrongState
from cyborg.core.jobs.job import JobKind, JobState, WorkItem
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.attachments import handles
from cyborg.db.attachments import write as store
from cyborg.db.jobs import write as jobs
from cyborg.db.unit_of_work import UnitOfWork

BUSY_DELAY = 2.0  # seconds to wait for Nova at first, doubled at each attempt
MAX_DELAY = 60.0
STOP_DELAY = 10.0  # the least delay while an operator must act
PENDING_ATTEMPTS = 8  # looks at a reboot that has not ended, although Nova has no task for it
LOST_ATTEMPTS = 4  # the same if nova-compute has not begun it: the request was lost
MAX_POLL_DELAY = 16.0  # between two looks at a job, while a guest keeps a device
RETRY_DELAY = 10.0  # seconds until an unplug job that was ended without success is replaced
_ARQ_KEYS = ("uuid", "state", "attach_handle_type", "attach_handle_uuid", "attach_handle_info")
NO_USER = "section [nova] has no user of keystone, stop the server"


class _Outcome(NamedTuple):
    """An action of a server, and the events of the action."""

    action: Action
    events: Sequence[Event]


# The newest action first.
_Outcomes = Sequence[_Outcome]


@dataclass(frozen=True, slots=True)
class Guests:
    """The steps of attachments that read or reboot servers of Nova, or change running guests.

    A step returns None if it is complete, or the wait after which it is repeated. ``wake_jobs`` is
    called after a commit that adds a job.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    nova: Nova
    devices: AttachedDevices
    wake_jobs: Callable[[], None]
    now: Callable[[], datetime]

    def expose(self, work: LeasedAttachment) -> Wait | None:
        """Show the ARQs to Nova, if the server can still get them. Raise NotFound, WrongState.

        Raise Conflict for handles that could not be detached again: only an attach that an earlier
        release of Cyborg began can have them.
        """

        def unhide(tx: sa.Connection) -> None:
            rows = store.lock_arqs(tx, work.row["id"])
            check_complete(work, rows)
            check_claimed(tx, work)
            if any(row["state"] != ArqState.BOUND for row in rows):
                raise WrongState("an accelerator request of the attachment is no longer bound")
            store.set_hidden(tx, work.row["id"], hidden=False)

        # Read before Nova can find the ARQs: a start that gives them to the guest comes after it.
        marker = self.read_marker(work)
        if isinstance(marker, Wait):
            return marker
        return work.complete_step(unhide, boot_marker=marker)

    def locate(self, work: LeasedAttachment) -> Wait | None:
        """Record the compute node of a successor's server. Raise NotFound, WrongState, Conflict."""
        server = self._read_present(work)
        if server.task is not None or server.status in core.RESUMABLE:
            return _wait_for_task(work, server)
        core.check_replaceable(server, work.row["device_profile_name"])
        if server.node != work.row["hostname"]:
            work.commit({"hostname": server.node})
        return None

    def read_marker(self, work: LeasedAttachment, awaited: Collection[str] = ()) -> str | Wait:
        """Return the last action of the server, if it can get devices at its next start.

        Wait while the server has a task, or one of the statuses ``awaited``. Raise NotFound,
        WrongState.
        """
        # The actions are read before the task: an action that is not among them starts later.
        actions = self.nova.list_actions(work.instance)
        server = self._read_present(work)
        if server.task is not None or server.status in awaited:
            return _wait_for_task(work, server)
        node = work.row["hostname"]
        if server.status not in core.ATTACHABLE or server.node != node:
            raise WrongState(
                f"server {server.uuid} is {server.status} on {server.node}, it was on {node}"
            )
        return core.latest_marker(actions)

    def reboot(self, work: LeasedAttachment) -> Wait | None:
        """Request hard reboots until one succeeds, unless the guest has started since the marker.

        Raise NotFound, WrongState.
        """
        uuid = work.instance
        actions = self.nova.list_actions(uuid)
        server = self._read_present(work)
        marker, user = work.row["boot_marker"] or "", self.nova.own_user()
        outcomes = self._read_outcomes(uuid, core.renewing_actions(actions, marker, user))
        # A stopped guest gets the devices at its next start, without a reboot.
        if core.is_stopped(server) or any(core.has_renewed(*outcome) for outcome in outcomes):
            return work.complete_step()
        if server.task is not None:
            return _wait_for_task(work, server)
        if not core.is_idle(server):
            raise WrongState(f"server {uuid} is {server.status}, Nova cannot reboot it")
        wait = self._request_reboot(work, server, outcomes)
        if wait is None and (user is None or core.is_missing(actions, marker)):
            # Nova's actions cannot prove the end of this reboot: a second one is worse than none.
            return work.complete_step()
        # A reboot that was requested now is looked for when the step is repeated.
        return wait or Wait(_backoff(work), _describe_failure(uuid, outcomes))

    def hide(self, work: LeasedAttachment) -> None:
        """Hide the ARQs from Nova."""
        work.complete_step(lambda tx: store.set_hidden(tx, work.row["id"], hidden=True))

    def wait_for_guest(self, work: LeasedAttachment) -> Wait | None:
        """Wait until the guest cannot have the devices.

        If the guest has the devices although the attach has failed, mark the attachment attached.
        """
        marker = work.row["boot_marker"] or ""
        return self._wait(work, lambda found: core.may_have_composed(found, marker), running_error)

    def wait_for_restart(self, work: LeasedAttachment) -> Wait | None:
        """Wait until the guest cannot have the devices that a successor has replaced.

        It has them since before its marker, so that the actions since then do not matter.
        """
        return self._wait(work, lambda _: True, restart_error)

    def _wait(
        self,
        work: LeasedAttachment,
        may_have_devices: Callable[[Sequence[Action]], bool],
        advise: Callable[[str], str],
    ) -> Wait | None:
        """Wait until the actions of the server prove that its guest has no device.

        ``may_have_devices`` returns whether it may have one, by the actions of the server;
        ``advise`` returns what an operator must do, for the uuid of the server.
        """
        # From the cheapest proof on: no devices, or none that a guest was shown (no marker); no
        # guest; no action that composes a guest with the devices; an action that has renewed the
        # guest.
        uuid = work.instance
        if not self.devices.owns_devices(work) or work.row["boot_marker"] is None:
            return work.complete_step()
        actions = self.nova.list_actions(uuid)
        marker = _keep_reboot_marker(work, actions)
        server = self._read(uuid)
        # Without a guest, nothing has the devices; while it changes, nothing is proven.
        keeps_devices = self.devices.keeps_devices(work)
        if server is None or core.has_no_guest(server, keeps_devices=keeps_devices):
            return work.complete_step()
        # A stopped server has a definition: if it keeps the devices, the proofs below decide.
        has_proofs = core.is_idle_or_stopped if keeps_devices else core.is_idle
        if not has_proofs(server):
            return _wait_for_task(work, server)
        if not may_have_devices(actions):
            return work.complete_step()
        # A guest that was started since the marker runs without them.
        user = self.nova.own_user()
        renewing = core.renewing_actions(actions, marker, user, keeps_devices=keeps_devices)
        outcomes = self._read_outcomes(uuid, renewing)
        if any(core.has_renewed(*outcome) for outcome in outcomes):
            return work.complete_step()
        # It may run with them. If this is the undo of a failed attach, they stay with the guest.
        if work.row["failure"] is not None:
            _mark_attached(work)
            return None
        # Otherwise it must lose them: no reboot takes these, an operator has to rebuild the server.
        if keeps_devices:
            return _wait_for_operator(work, core.kept_error(uuid))
        if not work.row["reboot"]:
            return _wait_for_operator(work, advise(uuid))
        if user is None:
            return _wait_for_operator(work, f"a reboot of server {uuid} proves nothing: {NO_USER}")
        if self.devices.awaits_marker(work):
            return Wait(BUSY_DELAY)  # one reboot then serves all attachments of the server
        wait = self._request_reboot(work, server, outcomes)
        return wait or Wait(_backoff(work), _describe_failure(uuid, outcomes))

    def is_unplug_final(self, work: LeasedAttachment) -> bool:
        """Return whether Nova has begun no action on the server since the step ``guest``.

        Otherwise the absence of the devices proves nothing: an action such as a reboot first ends
        the guest, and then starts it again with the mediated devices that it had.
        """
        # Without devices there is nothing that an action could attach again.
        if not self.devices.owns_devices(work):
            return True
        uuid = work.instance
        # The actions are read before the task: an action that is not among them starts later.
        actions = self.nova.list_actions(uuid)
        server = self._read(uuid)
        if server is None:
            return True
        marker = work.row["reboot_marker"] or ""
        return core.is_settled(server) and core.latest_marker(actions) == marker

    def expects_guest(self, work: LeasedAttachment) -> bool:
        """Return whether it is an error if the host does not have the guest."""
        if work.row["failure"] is not None or work.row["boot_marker"] is None:
            # The attach may have failed, or was cancelled, while the agent does not find the guest.
            return False
        server = self._read(work.instance)
        return server is not None and core.runs_on(server, work.row["hostname"])

    def wait_until_settled(self, work: LeasedAttachment) -> Wait | None:
        """Wait until Nova does not change a running guest; then its host can detach the devices.

        A start of the guest in progress may have read the ARQs before they were hidden.
        """
        uuid = work.instance
        if not self.devices.owns_devices(work):
            return work.complete_step()
        # The actions are read before the task: an action that is not among them starts later.
        actions = self.nova.list_actions(uuid)
        server = self._read(uuid)
        if server is not None and not core.is_settled(server):
            return _wait_for_task(work, server)
        return work.complete_step(reboot_marker=core.latest_marker(actions))

    def list_of_host(self, host: str, epoch: str) -> dict[str, Any]:
        """Return the devices that the running guests of a host must have; see ``rpc.contract``.

        Raise Invalid, and Stale if the epoch is unknown.
        """
        host, epoch = check_text("host", host), parse_uuid(epoch, "epoch")

        def read(tx: sa.Connection) -> list[handles.GuestDeviceRow] | None:
            return handles.of_host(tx, host) if handles.is_current_agent(tx, host, epoch) else None

        rows = self.uow.run(read)
        if rows is None:
            raise make_stale_error(host, epoch)
        return {
            "devices": [
                {
                    "instance": row["instance_uuid"],
                    "ready": bool(row["ready"]),
                    "arq": _to_arq(row),
                    "attached": row["attached_at"] is not None or bool(row["attached_by_nova"]),
                    "error": row["attach_error"],
                }
                for row in rows
            ]
        }

    def plug(self, work: LeasedAttachment) -> Wait | None:
        """Attach the devices to the running guest. Raise WrongState if this failed."""
        job = self._job(work, JobKind.PLUG)
        if job is None:
            seconds = self.conf.conductor.prepare_timeout
            if not self._enqueue(work, JobKind.PLUG, self.now() + timedelta(seconds=seconds)):
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
            if self.is_unplug_final(work):
                work.complete_step()
            else:
                work.commit({"step": Step.GUEST, "guest_job": None, "attempts": 0})
            return None
        if job is not None and job["state"] == JobState.OPEN:
            return self._wait_for_unplug(work, job)
        expected = self.expects_guest(work)
        # No deadline: as long as the guest may have the devices, nothing else may get them.
        if not self._enqueue(work, JobKind.UNPLUG, deadline=None, guest_expected=expected):
            # Its ARQs were deleted, as Nova does after it has ended the guest.
            return work.complete_step()
        return Wait(POLL_DELAY) if job is None else Wait(RETRY_DELAY, job["error"])

    def _request_reboot(
        self, work: LeasedAttachment, server: Server, outcomes: _Outcomes
    ) -> Wait | None:
        """Request a hard reboot and return None; return the wait if it cannot be requested now.

        ``outcomes`` has the actions that may have started the guest anew, the newest first.
        """
        if server.locked:
            return _wait_for_operator(work, core.locked_error(server.uuid))
        if _is_pending(work, outcomes):
            return Wait(_backoff(work))
        try:
            self.nova.hard_reboot(server.uuid)
        except WrongState as exc:
            return Wait(_backoff(work), exc.message)
        return None

    def _read_outcomes(self, uuid: str, actions: Sequence[Action]) -> _Outcomes:
        return [_Outcome(action, self.nova.list_events(uuid, action.request)) for action in actions]

    def _read_present(self, work: LeasedAttachment) -> Server:
        uuid = work.instance
        server = self._read(uuid)
        if server is None or server.status == "DELETED":
            raise NotFound(f"server {uuid} was deleted")
        return server

    def _read(self, uuid: str) -> Server | None:
        """Return a server, None if it does not exist. Raise Unavailable if this is unknown."""
        server = self.nova.get_attachable(uuid)
        if server is None and not self.nova.lists_all_projects():
            raise Unavailable(
                "the Nova user of [nova] cannot list the servers of all projects, so a 404 does "
                f"not prove that server {uuid} is deleted"
            )
        return server

    def _wait_for_unplug(self, work: LeasedAttachment, job: jobs.JobRow) -> Wait | None:
        """Wait for an open job; replace it if it expects a guest that has stopped since."""
        if job["error"] is None:  # no attempt of the agent has failed
            return Wait(POLL_DELAY)
        if job["arguments"].get("guest_expected") and not self.expects_guest(work):

            def end(tx: sa.Connection) -> None:
                jobs.end(tx, [job["id"]], JobState.FAILED, "replaced by a later job")

            work.commit({"step": Step.GUEST, "attempts": 0}, end)
            return None
        return Wait(work.backoff(POLL_DELAY, MAX_POLL_DELAY), job["error"])

    def _job(self, work: LeasedAttachment, kind: JobKind) -> jobs.JobRow | None:
        """Return the last job of the attachment if it is of a kind, or None."""
        uuid = work.row["guest_job"]
        job = None if uuid is None else self.uow.run(lambda tx: jobs.get(tx, uuid))
        return job if job is not None and job["kind"] == kind else None

    def _enqueue(
        self,
        work: LeasedAttachment,
        kind: JobKind,
        deadline: datetime | None,
        *,
        guest_expected: bool = False,
    ) -> bool:
        """Enqueue a job; return False if no ARQ of the attachment owns a device.

        With ``guest_expected``, the job fails if the host does not have the guest.
        """
        row = work.row
        uuid = str(uuid4())
        previous = row["guest_job"]

        def enqueue(tx: sa.Connection) -> bool:
            # In the transaction of the next job: an attachment never has two open jobs.
            if previous is not None and (old := jobs.get(tx, previous)) is not None:
                jobs.end(tx, [old["id"]], JobState.FAILED, "replaced by a later job")
            devices = handles.of_attachment(tx, row["id"])
            if not devices:
                return False  # ``guest_job`` then names no job
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
                now=self.now(),
                deadline=deadline,
                uuid=uuid,
            )
            return True

        if not work.commit({"guest_job": uuid}, enqueue):
            return False
        self.wake_jobs()
        return True


def running_error(uuid: str) -> str:
    """Return why a device cannot be taken from a running server, and what to do."""
    return (
        f"server {uuid} runs and may have the devices: stop it, or detach with a reboot "
        f"(reboot=true)"
    )


def restart_error(uuid: str) -> str:
    """Return what a successor waits for."""
    return f"server {uuid} may have the old devices until it is stopped, or started or rebuilt anew"


def _keep_reboot_marker(work: LeasedAttachment, actions: Sequence[Action]) -> str:
    """Return the recorded last action before the reboots that count; record the latest if needed.

    Nova lists the newest actions only. A marker that is not among them any more proves nothing, so
    that only a reboot from now on counts.
    """
    marker = work.row["reboot_marker"]
    if marker is None or core.is_missing(actions, marker):
        work.commit({"reboot_marker": core.latest_marker(actions)})
    return work.row["reboot_marker"] or ""


def _mark_attached(work: LeasedAttachment) -> None:
    """Count a failed attach as complete: nothing takes the devices from a running guest now."""
    values = {
        "state": AttachmentState.ATTACHED,
        "step": None,
        "error": work.row["failure"],
        "failure": None,
        "attempts": 0,
    }
    work.commit(values, lambda tx: store.set_hidden(tx, work.row["id"], hidden=False))


def _backoff(work: LeasedAttachment) -> float:
    return work.backoff(BUSY_DELAY, MAX_DELAY)


def _wait_for_operator(work: LeasedAttachment, error: str) -> Wait:
    return Wait(max(STOP_DELAY, _backoff(work)), error)


def _is_pending(work: LeasedAttachment, outcomes: _Outcomes) -> bool:
    """Return whether Nova may still complete the newest action, although the server has no task."""
    newest = outcomes[0] if outcomes else None
    if newest is None or not core.is_pending(*newest):
        return False
    # Not for ever: nova-compute may have stopped during the action, and never ends it.
    limit = PENDING_ATTEMPTS if core.has_begun(*newest) else LOST_ATTEMPTS
    return bool(work.row["attempts"] < limit)


def _describe_failure(uuid: str, outcomes: _Outcomes) -> str | None:
    return f"Nova failed to {outcomes[0].action.name} server {uuid}, retrying" if outcomes else None


def _wait_for_task(work: LeasedAttachment, server: Server) -> Wait:
    task = f", task {server.task}" if server.task else ""
    return Wait(_backoff(work), f"waiting for server {server.uuid} in state {server.status}{task}")


def _to_arq(row: handles.GuestDeviceRow) -> dict[str, Any]:
    return {key: row[key] for key in _ARQ_KEYS}  # type: ignore[literal-required]


def _to_item(row: handles.GuestDeviceRow) -> WorkItem:
    return WorkItem(
        backend=row["backend"],
        device=row["device"],
        deployable=row["deployable"],
        handle=row["handle"],
    )
