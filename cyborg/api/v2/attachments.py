# SPDX-License-Identifier: Apache-2.0
"""/v2/attachments: attach accelerators to existing instances or to hosts, and detach them."""

from typing import Any

import wsme

from cyborg.api import types
from cyborg.api.controller import RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.core.attachments.attachment import AttachmentState, Mode, parse_target
from cyborg.core.attachments.selector import ACCELERATOR, SELECTORS, check_selector
from cyborg.core.errors import Conflict, Invalid, NotFound
from cyborg.db.attachments import read

STATE = types.Enum(*AttachmentState)
MODE = types.Enum(*Mode)
HOST = types.Text(min_length=1)
DELETE_FOR_HOST = "cyborg:attachment:delete_for_host"


class Attachment(
    types.JsonObject, row=read.AttachmentRow, without=("device_profile_name",), links=True
):
    """Accelerators of an existing instance, in addition to those of its flavor, or of a host.

    ``instance_uuid`` is null for a host itself, whose name is ``hostname``. ``step`` is the next
    step of the work, or null. ``error`` is the last error, or null. ``arqs`` are the uuids of the
    accelerator requests. ``device_profile``, ``device_context`` and ``accelerator`` are null,
    except the one that was selected.
    """

    device_profile = types.optional(str)
    mode = types.required(MODE)
    state = types.required(STATE)
    arqs = types.required([types.Uuid()])


class AttachmentCreate(types.JsonObject):
    """The instance or the host, what to attach, and how.

    Exactly one of ``instance_uuid`` and ``hostname`` is given, and exactly one of
    ``device_profile`` (a name), ``device_context`` (a uuid) and ``accelerator`` (a uuid). A
    repeated request gets the same attachment: it has the same ``uuid``, or the same selection and
    the same instance or host. With ``reboot``, which only the mode ``next-boot`` accepts, Nova
    reboots the instance. The mode of a host is ``host``.
    """

    uuid = types.optional(types.Uuid())
    instance_uuid = types.optional(types.Uuid())
    hostname = types.optional(HOST)
    device_profile = types.optional(types.Text(min_length=1))
    device_context = types.optional(types.Uuid())
    accelerator = types.optional(types.Uuid())
    mode = types.optional(MODE)
    reboot = types.optional(types.BOOLEAN)


def show(request: RequestContext, row: Any) -> dict[str, Any]:
    """Return an attachment as JSON."""
    return request.serialize(Attachment, _with_selector(row), ATTACHMENTS.name)


def _with_selector(row: Any) -> dict[str, Any]:
    # A context has a profile, too, which was not selected.
    is_profile = row["device_context"] is None and row["accelerator"] is None
    return {**row, "device_profile": row["device_profile_name"] if is_profile else None}


ATTACHMENTS = Collection(
    "attachments", "attachment", read, Attachment, since=(2, 6), scoped=True, show=show
)


class Controller(Resource):
    """The operations on attachments."""

    find = ATTACHMENTS.find(
        "List the attachments of the caller's project, or all for administrators and services.",
        {"instance": "instance_uuid", "host": "hostname"},
        instance=types.Uuid(),
        host=HOST,
        state=STATE,
    )
    get = ATTACHMENTS.get("Show the progress of an attachment.")

    @ATTACHMENTS.operation(
        "POST attachments", answer=Attachment, status=202, raises=(NotFound, Conflict)
    )
    def create(self, request: RequestContext, body: AttachmentCreate) -> Any:
        """Start to attach accelerators to an existing instance or to a host, in the background."""
        names = ("uuid", "instance_uuid", "hostname", "mode", "reboot", *SELECTORS)
        values = {name: getattr(body, name) for name in names}
        # Unset is a value of WSME, and not known on the bus.
        fields = {name: value for name, value in values.items() if value not in (wsme.Unset, None)}
        # A rule of its own: members do not see the accelerators that nobody owns.
        if check_selector(fields) == ACCELERATOR:
            request.caller.require("cyborg:attachment:create_by_accelerator")
        _, host = parse_target(fields)
        if host is not None:
            request.caller.require("cyborg:attachment:create_for_host")
            # An instance has a project, to which the attachment belongs; a host has none.
            fields["project_id"] = request.caller.project_id
        row = self.context.conductor.attachment_create(fields, request.caller.project_scope)
        return request.created(Attachment, _with_selector(row), ATTACHMENTS.name)

    @ATTACHMENTS.operation(
        "DELETE attachments/{uuid}", status=202, query={"reboot": types.TRUTH}, raises=(Conflict,)
    )
    def delete(self, request: RequestContext, uuid: str, reboot: str | None) -> None:
        """Start to detach the accelerators of an attachment; it is deleted at the end.

        An attach in progress is cancelled and undone.
        """
        # Only the row tells whose it is; the policy has a rule for attachments of hosts.
        if ATTACHMENTS.read_row(self, request, uuid)["instance_uuid"] is None:
            request.caller.require(DELETE_FOR_HOST)
        scope = request.caller.project_scope
        self.context.conductor.attachment_delete(
            uuid=uuid,
            instance=None,
            project_scope=scope,
            reboot=reboot == "true",
            accelerator=None,
            hostname=None,
        )

    @ATTACHMENTS.operation(
        "DELETE attachments",
        "delete",
        status=202,
        query={
            "instance": types.Uuid(),
            "host": HOST,
            "accelerator": types.Uuid(),
            "reboot": types.TRUTH,
        },
        raises=(NotFound, Conflict),
    )
    def delete_of_instance(
        self,
        request: RequestContext,
        instance: str | None,
        host: str | None,
        accelerator: str | None,
        reboot: str | None,
    ) -> None:
        """Start to detach all attachments of an instance, or those that hold an accelerator.

        With ``host``, detach the attachments of the host itself, but not those of instances on the
        host.
        """
        if (instance is None) == (host is None):
            raise Invalid(
                "instance: expected either instance, the uuid of a server, or host, a name",
                field="instance",
            )
        if host is not None:
            request.caller.require(DELETE_FOR_HOST)
        scope = request.caller.project_scope
        self.context.conductor.attachment_delete(
            uuid=None,
            instance=instance,
            project_scope=scope,
            reboot=reboot == "true",
            accelerator=accelerator,
            hostname=host,
        )
