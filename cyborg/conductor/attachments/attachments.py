# SPDX-License-Identifier: Apache-2.0
"""Accept requests to attach and to detach; ``AttachmentRunner`` does the work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.attachments.candidates import check_selected, find_lease
from cyborg.conductor.attachments.checks import (
    ask_first,
    check_limit,
    check_live,
    check_same,
    is_on_other_host,
    schedule_reboot,
)
from cyborg.conductor.attachments.guests import running_error
from cyborg.conductor.binding.limits import run_with_lock
from cyborg.core.attachments import server as core
from cyborg.core.attachments.attachment import (
    AttachmentState,
    Mode,
    Step,
    can_get_reboot,
    describe_target,
    first_detach_step,
    parse_mode,
    parse_target,
    request_key,
)
from cyborg.core.attachments.selector import (
    ACCELERATOR,
    CONTEXT,
    Selector,
    check_accelerator,
    check_context,
    check_whole,
    lease_scope_error,
    other_host_error,
    other_lease_error,
    parse_selector,
)
from cyborg.core.attachments.server import is_kept
from cyborg.core.binding import profile as attach_target
from cyborg.core.binding.profile import Group, parse_groups
from cyborg.core.contexts.context import merge_config
from cyborg.core.contexts.leases import stale_lease
from cyborg.core.contexts.states import LEASED
from cyborg.core.errors import Conflict, CyborgError, Invalid, NotFound, WrongState
from cyborg.core.text import to_iso
from cyborg.core.validation import check_optional_text, parse_uuid
from cyborg.db.attachments import handles as handle_types
from cyborg.db.attachments import write as store
from cyborg.db.binding import accelerators
from cyborg.db.contexts import write as device_contexts
from cyborg.db.profiles import write as device_profiles
from cyborg.db.services import write as services
from cyborg.db.unit_of_work import UnitOfWork


class Attachments:
    """Requests for attachments. ``scope`` is the project that limits a caller; None means all."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        nova: Nova | None,
        placement: Placement,
        wake: Callable[[], None],
        *,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """``nova`` is None in an installation without Nova. ``wake`` wakes the runner."""
        self._conf = conf
        self._uow = uow
        self._nova = nova
        self._placement = placement
        self._wake = wake
        self._now = now or uow.clock

    def create(self, request: Mapping[str, Any], project_scope: str | None) -> dict[str, Any]:
        """Record an attachment and return its row; a repeated request gets the same attachment.

        If the repeated request asks for a reboot, and the first one did not, it is scheduled.

        ``request`` has instance_uuid or hostname, one of device_profile, device_context and
        accelerator, and optionally uuid, mode and reboot; with hostname also project_id, the
        project of the caller. Raise Invalid, NotFound, WrongState, Conflict, OverLimit,
        Unavailable.
        """
        scope = check_optional_text("project_scope", project_scope)
        if not isinstance(request, Mapping):
            raise Invalid("expected an object", field="body")
        instance, host = parse_target(request)
        selector = parse_selector(request)
        mode = parse_mode(request.get("mode"), for_host=instance is None)
        reboot = request.get("reboot", False)
        if not isinstance(reboot, bool):
            raise Invalid("reboot must be true or false", field="reboot")
        if reboot and mode is not Mode.NEXT_BOOT:
            raise Invalid(f"reboot: the mode {mode} needs no reboot", field="reboot")
        given = request.get("uuid")
        uuid = None if given is None else parse_uuid(given, "uuid")
        key = None if uuid is not None else request_key(instance, host, selector.key)
        wanted = {"instance_uuid": instance, "mode": str(mode), **selector.values()}
        if host is not None:
            wanted["hostname"] = host
        found = self._uow.run(lambda tx: store.find_request(tx, uuid, key))
        if found is not None:
            return self._repeated(found, wanted, scope, given=uuid is not None, reboot=reboot)
        project: str | None
        if instance is None:
            server, node = None, self._find_host(host or "")
            project = check_optional_text("project_id", request.get("project_id"))
        else:
            server = self._find_server(instance, scope, mode)
            node, project = server.node or "", server.project
        project = self._uow.run(lambda tx: _find_project(tx, selector, server, project, scope))
        now, uuid_ = self._now(), uuid or str(uuid4())
        profile = selector.profile_name(uuid_)
        values = {
            **wanted,
            "uuid": uuid_,
            "device_profile_name": profile,
            "request_key": key,
            "project_id": project,
            "hostname": node,
            "reboot": reboot,
            "state": str(AttachmentState.ATTACHING),
            "step": str(Step.ALLOCATE),
            "deadline": now + timedelta(seconds=self._conf.conductor.attachment_timeout),
            "created_at": now,
            "next_try_at": now,
        }

        def insert(tx: sa.Connection) -> Mapping[str, Any]:
            selection = _check_selection(tx, selector, server, project, scope, now)
            if server is not None:
                check_selected(tx, selector, server, mode)
            check_limit(tx, project, self._conf.attachments.max_per_project)
            id_ = store.insert(tx, {**values, "context_epoch": selection.epoch})
            if selection.groups is not None:
                device_profiles.insert(tx, _hidden_profile(profile, selection.groups, now), id_)
            return values

        try:
            if server is not None:
                self._check_host(selector, server, scope)
            row = run_with_lock(self._uow, lambda: self._uow.run_once(insert, _to_response))
        except (db_exc.DBDuplicateEntry, CyborgError) as exc:
            # The same request may have been accepted concurrently: it has reached the limit, or
            # uses what is selected.
            found = self._uow.run(lambda tx: store.find_request(tx, uuid, key))
            if found is not None:
                return self._repeated(found, wanted, scope, given=uuid is not None, reboot=reboot)
            if isinstance(exc, CyborgError):
                raise
            raise Conflict("the attachment was deleted concurrently, retry") from None
        self._wake()
        return _to_response(row)

    def _find_server(self, instance: str, scope: str | None, mode: Mode) -> core.Server:
        """Return a server that can get devices.

        Raise NotFound, WrongState, Conflict, Unavailable.
        """
        found = ask_first(self._require_nova().get_attachable, instance)
        server = core.check_server(found, instance, scope, mode)
        if mode is Mode.LIVE:
            # By the names that are known before the devices: the step ``bind`` knows the host.
            names = {name for name in (server.host, server.node) if name is not None}
            self._uow.run(lambda tx: check_live(tx, names))
        return server

    def _find_host(self, host: str) -> str:
        """Return the name of a host of an agent. Raise NotFound."""
        if not self._uow.run(lambda tx: services.existing_hosts(tx, [host])):
            raise NotFound(
                f"hostname: no agent has reported from host {host}; cyborg service-list has the "
                "hosts",
                field="hostname",
            )
        return host

    def _check_host(self, selector: Selector, server: core.Server, scope: str | None) -> None:
        """Raise NotFound, and Conflict if the selection is on another host than the server."""
        host = server.host or server.node or ""
        if selector.field == ACCELERATOR:
            row = self._uow.run(lambda tx: _find_accelerator(tx, selector.value, scope))
            if is_on_other_host(self._placement, row["rp_uuid"], server):
                raise other_host_error(
                    row["uuid"], row["hostname"], server.uuid, host, shows_hosts=scope is None
                )
        # A caller with a scope gets no lease, see ``_check_selection``.
        if selector.field == CONTEXT and scope is None:
            lease = self._uow.run(
                lambda tx: find_lease(tx, _find_context(tx, selector.value, scope))
            )
            # All providers of a lease are on one host.
            if lease and is_on_other_host(self._placement, lease.providers[0], server):
                raise other_lease_error(lease.context, lease.hostname, server.uuid, host)

    def delete(
        self,
        uuid: str | None,
        instance: str | None,
        project_scope: str | None,
        reboot: bool,
        accelerator: str | None = None,
        hostname: str | None = None,
    ) -> None:
        """Start to detach one attachment, or all attachments of an instance, or of a host itself.

        An attach in progress is cancelled and undone; then the attachment is deleted.

        ``accelerator`` selects the attachment that holds this accelerator; raise Conflict if it
        holds others too. An attachment in error is deleted at once, since it holds no resources.
        Raise Invalid, NotFound, WrongState, Conflict, Unavailable.
        """
        scope = check_optional_text("project_scope", project_scope)
        if [uuid, instance, hostname].count(None) != 2:
            raise Invalid("give exactly one of uuid, instance and hostname", field="instance")
        if accelerator is not None and uuid is not None:
            raise Invalid("accelerator: give the instance or host too", field=ACCELERATOR)
        if not isinstance(reboot, bool):
            raise Invalid("reboot must be true or false", field="reboot")
        selector = {
            "uuid": None if uuid is None else parse_uuid(uuid, "uuid"),
            "instance": None if instance is None else parse_uuid(instance, "instance"),
            "hostname": check_optional_text("hostname", hostname),
            "accelerator": None if accelerator is None else parse_uuid(accelerator, ACCELERATOR),
            "project_scope": scope,
        }
        rows = self._uow.run(lambda tx: _lock(tx, selector))
        if reboot and all(row["mode"] != Mode.NEXT_BOOT for row in rows):
            raise Invalid(
                f"reboot: the mode {rows[0]['mode']} needs no reboot"
                + ("; a stop of the server also detaches the devices" if instance else ""),
                field="reboot",
            )
        self._check_guest(rows, scope, reboot)
        now = self._now()

        def start(tx: sa.Connection) -> None:
            locked = _lock(tx, selector)
            ids = [row["id"] for row in locked]
            if reboot:
                store.request_reboot(tx, ids, now)
            # The attachments of a host are never among those of an instance.
            step = first_detach_step(Mode(locked[0]["mode"]))
            store.start_detach(tx, ids, step, now, reboot=reboot)
            store.start_detach(tx, ids, None, now, reboot=reboot)
            store.delete_failed(tx, ids)

        self._uow.run_once(start)
        self._wake()

    def _check_guest(
        self, rows: list[store.AttachmentRow], scope: str | None, reboot: bool
    ) -> None:
        """Raise WrongState if a running guest may have the devices, or if the server is locked.

        As in Nova, a caller without ``scope`` may ignore the lock. With ``reboot`` a guest may have
        the devices, because the reboot removes them. Raise Unavailable if Nova does not show it.
        """
        attached = [
            row
            for row in rows
            if row["state"] == AttachmentState.ATTACHED
            or (reboot and row["state"] == AttachmentState.DETACHING)
        ]
        if not attached or (reboot and scope is None):
            return
        uuid = attached[0]["instance_uuid"]
        if uuid is None:  # the host itself: what uses the devices there is not known here
            return
        actions = ask_first(self._require_nova().list_actions, uuid)
        server = ask_first(self._require_nova().get_attachable, uuid)
        if server is not None and server.locked and scope is not None:
            raise WrongState(f"instance: {core.locked_error(uuid)}", field="instance")
        if reboot or server is None or core.has_no_guest(server):
            return
        types = self._uow.run(
            lambda tx: handle_types.of_attachments(tx, [row["id"] for row in attached])
        )
        # A detach of what the definition of the guest keeps waits for more than a stop or a reboot.
        if any(
            row["mode"] != Mode.LIVE
            and core.may_have_composed(actions, row["boot_marker"] or "")
            and not is_kept(types.get(row["id"], ()))
            for row in attached
        ):
            raise WrongState(f"instance: {running_error(uuid)}", field="instance")

    def _repeated(
        self,
        row: store.AttachmentRow,
        wanted: Mapping[str, Any],
        scope: str | None,
        *,
        given: bool,
        reboot: bool,
    ) -> dict[str, Any]:
        """Return the attachment of an earlier request, which gets a reboot if it had none.

        ``given`` is whether the attachment was found by the uuid in the request. Raise NotFound,
        and Conflict if the earlier request differs; for a reboot also WrongState and Unavailable.
        """
        check_same(row, wanted, scope, given=given)
        if not (reboot and can_get_reboot(row["state"], row["failure"], reboot=row["reboot"])):
            return _to_response(row)
        self._find_server(str(row["instance_uuid"]), scope, Mode.NEXT_BOOT)
        now, seconds = self._now(), self._conf.conductor.attachment_timeout
        until = now + timedelta(seconds=seconds)
        changed = self._uow.run_once(lambda tx: schedule_reboot(tx, row, now, until), _to_response)
        self._wake()
        return _to_response(changed)

    def _require_nova(self) -> Nova:
        if self._nova is None:
            raise Conflict(
                "instance_uuid: attaching needs Nova, and this installation has none: [nova] "
                "send_events is false",
                field="instance_uuid",
            )
        return self._nova


