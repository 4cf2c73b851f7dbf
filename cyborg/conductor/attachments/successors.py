# SPDX-License-Identifier: Apache-2.0
"""Steps of successors: choose and claim new handles on the host, exchange the old ones."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import sqlalchemy as sa

from cyborg.clients.placement import Placement
from cyborg.conductor.attachments.allocations import AllocationSteps, explain_missing
from cyborg.conductor.attachments.devices import (
    POLL_DELAY,
    AttachedDevices,
    await_cleaning,
    find_host,
)
from cyborg.conductor.attachments.guests import Guests
from cyborg.conductor.attachments.leased import LeasedAttachment, Wait
from cyborg.conductor.binding.binder import MAX_ATTEMPTS
from cyborg.conductor.binding.claim_plan import BindResult
from cyborg.conductor.binding.creation import copy_arq
from cyborg.conductor.custody import entries as custody
from cyborg.core.attachments.allocation import Intent, required_amounts
from cyborg.core.attachments.attachment import AttachmentState, Step
from cyborg.core.attachments.server import RESUMABLE, check_exchangeable
from cyborg.core.attachments.successor import OwnedUnit, pair_units
from cyborg.core.binding.profile import Group, parse_group
from cyborg.core.binding.states import ArqState
from cyborg.core.errors import Conflict, NoHandle, NotFound, WrongState
from cyborg.db.attachments import handles
from cyborg.db.attachments import successors as store
from cyborg.db.attachments import write as records
from cyborg.db.binding import claims as handle_claims
from cyborg.db.binding import write as arq_store


class Successors(AllocationSteps):
    """The steps of successors that differ from the steps of other attachments."""

    def __init__(self, placement: Placement, devices: AttachedDevices, guests: Guests) -> None:
        super().__init__(devices.uow, placement)
        self._devices = devices
        self._guests = guests

    def allocate(self, work: LeasedAttachment) -> Wait | None:
        """Find the host of the server, which may have moved; then do as for other attachments."""
        return self._guests.locate(work) or super().allocate(work)

    def find_groups(self, work: LeasedAttachment) -> tuple[Group, ...]:
        """Return the groups to satisfy, those of the context that own handles of the old device.

        Raise NotFound if the context has left the device, Conflict if its handles cannot be
        replaced.
        """
        context, device = _replaced(work.row)

        def read(tx: sa.Connection) -> tuple[list[arq_store.ArqRow], set[str]]:
            rows = store.lock_replaced(tx, context, device)
            return rows, handles.of_arqs(tx, [row["id"] for row in rows])

        rows, types = self.uow.run(read)
        if not rows:
            raise NotFound(f"device context {context} has no handle of device {device} any more")
        check_exchangeable(types, context)
        return tuple(_groups_of(rows).values())

    def select(
        self,
        work: LeasedAttachment,
        groups: Sequence[Group],
        candidates: Sequence[Mapping[str, str]],
    ) -> Sequence[Mapping[str, str]]:
        """Return the allocation candidates, except the old device. Raise NoHandle with reasons."""
        _, device = _replaced(work.row)
        # Placement may not know yet that the old device is closed.
        closed = self.uow.run(lambda tx: store.providers_of(tx, device))
        selected = [mapping for mapping in candidates if closed.isdisjoint(mapping.values())]
        if not selected:
            missing = self.uow.run(
                lambda tx: explain_missing(tx, groups, [store.host_of(tx, device)], device)
            )
            raise NoHandle(f"no device of the host can be the successor: {missing}")
        return selected

    def bind(self, work: LeasedAttachment) -> Wait | None:
        """Create hidden ARQs that equal the ARQs to replace, and bind them, in one transaction.

        The limits of the project do not apply, because an operator requested the successor. Return
        the wait of ``await_cleaning``. Raise NoHandle, NotFound, Conflict.
        """
        return await_cleaning(work, lambda: self._run_bind(work))

    def _run_bind(self, work: LeasedAttachment) -> None:
        """Bind in a transaction, again after a lost claim. Raise NoHandle if all fail."""
        if not self._devices.run_bind(work, partial(self._bind, work=work)):
            raise NoHandle(
                f"all candidate handles were claimed concurrently ({MAX_ATTEMPTS} attempts): retry"
            )

    def _bind(self, tx: sa.Connection, work: LeasedAttachment, wait: bool) -> BindResult:
        """Insert the hidden ARQs and bind them to the chosen providers."""
        row, intent = work.row, work.intent
        old, context = self._lock_old(tx, work), self._devices.make_context(row["project_id"])
        groups = _groups_of(old)
        # Compared first: ``required_amounts`` needs a provider for each group.
        same_count = len(groups) == len(intent.providers)
        if not same_count or required_amounts([*groups.values()], intent.providers) != intent.added:
            raise Conflict("the device context has changed since its successor was chosen")
        providers = dict(zip(groups, intent.providers, strict=True))
        new = [copy_arq(arq, arq["project_id"], context.now) for arq in old]
        # They belong to no context: the state of a context is derived from all its ARQs.
        arq_store.insert_all(tx, new, row["id"])
        host = find_host(tx, intent.providers)
        return self._devices.bind_new_arqs(tx, work, new, host, providers, context, wait=wait)

    def exchange(self, work: LeasedAttachment) -> Wait | None:
        """Exchange the handles: show the new ones to Nova, and detach the old ones.

        Return the wait before the exchange can begin, None after it: the state is Detaching then.
        Raise NotFound, WrongState, Conflict.
        """
        old, new = self.uow.run(lambda tx: self._lock_both(tx, work))
        # A restore after a reboot of the host goes on with the handle of an ARQ: let it end first.
        if any(row["job_id"] for row in (*old, *new)):
            return Wait(POLL_DELAY, "waiting until the host has restored the devices")
        marker = self._guests.read_marker(work, awaited=RESUMABLE)
        if isinstance(marker, Wait):
            return marker
        use = _find_use(old)
        values = {
            "state": AttachmentState.DETACHING,
            "step": Step.GUEST,
            "request_key": None,  # the context may get another successor
            # From now on the attachment has the old handles: their amounts are to be removed.
            "intent": Intent(
                use.providers, use.amounts, generation=work.intent.generation
            ).to_dict(),
            "boot_marker": marker,
            "reboot_marker": None,
            "attempts": 0,
            "error": None,
        }
        work.commit(values, partial(self._exchange, work=work, removed=use.amounts))
        return None

    def _exchange(self, tx: sa.Connection, work: LeasedAttachment, removed: object) -> None:
        """Give the ARQs of the context the handles of the successor, which gets the old ones.

        ``removed`` has the recorded amounts of the old handles. Raise NotFound, WrongState,
        Conflict.
        """
        old, new = self._lock_both(tx, work)
        if any(row["state"] != ArqState.BOUND or row["job_id"] for row in (*old, *new)):
            raise WrongState("an accelerator request of the successor is no longer bound")
        # The locks of ``exchange`` have ended: the amounts that it has recorded may be outdated.
        if _find_use(old).amounts != removed:
            raise Conflict("the device context has changed since its successor was prepared")
        pairs = pair_units(list(map(_to_unit, old)), list(map(_to_unit, new)))
        new_by_old = {before.arq_id: after.arq_id for before, after in pairs}
        # The new device may have been cordoned since it was prepared: no guest gets it then.
        if handle_claims.lock_schedulable(tx, [row["id"] for row in new]) != len(new):
            raise WrongState(
                "the new device was prepared, but is now disabled, under maintenance, unhealthy or "
                "being removed"
            )
        if not store.exchange_handles(tx, new_by_old):
            raise Conflict("a handle of the successor was released concurrently")
        now = self._devices.make_context(work.row["project_id"]).now
        # Of both: each ARQ owns another handle now.
        custody.record_assigned(tx, [*old, *new], now)

    def _lock_both(
        self, tx: sa.Connection, work: LeasedAttachment
    ) -> tuple[list[arq_store.ArqRow], list[arq_store.ArqRow]]:
        """Return the ARQs to replace, and the hidden ARQs. Raise NotFound, WrongState."""
        return self._lock_old(tx, work), records.lock_arqs(tx, work.row["id"])

    def _lock_old(self, tx: sa.Connection, work: LeasedAttachment) -> list[arq_store.ArqRow]:
        """Return the ARQs to replace, locked. Raise NotFound, WrongState, Conflict."""
        context, device = _replaced(work.row)
        rows = store.lock_replaced(tx, context, device)
        if not rows:
            raise NotFound(f"device context {context} has no handle of device {device} any more")
        instance = work.instance
        if any(row["state"] != ArqState.BOUND or row["instance_uuid"] != instance for row in rows):
            raise WrongState(f"device context {context} is not bound to instance {instance}")
        if any(row["attachment_id"] is not None for row in rows):
            raise WrongState(f"device context {context} is attached to server {instance}")
        check_exchangeable(handles.of_arqs(tx, [row["id"] for row in rows]), context)
        return rows


def _replaced(row: records.AttachmentRow) -> tuple[str, str]:
    """Return the uuids of the context and of the old device of a successor."""
    assert row["successor_of"] is not None
    assert row["maintained_device"] is not None
    return row["successor_of"], row["maintained_device"]


def _groups_of(rows: Sequence[arq_store.ArqRow]) -> dict[int, Group]:
    """Return the groups of the ARQs of a context, by number, in the order of the numbers."""
    copies = {row["device_profile_group_id"]: row["group"] for row in rows}
    return {number: parse_group(copies[number], "group") for number in sorted(copies)}


class _Use(NamedTuple):
    """The provider of each group of bound ARQs, and the amounts of the groups by provider."""

    providers: list[str]
    amounts: dict[str, dict[str, int]]


def _find_use(rows: Sequence[arq_store.ArqRow]) -> _Use:
    groups = _groups_of(rows)
    sources = {row["device_profile_group_id"]: row["device_rp_uuid"] or "" for row in rows}
    providers = [sources[number] for number in groups]
    return _Use(providers, required_amounts([*groups.values()], providers))


def _to_unit(row: arq_store.ArqRow) -> OwnedUnit:
    return OwnedUnit(row["id"], row["device_profile_group_id"], row["device_rp_uuid"] or "")
