# SPDX-License-Identifier: Apache-2.0
"""Accept requests to attach and to detach; ``AttachmentRunner`` does the work."""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.attachments import checks
from cyborg.conductor.attachments.guests import running_error
from cyborg.conductor.binding.limits import run_with_limits
from cyborg.core.attachments import selector as selectors
from cyborg.core.attachments import server as core
from cyborg.core.attachments.attachment import (
    AttachmentState,
    Mode,
    Step,
    can_get_reboot,
    describe_target,
    first_detach_step,
)
from cyborg.core.attachments.selector import ACCELERATOR, AttachRequest
from cyborg.core.errors import Conflict, CyborgError, Invalid, NotFound, WrongState
from cyborg.core.text import to_iso
from cyborg.core.validation import check_optional_text, parse_uuid
from cyborg.db.attachments import handles
from cyborg.db.attachments import write as store
from cyborg.db.profiles import write as device_profiles
from cyborg.db.services import write as services
from cyborg.db.unit_of_work import UnitOfWork

_SHOWN = (
    *("uuid", "project_id", "instance_uuid", "hostname"),
    *("device_profile_name", "device_context", "accelerator", "mode", "state", "step"),
)


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
        attach = selectors.parse_attach(request)
        # Before all checks: since the first request the server may have become busy, or the
        # selection used, by this attachment itself.
        if (earlier := self._find_earlier(attach)) is not None:
            return self._repeat(earlier, attach, scope)
        if attach.instance is None:
            server, node = None, self._find_host(attach.host or "")
            project = check_optional_text("project_id", request.get("project_id"))
        else:
            server = self._find_server(attach.instance, scope, attach.mode)
            node, project = server.node or "", server.project
        owner = self._uow.run(
            lambda tx: checks.find_project(tx, attach.selector, server, project, scope)
        )
        now, uuid = self._now(), attach.uuid or str(uuid4())
        values = {
            **attach.columns(),
            "uuid": uuid,
            "device_profile_name": attach.selector.profile_name(uuid),
            "request_key": attach.key,
            "project_id": owner,
            "hostname": node,
            "reboot": attach.reboot,
            "state": str(AttachmentState.ATTACHING),
            "step": str(Step.ALLOCATE),
            "deadline": self._deadline(now),
            "created_at": now,
            "next_try_at": now,
        }

        def insert(tx: sa.Connection) -> Mapping[str, Any]:
            """Check what the database knows and insert the attachment; return its new row."""
            selection = checks.check_selection(tx, attach.selector, server, owner, scope, now)
            if server is not None:
                checks.check_selected(tx, attach.selector, server, attach.mode)
            checks.check_limit(tx, owner, self._conf.attachments.max_per_project)
            id_ = store.insert(tx, {**values, "context_epoch": selection.epoch})
            # The hidden profile of an accelerator; others have a profile.
            if selection.groups is not None:
                profile: device_profiles.NewProfileRow = {
                    "uuid": str(uuid4()),
                    "name": attach.selector.profile_name(uuid),
                    "description": None,
                    "groups": selection.groups,
                    "created_at": now,
                }
                device_profiles.insert(tx, profile, id_)
            return values

        try:
            if server is not None:
                self._check_host(attach.selector, server, scope)
            # Without a source of limits: the number of attachments is an option, and only the row
            # of the project must exist to be locked.
            row = run_with_limits(
                self._uow,
                source=None,
                projects=(),
                work=lambda _: self._uow.run_once(insert, answer=_to_response),
            )
        except (db_exc.DBDuplicateEntry, CyborgError) as exc:
            # The same request may have been accepted concurrently: it has reached the limit, or
            # uses what is selected.
            if (earlier := self._find_earlier(attach)) is not None:
                return self._repeat(earlier, attach, scope)
            if isinstance(exc, CyborgError):
                raise
            raise Conflict("the attachment was deleted concurrently, retry") from None
        self._wake()
        return _to_response(row)

    def _find_earlier(self, attach: AttachRequest) -> store.AttachmentRow | None:
        return self._uow.run(lambda tx: store.find_request(tx, attach.uuid, attach.key))

    def _deadline(self, now: datetime) -> datetime:
        return now + timedelta(seconds=self._conf.conductor.attachment_timeout)

    def _find_server(self, instance: str, scope: str | None, mode: Mode) -> core.Server:
        """Return a server that can get devices.

        Raise NotFound, WrongState, Conflict, Unavailable.
        """
        found = checks.ask_first(self._require_nova().get_attachable, instance)
        server = core.check_server(found, instance, scope, mode)
        if mode is Mode.LIVE:
            # By the names of the host in Nova: its agent may have another name, with which the step
            # ``bind`` checks it again.
            names = {name for name in (server.host, server.node) if name is not None}
            self._uow.run(lambda tx: checks.check_live(tx, names))
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

    def _check_host(
        self, selector: selectors.Selector, server: core.Server, scope: str | None
    ) -> None:
        """Raise NotFound, and Conflict if the selection is on another host than the server."""
        host = server.host or server.node or ""  # for the text of the error
        if selector.field == ACCELERATOR:
            row = self._uow.run(lambda tx: checks.find_accelerator(tx, selector.value, scope))
            if checks.is_on_other_host(self._placement, row["rp_uuid"], server):
                raise selectors.other_host_error(
                    row["uuid"], row["hostname"], server.uuid, host, shows_hosts=scope is None
                )
        # A caller with a scope gets no lease, see ``checks.check_selection``.
        if selector.field == selectors.CONTEXT and scope is None:
            lease = self._uow.run(
                lambda tx: checks.find_lease(tx, checks.find_context(tx, selector.value, scope))
            )
            # All providers of a lease are on one host.
            if lease and checks.is_on_other_host(self._placement, lease.providers[0], server):
                raise selectors.other_lease_error(lease.context, lease.hostname, server.uuid, host)

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
        selection = _Selection(
            uuid=None if uuid is None else parse_uuid(uuid, "uuid"),
            instance=None if instance is None else parse_uuid(instance, "instance"),
            hostname=check_optional_text("hostname", hostname),
            accelerator=None if accelerator is None else parse_uuid(accelerator, ACCELERATOR),
            project_scope=scope,
        )
        # Nova is queried outside of transactions, so the rows are locked and checked again below.
        rows = self._uow.run(lambda tx: _lock(tx, selection))
        if reboot and all(row["mode"] != Mode.NEXT_BOOT for row in rows):
            raise Invalid(
                f"reboot: the mode {rows[0]['mode']} needs no reboot"
                + ("; a stop of the server also detaches the devices" if instance else ""),
                field="reboot",
            )
        self._check_guest(rows, scope, reboot)
        now = self._now()

        def start(tx: sa.Connection) -> None:
            locked = _lock(tx, selection)
            ids = [row["id"] for row in locked]
            if reboot:
                store.request_reboot(tx, ids, now)  # of those that are being detached already
            # One for all: that of both modes of an instance is the same, and the attachments of a
            # host are never among those of an instance.
            step = first_detach_step(Mode(locked[0]["mode"]))
            # Those that are attached; then those whose attach is in progress, which keep their
            # step, so that the runner undoes the attach from there.
            store.start_detach(tx, ids, now, step=step, reboot=reboot)
            store.start_detach(tx, ids, now, step=None, reboot=reboot)
            store.delete_failed(tx, ids)

        self._uow.run_once(start)
        self._wake()

    def _check_guest(
        self, rows: list[store.AttachmentRow], scope: str | None, reboot: bool
    ) -> None:
        """Raise WrongState if a running guest may have the devices, or if the server is locked.

        As in Nova, a caller without ``scope`` may ignore the lock. With ``reboot`` a guest may have
        the devices, because the reboot removes them. Raise Unavailable if Nova does not show it.
        ``rows`` are all of one server, or of one host.
        """
        # The undo of an attach in progress itself waits for the guest. One that is being detached
        # is checked only if this call adds a reboot to its work.
        to_check = [
            row
            for row in rows
            if row["state"] == AttachmentState.ATTACHED
            or (reboot and row["state"] == AttachmentState.DETACHING)
        ]
        # With a reboot only the lock matters, and not to a caller without ``scope``.
        if not to_check or (reboot and scope is None):
            return
        uuid = to_check[0]["instance_uuid"]
        if uuid is None:  # the host itself: what uses the devices there is not known here
            return
        # The actions are read before the server: an action that is not among them starts later.
        actions = checks.ask_first(self._require_nova().list_actions, uuid)
        server = checks.ask_first(self._require_nova().get_attachable, uuid)
        if server is not None and server.locked and scope is not None:
            raise WrongState(f"instance: {core.locked_error(uuid)}", field="instance")
        if reboot or server is None or core.has_no_guest(server):
            return
        types = self._uow.run(
            lambda tx: handles.of_attachments(tx, [row["id"] for row in to_check])
        )
        # Mediated devices are not refused, their detach waits: neither the stop nor the reboot that
        # the error advises would take them from the guest.
        if any(
            row["mode"] != Mode.LIVE
            and core.may_have_composed(actions, row["boot_marker"] or "")
            and not core.has_mediated_device(types.get(row["id"], ()))
            for row in to_check
        ):
            raise WrongState(f"instance: {running_error(uuid)}", field="instance")

    def _repeat(
        self, row: store.AttachmentRow, attach: AttachRequest, scope: str | None
    ) -> dict[str, Any]:
        """Return the attachment of an earlier request, which gets a reboot if it had none.

        Raise NotFound, and Conflict if the earlier request differs; for a reboot also WrongState
        and Unavailable.
        """
        checks.check_same(row, attach, scope)
        if not attach.reboot or not can_get_reboot(
            row["state"], row["failure"], reboot=row["reboot"]
        ):
            return _to_response(row)
        # Only for its errors: the server may be locked or gone now. Only this mode has a reboot.
        self._find_server(str(row["instance_uuid"]), scope, Mode.NEXT_BOOT)
        now = self._now()

        def add_reboot(tx: sa.Connection) -> store.AttachmentRow:
            # Nothing is changed if the attachment has changed so that it cannot get a reboot.
            store.schedule_reboot(tx, row["id"], now, self._deadline(now))
            changed = store.find_request(tx, row["uuid"], request_key=None)
            if changed is None:
                raise NotFound(f"no attachment {row['uuid']}", field="uuid")
            return changed

        attachment = self._uow.run_once(add_reboot, answer=_to_response)
        self._wake()
        return _to_response(attachment)

    def _require_nova(self) -> Nova:
        if self._nova is None:
            raise Conflict(
                "instance_uuid: attaching needs Nova, and this installation has none: [nova] "
                "send_events is false",
                field="instance_uuid",
            )
        return self._nova


