# SPDX-License-Identifier: Apache-2.0
"""Select what an attachment may get: suitable handles, those of a lease, those of a successor."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import sqlalchemy as sa

from cyborg.conductor.attachments.leased import LeasedAttachment
from cyborg.core.attachments.attachment import Mode
from cyborg.core.attachments.selector import ACCELERATOR, Selector
from cyborg.core.attachments.server import (
    Server,
    check_exchangeable,
    check_mode,
    has_mediated_device,
)
from cyborg.core.attachments.successor import describe_missing
from cyborg.core.binding.profile import Group, parse_group, parse_groups
from cyborg.core.contexts.leases import ContextFacts, lost_lease
from cyborg.core.contexts.states import LEASED
from cyborg.core.errors import NoHandle, NotFound
from cyborg.core.explain.explanation import make_demands
from cyborg.db.attachments import handles, successors
from cyborg.db.attachments.write import AttachmentRow
from cyborg.db.binding.write import ArqRow
from cyborg.db.contexts import write as contexts
from cyborg.db.explain import provider_states
from cyborg.db.profiles import write as device_profiles
from cyborg.db.unit_of_work import UnitOfWork


def check_selected(tx: sa.Connection, selector: Selector, server: Server, mode: Mode) -> None:
    """Raise Conflict if all handles for a group, on the host of a server, are unsuitable.

    This is an early answer to the caller. The host is known here by its names in Nova alone, and an
    agent may use another one: ``check_claimed`` decides after the claim.
    """
    # A mediated device is unsuitable in this mode only, see ``check_mode``.
    if mode is not Mode.NEXT_BOOT:
        return
    if selector.field == ACCELERATOR:
        check_mode(handles.of_accelerator(tx, selector.value), mode, selector.describe())
        return
    profile = device_profiles.by_name(tx, selector.key)
    # ``check_selection`` has found the profile. If it was deleted since then, the step ``bind``
    # fails with NotFound.
    if profile is None:
        return
    classes = {name for group in parse_groups(profile["groups"]) for name in group.resources}
    hosts = {name for name in (server.host, server.node) if name is not None}
    for types in handles.of_hosts(tx, hosts, classes).values():
        if all(has_mediated_device({type_}) for type_ in types):
            check_mode(types, mode, selector.describe())


def check_claimed(tx: sa.Connection, work: LeasedAttachment) -> None:
    """Raise Conflict if a handle that the attachment owns is unsuitable."""
    id_ = work.row["id"]
    check_mode(handles.of_attachments(tx, [id_]).get(id_, ()), work.mode, work.selected)


@dataclass(frozen=True, slots=True)
class ContextLease:
    """Lease of a device context: host, epoch, and the provider of each group by group number."""

    context: str
    hostname: str
    epoch: int
    providers: tuple[str, ...]


def find_lease(tx: sa.Connection, context: contexts.ContextRow) -> ContextLease | None:
    """Return the lease of a context, which may have ended, or None. The context is not locked."""
    if context["state"] not in LEASED or context["hostname"] is None:
        return None
    found = contexts.group_providers(tx, context["id"])
    if len(found) != len(context["groups"]):
        return None
    providers = tuple(found[number] for number in sorted(found))
    return ContextLease(context["uuid"], context["hostname"], context["epoch"], providers)


def require_lease(tx: sa.Connection, uuid: str, epoch: int) -> ContextLease:
    """Return the lease of a context with an epoch. Raise NotFound, WrongState, Conflict."""
    context = contexts.find(tx, uuid)
    if context is None:
        raise NotFound(f"device context {uuid} does not exist any more")
    lease = find_lease(tx, context)
    if lease is None or lease.epoch != epoch:
        facts = ContextFacts(
            uuid, context["state"], context["epoch"], instance=context["instance_uuid"]
        )
        raise lost_lease(facts, epoch, context["error"])
    return lease


def is_successor(row: AttachmentRow) -> bool:
    """Return whether an attachment replaces devices of a device context."""
    return row["maintained_device"] is not None


def replaced(row: AttachmentRow) -> tuple[str, str]:
    """Return the uuids of the context and of the old device of a successor."""
    assert row["successor_of"] is not None
    assert row["maintained_device"] is not None
    return row["successor_of"], row["maintained_device"]


def groups_of(rows: Sequence[ArqRow]) -> dict[int, Group]:
    """Return the groups of the ARQs of a context, by number, in the order of the numbers."""
    copies = {row["device_profile_group_id"]: row["group"] for row in rows}
    return {number: parse_group(copies[number], "group") for number in sorted(copies)}


class Candidates(Protocol):
    """What the step ``allocate`` needs to know about an attachment: groups, and where they fit."""

    def groups(self, work: LeasedAttachment) -> tuple[Group, ...]:
        """Return the groups to satisfy. Raise NotFound, Conflict."""

    def select(
        self, work: LeasedAttachment, groups: Sequence[Group], found: Sequence[Mapping[str, str]]
    ) -> list[Mapping[str, str]]:
        """Return the usable ones of Placement's allocation candidates. Raise NoHandle, Conflict."""