@dataclass(frozen=True, slots=True)
class _Selection:
    """Values that an attachment stores for its selector.

    ``groups`` are the groups of the hidden profile to create, None if a profile exists. ``epoch``
    is the epoch of the lease of the device context, None if it has no lease.
    """

    groups: list[dict[str, str]] | None = None
    epoch: int | None = None


def _find_project(
    tx: sa.Connection,
    selector: Selector,
    server: core.Server | None,
    project: str | None,
    scope: str | None,
) -> str:
    """Return the project of an attachment; ``server`` is None for a host. Raise NotFound, Invalid.

    ``project`` is the project of the server, or of the caller if the devices are for a host. An
    attachment of a device context to a host belongs to the project of the context.
    """
    if server is None and selector.field == CONTEXT:
        project = _find_context(tx, selector.value, scope)["project_id"]
    if project is None:
        raise Invalid(
            "project_id: an attachment belongs to a project, and this token has none: use a token "
            "of a project",
            field="project_id",
        )
    return project


def _check_selection(
    tx: sa.Connection,
    selector: Selector,
    server: core.Server | None,
    owner: str,
    scope: str | None,
    now: datetime,
) -> _Selection:
    """Raise NotFound, WrongState or Conflict if the selection cannot be attached to the target.

    ``server`` is None for a host; ``owner`` is the project of the attachment.
    """
    field, value, for_host = selector.field, selector.value, server is None
    if field == ACCELERATOR:
        row = _find_accelerator(tx, value, scope)
        check_accelerator(value, row["state"])
        accel = {attach_target.KEY: str(attach_target.AttachTarget.HOST)} if for_host else {}
        return _Selection(groups=[Group({row["resource_class"]: 1}, accel=accel).to_dict()])
    if field == CONTEXT:
        found = _find_context(tx, value, scope)
        state, project, instance = found["state"], found["project_id"], found["instance_uuid"]
        check_context(value, state, project, instance, owner)
        groups = merge_config(parse_groups(found["groups"]), found["config_data"])
        _check_user(groups, f"of device context {value}", for_host=for_host)
        if state not in LEASED:
            return _Selection()
        if scope is not None:
            raise lease_scope_error(value, state)
        if found["lease_expires_at"] is None or found["lease_expires_at"] <= now:
            raise stale_lease(value, state, found["epoch"], None)
        return _Selection(epoch=found["epoch"])
    profile = device_profiles.by_name(tx, value)
    if profile is None:
        raise NotFound(f"{field}: no device profile {value!r}", field=field)
    _check_user(parse_groups(profile["groups"]), value, for_host=for_host)
    return _Selection()


