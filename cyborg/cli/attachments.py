# SPDX-License-Identifier: Apache-2.0
"""``cyborg attach-instance``, ``attach-host``, ``detach-*`` and ``attachment-*``."""

from collections.abc import Set
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlencode

from cyborg.cli.accelerators import ACCELERATORS
from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import Arguments, Change, argument, field_argument, flag, plan
from cyborg.cli.common.progress import Progress
from cyborg.cli.common.rest import Collection, CommandError, Row
from cyborg.cli.device_contexts import CONTEXTS
from cyborg.cli.terminal import tables
from cyborg.core.attachments import attachment as core

SHORT = formatting.columns_of("uuid, instance_uuid=Instance, selected, mode, state, error")
LONG = formatting.columns_of(
    "device_profile=Profile, device_context=Context, accelerator, step, reboot, hostname=Host, "
    "project_id=Project, arqs=Requests, created_at, updated_at",
    after=SHORT,
)


def _format_row(row: Row) -> dict[str, Any]:
    """Add the column of what is attached: the name of a profile, or kind and uuid of an object.

    A host itself is shown in place of the instance.
    """
    # One of the three is set: what the request selected.
    selected: Any = row["device_profile"]
    for kind, field in (("context", "device_context"), ("accelerator", "accelerator")):
        if (uuid := row[field]) is not None:
            text = f"{kind} {uuid[: formatting.SHORT_UUID]}"
            selected = formatting.Text(f"{kind} {uuid}", text)
    instance: Any = row["instance_uuid"]
    if instance is None:
        instance = formatting.Text(None, core.describe_target(None, row["hostname"]))
    return {**row, "selected": selected, "instance_uuid": instance}


ATTACHMENTS = Collection("/attachments", SHORT, LONG, format_row=_format_row)

_INSTANCE = argument("instance", help="uuid of the server")
_HOST = argument("host", help="name of the host, as service-list shows it")
_SELECTORS = (
    field_argument("--profile", to="device_profile", help="name of the device profile to attach"),
    field_argument(
        "--context",
        to="device_context",
        lookup=CONTEXTS.find_uuid,
        help="device context to attach, by its uuid or the beginning of it",
    ),
    field_argument(
        "--accelerator",
        lookup=ACCELERATORS.find_uuid,
        help="free accelerator of the host, by its uuid or the beginning of it",
    ),
)
_ATTACHED = (
    argument("--attachment", help="only the attachment with this uuid"),
    argument(
        "--accelerator",
        help="only the attachments that hold this accelerator, by its uuid or the beginning",
    ),
)
_WAIT = base.wait_arguments("the work has ended", 1800.0, "; the work continues after it")


class List(listing.Lister, of=ATTACHMENTS):
    """List the attachments of your project or, for an administrator, of all projects."""

    ARGUMENTS = (
        field_argument(
            "--instance",
            lookup=partial(ATTACHMENTS.find_uuid, field="instance_uuid"),
            help="only attachments of the server with this uuid",
        ),
        field_argument("--host", help="only attachments of this host itself, not of servers on it"),
        field_argument(
            "--state",
            choices=[str(state) for state in core.AttachmentState],
            help="only attachments in this state",
        ),
    )


class Show(base.Show, of=ATTACHMENTS):
    """Show one attachment."""

    ARGUMENTS = (argument("attachment", help="uuid of the attachment"),)


class _Attach(base.WaitCommand, tables.ShowOne):
    """Base of the commands that attach; their arguments are the fields of the request."""

    OPTIONS = _WAIT

    def take_action(self, args: Arguments) -> Any:
        """Start to attach, wait with --wait, and return the attachment."""
        row = self.app.rest.call("POST", ATTACHMENTS.path, self.read_fields(args))
        if args.wait:
            path = ATTACHMENTS.object_path(row["uuid"])
            row = self.wait(path, _measure, "attaching", args.within, show_counts=False)
            if row["state"] != core.AttachmentState.ATTACHED:
                self.app.LOG.error("cannot attach: %s", row["error"] or "it was cancelled")
                self._status = 1
        return ATTACHMENTS.build_object(row)