class ProfileCandidates:
    """Candidates for the groups of the profile of an attachment."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    def groups(self, work: LeasedAttachment) -> tuple[Group, ...]:
        """Return the groups of the profile. Raise NotFound."""
        name = work.row["device_profile_name"]
        profile = self._uow.run(lambda tx: device_profiles.by_name(tx, name))
        if profile is None:
            raise NotFound(f"{work.selected} does not exist any more")
        return parse_groups(profile["groups"])

    def select(
        self, work: LeasedAttachment, groups: Sequence[Group], found: Sequence[Mapping[str, str]]
    ) -> list[Mapping[str, str]]:
        """Return the candidates with suitable handles. Raise Conflict if no candidate has them."""
        if work.mode is not Mode.NEXT_BOOT:
            return list(found)
        names = {provider for mapping in found for provider in mapping.values()}
        types = self._uow.run(lambda tx: handles.of_providers(tx, names))
        unsuitable = {provider for provider in types if has_mediated_device(types[provider])}
        selected = [mapping for mapping in found if unsuitable.isdisjoint(mapping.values())]
        if found and not selected:
            check_mode(set().union(*types.values()), work.mode, work.selected)
        return selected


class SuccessorCandidates:
    """Candidates for the groups of a device context that own handles of the old device."""

    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    def groups(self, work: LeasedAttachment) -> tuple[Group, ...]:
        """Return the groups to satisfy.

        Raise NotFound if the context has left the device, Conflict if its handles cannot be
        replaced.
        """
        context, device = replaced(work.row)

        def read(tx: sa.Connection) -> tuple[list[ArqRow], set[str]]:
            rows = successors.lock_replaced(tx, context, device)
            return rows, handles.of_arqs(tx, [row["id"] for row in rows])

        rows, types = self._uow.run(read)
        if not rows:
            raise NotFound(f"device context {context} has no handle of device {device} any more")
        check_exchangeable(types, context)
        return tuple(groups_of(rows).values())

    def select(
        self, work: LeasedAttachment, groups: Sequence[Group], found: Sequence[Mapping[str, str]]
    ) -> list[Mapping[str, str]]:
        """Return the candidates, except the old device. Raise NoHandle with the reasons."""
        _, device = replaced(work.row)
        # Placement may not know yet that the old device is closed.
        closed = self._uow.run(lambda tx: successors.providers_of(tx, device))
        selected = [mapping for mapping in found if closed.isdisjoint(mapping.values())]
        if not selected:
            missing = self._uow.run(
                lambda tx: explain_missing(tx, groups, [successors.host_of(tx, device)], device)
            )
            raise NoHandle(f"no device of the host can be the successor: {missing}")
        return selected


def explain_missing(
    tx: sa.Connection,
    groups: Sequence[Group],
    hosts: Iterable[str | None],
    device: str | None = None,
) -> str:
    """Return the first failure of each device of hosts; ``device`` is the one to replace."""
    demands = make_demands(groups)
    classes = {name for demand in demands for name in demand.units}
    targets = {demand.target for demand in demands}
    found = [
        state
        for host in hosts
        for state in provider_states.find(
            tx, resource_classes=classes, host=host, attach_targets=targets
        )
    ]
    return describe_missing(demands, found, device)