def _check_user(groups: Sequence[Group], profile: str, *, for_host: bool) -> None:
    targets = {attach_target.find_target(group, profile) for group in groups}
    attach_target.check_user(targets, profile, for_host=for_host)


def _find_accelerator(
    tx: sa.Connection, uuid: str, scope: str | None
) -> accelerators.AcceleratorRow:
    """Return an accelerator that the caller sees. Raise NotFound."""
    for row in accelerators.find(tx, uuids=[uuid]):
        if scope is None or row["project_id"] in (None, scope):
            return row
    raise NotFound(f"{ACCELERATOR}: no accelerator {uuid}", field=ACCELERATOR)


def _find_context(tx: sa.Connection, uuid: str, scope: str | None) -> device_contexts.ContextRow:
    """Return a device context that the caller sees. Raise NotFound."""
    if (found := device_contexts.find(tx, uuid, scope)) is None:
        raise NotFound(f"{CONTEXT}: no device context {uuid}", field=CONTEXT)
    return found


def _hidden_profile(
    name: str, groups: list[dict[str, str]], now: datetime
) -> device_profiles.NewProfileRow:
    return {
        "uuid": str(uuid4()),
        "name": name,
        "description": None,
        "groups": groups,
        "created_at": now,
    }


def _lock(tx: sa.Connection, selector: Mapping[str, str | None]) -> list[store.AttachmentRow]:
    """Return the attachments to detach, locked.

    Raise NotFound, and Conflict if an attachment holds accelerators other than the selected one.
    """
    rows = store.lock(tx, **selector)
    if not rows:
        raise _not_attached(selector)
    if (accelerator := selector["accelerator"]) is not None:
        held = store.accelerators_of(tx, [row["id"] for row in rows])
        for row in rows:
            check_whole(row["uuid"], held.get(row["id"], ()), accelerator)
    return rows


