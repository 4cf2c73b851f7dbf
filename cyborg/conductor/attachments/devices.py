# SPDX-License-Identifier: Apache-2.0
"""Steps of attachments on their ARQs: bind, prepare, release and clean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import cast

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.conductor.attachments.checks import check_claimed, check_live
from cyborg.conductor.attachments.leased import LeasedAttachment, Wait
from cyborg.conductor.attachments.ports import GuestPorts
from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.binder import MAX_ATTEMPTS
from cyborg.conductor.binding.claim_plan import BindContext, BindResult
from cyborg.conductor.binding.claims import BeingCleaned, Retry
from cyborg.conductor.binding.cleaning_wait import MAX_CLEANING_WAIT
from cyborg.conductor.binding.limits import LimitSource, ProjectLimits, run_with_limits
from cyborg.conductor.binding.release import ReleaseResult
from cyborg.core.attachments.allocation import count_units, required_amounts
from cyborg.core.attachments.attachment import Mode
from cyborg.core.attachments.server import has_mediated_device, ports_error
from cyborg.core.binding.arqs import BindRequest
from cyborg.core.binding.profile import parse_group
from cyborg.core.binding.states import OWNING_STATES, ArqState, Step, source_states
from cyborg.core.errors import Conflict, NoHandle, NotFound, WrongState
from cyborg.core.inventory.device import HandleType
from cyborg.core.log import get_logger
from cyborg.db.attachments import handles
from cyborg.db.attachments import write as store
from cyborg.db.binding import claims as handle_claims
from cyborg.db.binding import write as arq_store
from cyborg.db.contexts import write as device_contexts
from cyborg.db.profiles import write as device_profiles
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

POLL_DELAY = 1.0  # seconds between two looks at host work
MAX_PORT_COUNTS = 3  # attempts to bind that wait for a count of ports, POLL_DELAY after each other


@dataclass(eq=False, slots=True)
class AttachedDevices:
    """The steps of attachments that create, bind, unbind and delete ARQs.

    A step returns None if it is complete, or the wait after which it is repeated.

    ``wake_jobs`` and ``wake_outbox`` are called after a commit that adds work for them. Without
    ``limit_source``, projects have no limits of units. Without ``ports``, the ports of guests are
    not counted before a bind.
    """

    uow: UnitOfWork
    arqs: Arqs
    limit_source: LimitSource | None
    wake_jobs: Callable[[], None]
    wake_outbox: Callable[[], None]
    now: Callable[[], datetime]
    ports: GuestPorts | None = None

    def bind(self, work: LeasedAttachment) -> Wait | None:
        """Create the ARQs, hidden from Nova, and bind them: all in one transaction.

        A device context gets new ARQs, and its state changes with theirs. The ARQs of a context
        with a lease keep their handles, whose units were counted when the lease began. Wait for the
        count of the ports, and as ``await_cleaning`` does.

        Raise NotFound, WrongState, OverLimit, Conflict, Unavailable. If concurrent binds take the
        handles or the slots of the server at each attempt, raise Conflict for a lease, else
        NoHandle.
        """
        is_leased = work.row["context_epoch"] is not None
        if (wait := self._check_ports(work)) is not None:
            return wait
        projects = [] if is_leased else [work.row["project_id"]]
        return await_cleaning(
            work,
            lambda: run_with_limits(
                self.uow,
                self.limit_source,
                projects,
                lambda limits: self._run_bind(work, limits),
            ),
        )

    def _check_ports(self, work: LeasedAttachment) -> Wait | None:
        """Raise WrongState if a running guest has too few free PCIe ports for its new devices.

        Only handles of the type VFIO are counted: another device may be one of conventional PCI,
        which needs no such port. Return a wait while the agent has not answered; after
        MAX_PORT_COUNTS attempts the bind goes on without its answer. The attempts are those of the
        step: a conductor that takes over goes on with the count.
        """
        if work.mode is not Mode.LIVE or self.ports is None:
            return None
        if work.row["attempts"] >= MAX_PORT_COUNTS:
            self.ports.give_up(work.row["uuid"])
            return None
        added = work.intent.added
        types = self.uow.run(lambda tx: handles.of_providers(tx, added))
        needed = sum(
            sum(amounts.values())
            for provider, amounts in added.items()
            if HandleType.VFIO in types.get(provider, ())
        )
        if not needed:
            return None
        host = self.uow.run(lambda tx: find_host(tx, [*added]))
        count = self.ports.count(work.row["uuid"], host, work.instance)
        if count is None:
            return Wait(POLL_DELAY)
        if count.free is not None and count.free < needed:
            raise WrongState(ports_error(work.instance, count.free, needed))
        return None

    def _run_bind(self, work: LeasedAttachment, limits: ProjectLimits | None) -> None:
        """Bind in a transaction, again after a lost claim. Raise the reason if all fail."""
        try:
            if self.run_bind(work, partial(self._bind, work=work, limits=limits)):
                return
        except db_exc.DBReferenceError as exc:
            # The profile was deleted after its read: the INSERT of the ARQs has failed.
            raise NotFound(f"{work.selected} does not exist any more") from exc
        # The ARQs of a lease keep their handles: only the slots of the server were taken.
        if work.row["context_epoch"] is not None:
            raise Conflict(
                f"other accelerator requests were bound to {work.target} "
                "concurrently, at each attempt: attach the device context again"
            )
        raise NoHandle(
            f"all candidate handles were claimed concurrently ({MAX_ATTEMPTS} attempts): "
            f"attach {work.selected} again"
        )

    def run_bind(self, work: LeasedAttachment, bind: Callable[..., BindResult]) -> bool:
        """Complete the step with a bind; return False if each attempt lost its handles to others.

        ``bind`` gets the transaction and, as ``wait``, whether to wait for handles that others have
        locked. ``Binder.run`` is not used: its transactions do not check the lease of ``work``.
        """
        for attempt in range(MAX_ATTEMPTS):
            try:
                result = work.complete_step(partial(bind, wait=attempt > 0))
            except Retry:
                continue
            if result is not None and result.providers:
                self.arqs.binder.wake_publisher()
            self.wake_jobs()
            self.wake_outbox()
            return True
        return False

    def bind_new_arqs(
        self,
        tx: sa.Connection,
        work: LeasedAttachment,
        rows: Sequence[arq_store.NewArqRow],
        host: str,
        providers: Mapping[int, str],
        context: BindContext,
        *,
        wait: bool,
    ) -> BindResult:
        """Bind new ARQs of an attachment, and record the events.

        ``providers`` has the provider of each group, by its number. Raise what ``binding.bind``
        raises.
        """
        requests = [
            BindRequest(
                row["uuid"],
                hostname=host,
                device_rp_uuid=providers[row["device_profile_group_id"]],
                instance_uuid=work.row["instance_uuid"],
                project_id=work.row["project_id"],
            )
            for row in rows
        ]
        # ``append``: the instance may have other ARQs, such as those with which it was built.
        return self.arqs.bind_locked(
            tx, requests, scope=None, context=context, wait=wait, append=True, subject=work.consumer
        )

    def prepare(self, work: LeasedAttachment) -> Wait | None:
        """Wait until all ARQs are Bound and no job restores their devices.

        A device of a lease may be restored after a reboot of its host. Raise WrongState if an ARQ
        failed or was deleted.
        """
        id_ = work.row["id"]
        rows, is_ready = self.uow.run(
            lambda tx: (store.lock_arqs(tx, id_), handles.all_ready(tx, id_))
        )
        check_complete(work, rows)
        failed = [row["uuid"] for row in rows if row["state"] not in OWNING_STATES]
        if failed:
            raise WrongState(
                f"the host could not prepare a device: accelerator request {', '.join(failed)} "
                "is not bound"
            )
        if any(row["state"] == ArqState.BIND_STARTED for row in rows):
            return Wait(POLL_DELAY)
        if not is_ready:
            return Wait(POLL_DELAY, "waiting until the host has restored the devices")
        return work.complete_step()

    def owns_devices(self, work: LeasedAttachment) -> bool:
        """Return whether an ARQ of the attachment owns a handle."""
        return any(row["state"] in OWNING_STATES for row in self._rows(work))

    def keeps_devices(self, work: LeasedAttachment) -> bool:
        """Return whether the definition of the guest keeps a device of the attachment."""
        id_ = work.row["id"]
        types = self.uow.run(lambda tx: handles.of_attachments(tx, [id_]))
        return has_mediated_device(types.get(id_, ()))

    def awaits_marker(self, work: LeasedAttachment) -> bool:
        """Return whether another attachment of the instance will need a reboot from later on."""
        instance, id_ = work.instance, work.row["id"]
        return self.uow.run(lambda tx: store.awaits_marker(tx, instance, without=id_))

    def release(self, work: LeasedAttachment) -> None:
        """Unbind the ARQs: their handles are free as soon as the host has cleaned them."""
        # They are not deleted yet: the steps ``clean`` and ``shrink`` find by them what is left.

        def unbind(tx: sa.Connection) -> ReleaseResult:
            rows = store.lock_arqs(tx, work.row["id"])
            return self._release(tx, rows, Step.UNBIND)

        self._finish(work.complete_step(unbind, **self._released(work)))

    def clean(self, work: LeasedAttachment) -> Wait | None:
        """Wait until the host has cleaned the devices, or until the release timeout."""
        for row in self.uow.run(lambda tx: _lock_released(tx, work)):
            # Its job cleans the former handle; after the timeout the state is UnbindFailed.
            if row["state"] == ArqState.UNBOUND and row["job_id"] is not None:
                return Wait(POLL_DELAY)
        # The ARQs may be deleted, or used again, while the host still cleans their former handles.
        intent, now = work.recorded_intent, self.now()
        if intent is not None and self.uow.run(
            lambda tx: handle_claims.any_cleaning(tx, intent.released, now)
        ):
            return Wait(POLL_DELAY)
        return work.complete_step()

    def _released(self, work: LeasedAttachment) -> dict[str, object]:
        """Return the columns that record which handles the attachment is about to release."""
        if (intent := work.recorded_intent) is None:
            return {}
        id_ = work.row["id"]
        held = self.uow.run(lambda tx: store.accelerators_of(tx, [id_]))
        return {"intent": replace(intent, released=sorted(held.get(id_, ()))).to_dict()}

    def delete(self, tx: sa.Connection, work: LeasedAttachment) -> None:
        """Delete the ARQs of an attachment. Raise WrongState if an ARQ owns a handle.

        The ARQs of a device context stay for its next use: ``conductor.binding.release`` unbinds
        them whenever they are to be deleted, and an unbound one no longer refers to the attachment.
        """
        rows = store.lock_arqs(tx, work.row["id"])
        if any(row["state"] in OWNING_STATES for row in rows):
            raise WrongState("an accelerator request of the attachment is bound")
        # ``_release`` leaves out ARQs that are already being deleted.
        self._release(tx, rows, Step.DELETE)

    def _rows(self, work: LeasedAttachment) -> list[arq_store.ArqRow]:
        return self.uow.run(lambda tx: store.lock_arqs(tx, work.row["id"]))

    def _release(
        self, tx: sa.Connection, rows: Sequence[arq_store.ArqRow], step: Step
    ) -> ReleaseResult:
        todo = [row for row in rows if row["state"] in source_states(step)]
        return self.arqs.release_arqs(tx, todo, keep=step is Step.UNBIND)

    def _finish(self, result: ReleaseResult | None) -> None:
        if result is not None and result.jobs_created:
            self.wake_jobs()
        if result is not None and result.providers:
            self.arqs.binder.wake_publisher()
        self.wake_outbox()

    def _bind(
        self, tx: sa.Connection, work: LeasedAttachment, limits: ProjectLimits | None, wait: bool
    ) -> BindResult:
        """Insert the ARQs of an attachment and bind them to the planned providers."""
        attachment, intent = work.row, work.intent
        name, project = attachment["device_profile_name"], attachment["project_id"]
        id_, epoch = attachment["id"], attachment["context_epoch"]
        try:
            rows = self.arqs.insert_arqs(
                tx, name, project, limits=limits, scope=project, attachment_id=id_, epoch=epoch
            )
        except NotFound as exc:
            # The error names the profile, which is a hidden one of a context or accelerator.
            raise NotFound(f"{work.selected} does not exist any more") from exc
        self._check_profile(tx, work, intent.providers, intent.added)
        host = find_host(tx, intent.providers)
        if work.mode is Mode.HOST and host != attachment["hostname"]:
            raise NotFound(
                f"host {attachment['hostname']} has no free device for {work.selected}: the device "
                f"that Placement offers below its compute node is on host {host}; check [agent] "
                "resource_provider of both hosts"
            )
        if work.mode is Mode.LIVE:
            # Checked again: at the request only the names of the host in Nova were known, and the
            # agent may have another one.
            check_live(tx, [host])
        context = replace(
            self.make_context(project), limits=limits, handle=attachment["accelerator"], epoch=epoch
        )
        by_group = dict(enumerate(intent.providers))
        result = self.bind_new_arqs(tx, work, rows, host, by_group, context, wait=wait)
        check_claimed(tx, work)
        return result

    def _check_profile(
        self, tx: sa.Connection, work: LeasedAttachment, providers: Sequence[str], added: object
    ) -> None:
        """Raise Conflict if the profile has other resources than when the step ``allocate`` ran.

        It may have been deleted, and created again with the same name. The caller has found it.
        """
        name = work.row["device_profile_name"]
        profile = cast(device_profiles.ProfileRow, device_profiles.by_name(tx, name))
        groups = [parse_group(group, "group") for group in profile["groups"]]
        if len(groups) != len(providers) or required_amounts(groups, providers) != added:
            raise Conflict(f"{work.selected} was replaced by another one")

    def make_context(self, project: str) -> BindContext:
        """Return the context of a bind for a project, without limits."""
        return replace(self.arqs.binder.make_context(), project=project)


def await_cleaning(work: LeasedAttachment, bind: Callable[[], None]) -> Wait | None:
    """Bind; if the devices are being cleaned, return a wait, after which the step is repeated.

    This lasts as long as the wait of a bind that Nova requests. The attempts of the step count the
    time: a conductor that takes over goes on with them. No thread waits. Raise what ``bind``
    raises, and at the end of the time why the devices cannot be bound.
    """
    try:
        bind()
    except BeingCleaned:
        if work.row["attempts"] * POLL_DELAY >= MAX_CLEANING_WAIT:
            raise
        return Wait(POLL_DELAY, "waiting until the host has cleaned the devices")
    return None


def find_host(tx: sa.Connection, providers: Sequence[str]) -> str:
    """Return the host of resource providers. Raise NotFound if they have none, or several."""
    names = sorted(set(providers))
    hosts = {row["host"] for row in handle_claims.providers(tx, names)}
    if len(hosts) != 1:
        raise NotFound(f"no host has the resource providers {', '.join(names)}")
    return hosts.pop()


def check_complete(work: LeasedAttachment, rows: Sequence[arq_store.ArqRow]) -> None:
    """Raise WrongState if an ARQ of the attachment was deleted, or unbound from a context."""
    units = count_units(work.intent.added)
    if (missing := units - len(rows)) > 0:
        raise WrongState(
            f"{missing} of the {units} accelerator requests of the attachment were deleted or "
            "unbound by another call"
        )


def _lock_released(tx: sa.Connection, work: LeasedAttachment) -> list[arq_store.ArqRow]:
    """Return the ARQs that the attachment has released, locked; for a context all of its ARQs.

    The unbound ARQs of a device context no longer refer to the attachment.
    """
    if (uuid := work.row["device_context"]) is None:
        return store.lock_arqs(tx, work.row["id"])
    context = device_contexts.find(tx, uuid)
    return [] if context is None else arq_store.lock_of_contexts(tx, [context["id"]])