class Attach(_Attach, of=ATTACHMENTS):
    """Attach accelerators to an existing server, in addition to those of its flavor.

    In the mode next-boot, the guest has them from its next start or hard reboot on; in the mode
    live, the running guest gets them at once. With --wait the exit status is 1 if the accelerators
    could not be attached.
    """

    ARGUMENTS = (
        field_argument("instance", to="instance_uuid", help="uuid of the server"),
        *_SELECTORS,
        field_argument(
            "--mode",
            choices=[str(mode) for mode in core.Mode if mode is not core.Mode.HOST],
            help="how the guest gets them: next-boot (default), or live",
        ),
        field_argument(
            "--reboot",
            action="store_true",
            default=None,
            help="let Nova reboot the server, which ends all programs of the guest",
        ),
    )


class AttachHost(_Attach, of=ATTACHMENTS):
    """Attach accelerators to a host itself, for its own programs (administrators only).

    The device profile or context must have accel:attach_target=host. With --wait the exit status is
    1 if the accelerators could not be attached.
    """

    ARGUMENTS = (
        field_argument("host", to="hostname", help="name of the host, as service-list shows it"),
        *_SELECTORS,
    )


class _Detach(base.WaitCommand):
    """Base of the commands that detach; ``TARGET`` is the first argument and a query parameter."""

    OPTIONS = (*_WAIT, base.DRY_RUN)
    TARGET: ClassVar[str]

    def preview(self, args: Arguments) -> list[Change]:
        """Return the attachments that would be detached."""
        _check_selection(args)
        rest, target = self.app.rest, getattr(args, self.TARGET)
        selected: Set[str] | None = None
        if args.attachment is not None:
            selected = {ATTACHMENTS.find_uuid(rest, args.attachment)}
        elif args.accelerator is not None:
            selected = self._find_holders(target, ACCELERATORS.find_uuid(rest, args.accelerator))
        rows = ATTACHMENTS.list_all(rest, **{self.TARGET: target})
        # None: all attachments of the target.
        if selected is not None:
            rows = [row for row in rows if row["uuid"] in selected]
        return [plan("detach", ATTACHMENTS.noun, row) for row in rows]

    def take_action(self, args: Arguments) -> None:
        """Start to detach, and wait with --wait."""
        _check_selection(args)
        target = getattr(args, self.TARGET)
        query = {"reboot": "true"} if getattr(args, "reboot", False) else {}
        awaited: Set[str] | None = None  # None: all attachments of the target
        if args.accelerator is not None:
            accelerator = ACCELERATORS.find_uuid(self.app.rest, args.accelerator)
            query["accelerator"] = accelerator
            if args.wait:
                # Before the call: afterwards an attachment may be gone, with what it held. If the
                # holders cannot be found, all that is being detached is awaited.
                awaited = self._find_holders(target, accelerator) or None
        if args.attachment is not None:
            uuid = ATTACHMENTS.find_uuid(self.app.rest, args.attachment)
            path, awaited = ATTACHMENTS.object_path(uuid), {uuid}
            row = self.app.rest.call("GET", path)
            # The service detaches by uuid, of whatever server: the words of the user must agree.
            if _target(row) != target:
                owner = core.describe_target(row["instance_uuid"], _target(row))
                raise CommandError(f"attachment {uuid} belongs to {owner}, not to {target}")
        else:
            # All attachments of the target, or those that hold the accelerator.
            path, query = ATTACHMENTS.path, {self.TARGET: target, **query}
        self.app.rest.call("DELETE", path + (f"?{urlencode(query)}" if query else ""))
        if args.wait:
            self.wait(
                partial(self._read_detaching, target),
                partial(_measure_detach, target, awaited),
                "detaching",
                args.within,
                show_counts=False,
            )

    def _read_detaching(self, target: str) -> dict[str, Any]:
        """Return the attachments of a server or host that are being detached, of all pages."""
        filters = {self.TARGET: target, "state": core.AttachmentState.DETACHING}
        return self.app.rest.read_whole(ATTACHMENTS.path, ATTACHMENTS.rows_key, **filters)

    def _find_holders(self, target: str, accelerator: str) -> Set[str]:
        """Return the uuids of the attachments of a server or host that hold an accelerator."""
        try:
            arq = self.app.rest.call("GET", ACCELERATORS.object_path(accelerator))["arq_uuid"]
        except CommandError:
            arq = None  # the request to detach is refused, or the accelerator has vanished
        return {
            row["uuid"]
            for row in ATTACHMENTS.list_all(self.app.rest, **{self.TARGET: target})
            if row["accelerator"] == accelerator or arq in row["arqs"]
        }