def _not_attached(selector: Mapping[str, str | None]) -> NotFound:
    uuid, instance, accelerator = (selector[n] for n in ("uuid", "instance", "accelerator"))
    if uuid is not None:
        return NotFound(f"no attachment {uuid}", field="uuid")
    target = describe_target(instance, selector["hostname"] or "")
    if accelerator is not None:
        return NotFound(
            f"accelerator: no attachment of {target} holds accelerator {accelerator}",
            field=ACCELERATOR,
        )
    field = "host" if instance is None else "instance"
    return NotFound(f"{field}: {target} has no attachment", field=field)


def _to_response(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to the dictionary that the API shows."""
    updated_at = row.get("updated_at")
    return {
        "uuid": row["uuid"],
        "project_id": row["project_id"],
        "instance_uuid": row["instance_uuid"],
        "hostname": row["hostname"],
        "device_profile_name": row["device_profile_name"],
        "device_context": row["device_context"],
        "accelerator": row["accelerator"],
        "mode": row["mode"],
        "reboot": bool(row["reboot"]),
        "state": row["state"],
        "step": row["step"],
        "error": row.get("error"),
        "arqs": [],
        "created_at": to_iso(row["created_at"]),
        "updated_at": None if updated_at is None else to_iso(updated_at),
    }