class _Selection(NamedTuple):
    """The attachments to detach, as arguments of ``store.lock``.

    Exactly one of ``uuid``, ``instance`` and ``hostname`` is not None.
    """

    uuid: str | None
    instance: str | None
    hostname: str | None
    accelerator: str | None
    project_scope: str | None


def _lock(tx: sa.Connection, selection: _Selection) -> list[store.AttachmentRow]:
    """Return the attachments to detach, locked.

    Raise NotFound, and Conflict if an attachment holds accelerators other than the selected one.
    """
    rows = store.lock(tx, **selection._asdict())
    if not rows:
        raise _not_attached(selection)
    if selection.accelerator is not None:
        held = store.accelerators_of(tx, [row["id"] for row in rows])
        for row in rows:
            selectors.check_whole(row["uuid"], held.get(row["id"], ()), selection.accelerator)
    return rows


def _not_attached(selection: _Selection) -> NotFound:
    if selection.uuid is not None:
        return NotFound(f"no attachment {selection.uuid}", field="uuid")
    target = describe_target(selection.instance, selection.hostname or "")
    if selection.accelerator is not None:
        return NotFound(
            f"accelerator: no attachment of {target} holds accelerator {selection.accelerator}",
            field=ACCELERATOR,
        )
    field = "host" if selection.instance is None else "instance"
    return NotFound(f"{field}: {target} has no attachment", field=field)


def _to_response(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to the dictionary that the API shows."""
    updated_at = row.get("updated_at")
    return {name: row[name] for name in _SHOWN} | {
        "reboot": bool(row["reboot"]),
        "error": row.get("error"),
        "arqs": [],
        "created_at": to_iso(row["created_at"]),
        "updated_at": None if updated_at is None else to_iso(updated_at),
    }