class Detach(_Detach, of=ATTACHMENTS):
    """Detach accelerators that were attached to a server with attach-instance.

    An attach in progress is cancelled and undone.

    In the mode next-boot, a running server that may have the accelerators must be stopped before,
    or rebooted. In the mode live, its operating system must release them.
    """

    TARGET = "instance"
    ARGUMENTS = (
        _INSTANCE,
        *_ATTACHED,
        flag("--reboot", "let Nova reboot the server, which ends all programs of the guest"),
    )


class DetachHost(_Detach, of=ATTACHMENTS):
    """Detach accelerators that were attached to a host itself with attach-host.

    First stop the programs that use them: the devices are cleaned for the next user.
    """

    TARGET = "host"
    ARGUMENTS = (_HOST, *_ATTACHED)


def _check_selection(args: Arguments) -> None:
    """Raise CommandError if the arguments do not select attachments."""
    for name in ("attachment", "accelerator"):
        # From an unset variable of a script; it would select all attachments.
        if getattr(args, name) == "":
            raise CommandError(f"--{name} is empty: give a uuid")
    if args.attachment is not None and args.accelerator is not None:
        raise CommandError("give either --attachment or --accelerator, not both")


def _measure(row: Row) -> Progress:
    is_working = row["state"] == core.AttachmentState.ATTACHING
    pending = f"attachment {row['uuid']} is {row['state']}: {row['error'] or row['step']}"
    if not is_working:
        return Progress(done=0, total=0, pending=None)
    return Progress(done=0, total=0, pending=pending, lines=[_describe(row)])


def _measure_detach(target: str, awaited: Set[str] | None, page: Row) -> Progress:
    """Return how far the detach of a target has come, from a page of attachments.

    ``awaited`` are the uuids of attachments, None for all of the target. The progress has no
    numbers: an attachment that is detached is deleted, and no longer in the page.
    """
    rows = [
        row
        for row in page["attachments"]
        if row["state"] == core.AttachmentState.DETACHING
        and _target(row) == target
        and (awaited is None or row["uuid"] in awaited)
    ]
    if not rows:
        return Progress(done=0, total=0, pending=None)
    lines = [_describe(row) for row in rows]
    name = core.describe_target(rows[0]["instance_uuid"], target)
    pending = f"{name} has {len(rows)} attachments: {lines[0]}"
    return Progress(done=0, total=0, pending=pending, lines=lines)


def _target(row: Row) -> str:
    """Return the uuid of the server, or the name of the host, that has an attachment."""
    return str(row["instance_uuid"] or row["hostname"])


def _describe(row: Row) -> str:
    # A step of a release during an attach: the attach has failed, or was cancelled.
    verb = "undoing" if row["state"] == core.AttachmentState.ATTACHING and _is_undo(row) else "step"
    return f"{verb} {row['step']}" + (f": {row['error']}" if row["error"] else "")


def _is_undo(row: Row) -> bool:
    return row["step"] is not None and core.Step(row["step"]) in core.RELEASE_STEPS
