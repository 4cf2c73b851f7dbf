# SPDX-License-Identifier: Apache-2.0
"""Check what an attachment may get: server, host, limit, handles, lease, earlier requests."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar, cast

import sqlalchemy as sa

from cyborg.clients.placement import Placement
from cyborg.conductor.attachments.leased import LeasedAttachment
from cyborg.conductor.binding.limits import lock_projects
from cyborg.core.attachments import selector as selectors
from cyborg.core.attachments.attachment import Mode, describe_target
from cyborg.core.attachments.selector import ACCELERATOR, CONTEXT, AttachRequest, Selector
from cyborg.core.attachments.server import Server, check_mode, needs_live
from cyborg.core.binding import profile as attach_target
from cyborg.core.binding.profile import Group, parse_groups
from cyborg.core.contexts.context import merge_config
from cyborg.core.contexts.leases import ContextFacts, lost_lease, stale_lease
from cyborg.core.contexts.states import LEASED
from cyborg.core.errors import (
    Conflict,
    CyborgError,
    Invalid,
    NotFound,
    OverLimit,
    TimedOut,
    Unavailable,
)
from cyborg.core.log import get_logger
from cyborg.db.attachments import handles
from cyborg.db.attachments import write as store
from cyborg.db.binding import accelerators
from cyborg.db.contexts import write as device_contexts
from cyborg.db.profiles import write as device_profiles

LOG = get_logger(__name__)

# Seconds for a request to Placement: the caller waits, and the check can be omitted.
TIMEOUT = 5.0

T = TypeVar("T")


def ask_first(ask: Callable[[str], T], uuid: str) -> T:
    """Return the answer of Nova about a server. Raise Unavailable, but not TimedOut, and others."""
    try:
        return ask(uuid)
    except TimedOut as exc:
        # TimedOut would leave open whether the request of the caller has taken effect.
        raise Unavailable(f"{exc.message}; nothing was changed, retry later") from exc


def is_on_other_host(placement: Placement, provider: str, server: Server) -> bool:
    """Return whether a resource provider is below another compute node than a server.

    Return False if Placement does not answer, or does not have both providers yet. The step
    ``allocate`` checks this again in any case, since the server may move.
    """
    assert server.node is not None  # ``check_server`` refuses a server without a node
    placement = placement.with_timeout(TIMEOUT)
    try:
        node, device_provider = placement.find(server.node), placement.get(provider)
    except CyborgError as exc:
        LOG.info("Cannot compare hosts now, step allocate will compare them: %s", exc.message)
        return False
    if node is None or device_provider is None or device_provider.root_uuid is None:
        return False
    # A compute node whose root is not shown counts as a root itself.
    return device_provider.root_uuid != (node.root_uuid or node.uuid)


def check_live(tx: sa.Connection, hosts: Collection[str]) -> None:
    """Raise Conflict if an agent of these hosts does not attach devices to running guests.

    A host without an agent is left out.
    """
    for host, enabled in sorted(handles.live_hosts(tx, hosts).items()):
        if not enabled:
            raise Conflict(
                f"mode: live attach is not enabled on host {host}: its agent needs [libvirt] "
                "live_attach = true; or use the mode next-boot",
                field="mode",
                host=host,
            )


def check_limit(tx: sa.Connection, project: str, limit: int) -> None:
    """Lock a project and raise OverLimit if it cannot have another attachment.

    A negative limit means no limit. Raise ProjectsMissing.
    """
    if limit < 0:
        return
    # Also far below the limit: an attachment needs requests to Nova and Placement, and one more
    # statement does not matter.
    lock_projects(tx, [project])
    # Counted up to the limit only, which is cheap; in full for the error.
    if store.count(tx, project, limit) >= limit:
        used = store.count(tx, project)
        raise OverLimit(
            f"project {project} has {used} attachments and the limit is {limit}; detach "
            "accelerators, or delete attachments in error",
            project_id=project,
            limit=limit,
            used=used,
        )


def check_same(row: store.AttachmentRow, request: AttachRequest, scope: str | None) -> None:
    """Raise Conflict if an attachment is not that of a repeated request.

    Raise NotFound if the caller does not see the attachment.
    """
    # The same error as for a server that the caller does not see.
    if scope is not None and row["project_id"] != scope:
        raise NotFound(f"instance_uuid: no server {request.instance}")
    recorded = cast(Mapping[str, Any], row)  # the names of its columns are not known here
    names = [name for name, value in request.columns().items() if recorded[name] != value]
    if not names:
        return
    if request.uuid is not None:
        raise Conflict(
            f"uuid: attachment {row['uuid']} exists and differs in {', '.join(names)}",
            field="uuid",
        )
    # Without a uuid it was found by its target and what is attached, so that the mode differs.
    target = describe_target(row["instance_uuid"], row["hostname"])
    raise Conflict(
        f"{names[0]}: {target} already has attachment {row['uuid']} of the same "
        f"selection, with {names[0]} {recorded[names[0]]}; detach it, or request "
        "another attachment with a uuid of its own",
        field=names[0],
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """Values that an attachment stores for its selector.

    ``groups`` are the groups of the hidden profile to create, None if a profile exists. ``epoch``
    is the epoch of the lease of the device context, None if it has no lease.
    """

    groups: list[dict[str, str]] | None = None
    epoch: int | None = None


def find_project(
    tx: sa.Connection,
    selector: Selector,
    server: Server | None,
    project: str | None,
    scope: str | None,
) -> str:
    """Return the project of an attachment; ``server`` is None for a host. Raise NotFound, Invalid.

    ``project`` is the project of the server, or of the caller if the devices are for a host. An
    attachment of a device context to a host belongs to the project of the context.
    """
    if server is None and selector.field == CONTEXT:
        project = find_context(tx, selector.value, scope)["project_id"]
    if project is None:
        raise Invalid(
            "project_id: an attachment belongs to a project, and this token has none: use a token "
            "of a project",
            field="project_id",
        )
    return project


def check_selection(
    tx: sa.Connection,
    selector: Selector,
    server: Server | None,
    owner: str,
    scope: str | None,
    now: datetime,
) -> Selection:
    """Raise NotFound, WrongState or Conflict if the selection cannot be attached to the target.

    ``server`` is None for a host; ``owner`` is the project of the attachment.
    """
    for_host = server is None
    # Checks for an early answer to the caller: the step ``bind`` decides, with the rows locked.
    if selector.field == ACCELERATOR:
        return _select_accelerator(tx, selector.value, scope, for_host=for_host)
    if selector.field == CONTEXT:
        return _select_context(tx, selector.value, owner, scope, now, for_host=for_host)
    return _select_profile(tx, selector, for_host=for_host)


def _select_accelerator(
    tx: sa.Connection, uuid: str, scope: str | None, *, for_host: bool
) -> Selection:
    row = find_accelerator(tx, uuid, scope)
    selectors.check_accelerator(uuid, row["state"])
    accel = {attach_target.KEY: str(attach_target.AttachTarget.HOST)} if for_host else {}
    return Selection(groups=[Group({row["resource_class"]: 1}, accel=accel).to_dict()])


def _select_context(
    tx: sa.Connection, uuid: str, owner: str, scope: str | None, now: datetime, *, for_host: bool
) -> Selection:
    """Return the selection of a device context. Raise NotFound, WrongState, Conflict."""
    context = find_context(tx, uuid, scope)
    state = context["state"]
    selectors.check_context(
        uuid,
        state=state,
        project=context["project_id"],
        instance=context["instance_uuid"],
        server_project=owner,
    )
    groups = merge_config(parse_groups(context["groups"]), context["config_data"])
    _check_user(groups, f"of device context {uuid}", for_host=for_host)
    if state not in LEASED:
        return Selection()
    # A lease is for the service that made it, so no user of a project may take it.
    if scope is not None:
        raise selectors.lease_scope_error(uuid, state)
    if context["lease_expires_at"] is None or context["lease_expires_at"] <= now:
        raise stale_lease(uuid, state, context["epoch"], given=None)
    return Selection(epoch=context["epoch"])


def _select_profile(tx: sa.Connection, selector: Selector, *, for_host: bool) -> Selection:
    field = selector.field
    profile = device_profiles.by_name(tx, selector.value)
    if profile is None:
        raise NotFound(f"{field}: no device profile {selector.value!r}", field=field)
    _check_user(parse_groups(profile["groups"]), selector.value, for_host=for_host)
    return Selection()


def _check_user(groups: Sequence[Group], profile: str, *, for_host: bool) -> None:
    targets = {attach_target.find_target(group, profile) for group in groups}
    attach_target.check_user(targets, profile, for_host=for_host)


def find_accelerator(
    tx: sa.Connection, uuid: str, scope: str | None
) -> accelerators.AcceleratorRow:
    """Return an accelerator that the caller sees. Raise NotFound."""
    for row in accelerators.find(tx, uuids=[uuid]):
        if scope is None or row["project_id"] in (None, scope):
            return row
    raise NotFound(f"{ACCELERATOR}: no accelerator {uuid}", field=ACCELERATOR)


def find_context(tx: sa.Connection, uuid: str, scope: str | None) -> device_contexts.ContextRow:
    """Return a device context that the caller sees. Raise NotFound."""
    if (context := device_contexts.find(tx, uuid, scope)) is None:
        raise NotFound(f"{CONTEXT}: no device context {uuid}", field=CONTEXT)
    return context


def check_selected(tx: sa.Connection, selector: Selector, server: Server, mode: Mode) -> None:
    """Raise Conflict if all handles for a group, on the host of a server, are unsuitable.

    This is an early answer to the caller. The host is known here by its names in Nova alone, and an
    agent may use another one: ``check_claimed`` decides after the claim.
    """
    # Some handles are unsuitable in this mode only, see ``check_mode``.
    if mode is not Mode.NEXT_BOOT:
        return
    if selector.field == ACCELERATOR:
        check_mode(handles.of_accelerator(tx, selector.value), mode, selector.describe())
        return
    # For a context this is the name of its hidden profile.
    profile = device_profiles.by_name(tx, selector.key)
    # ``check_selection`` has found the profile. If it was deleted since then, the step ``bind``
    # fails with NotFound.
    if profile is None:
        return
    classes = {name for group in parse_groups(profile["groups"]) for name in group.resources}
    hosts = {name for name in (server.host, server.node) if name is not None}
    types_by_class = handles.of_hosts(tx, hosts, classes)
    # A class with one suitable handle may do: Placement decides whether that is free.
    for types in types_by_class.values():
        if all(needs_live({type_}) for type_ in types):
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


def find_lease(tx: sa.Connection, context: device_contexts.ContextRow) -> ContextLease | None:
    """Return the lease of a context, which may have ended, or None. The context is not locked."""
    if context["state"] not in LEASED or context["hostname"] is None:
        return None
    by_group = device_contexts.group_providers(tx, context["id"])
    # Without a lock, the ARQs may have been released since the context was read.
    if len(by_group) != len(context["groups"]):
        return None
    providers = tuple(by_group[number] for number in sorted(by_group))
    return ContextLease(context["uuid"], context["hostname"], context["epoch"], providers)


def require_lease(tx: sa.Connection, uuid: str, epoch: int) -> ContextLease:
    """Return the lease of a context with an epoch. Raise NotFound, WrongState, Conflict."""
    context = device_contexts.find(tx, uuid)
    if context is None:
        raise NotFound(f"device context {uuid} does not exist any more")
    lease = find_lease(tx, context)
    if lease is None or lease.epoch != epoch:
        facts = ContextFacts(
            uuid, context["state"], context["epoch"], instance=context["instance_uuid"]
        )
        raise lost_lease(facts, epoch, context["error"])
    return lease
