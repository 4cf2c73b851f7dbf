# SPDX-License-Identifier: Apache-2.0
"""/v2/accelerators: the attach handles, with the ARQ that each is bound to and its label."""

from typing import Any

import wsme

from cyborg.api import types
from cyborg.api.controller import PageRequest, RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.api.v2.devices import conditions_at
from cyborg.core.binding import accelerator as core
from cyborg.core.binding.accelerator import AcceleratorState
from cyborg.core.errors import Conflict
from cyborg.core.inventory.device_state import DeviceCondition
from cyborg.db.binding import accelerators as read

ERROR_SINCE = (2, 5)
NAME_SINCE = ATTACHED_SINCE = (2, 6)
LABEL = ("name", "description", "tags")


class Accelerator(
    types.JsonObject,
    row=read.AcceleratorRow,
    without=("error", "attached_at", "attach_error"),
    links=True,
):
    """An accelerator as version 2.4 shows it: a unit that can be attached to one instance.

    ``state_reasons`` are the conditions of its device that prevent new bindings. While the
    accelerator is not bound, the fields of the ARQ and of the label are null, and ``tags`` is
    empty.
    """

    attach_handle_info = types.required({str: str})
    state = types.required(types.Enum(*AcceleratorState))
    state_reasons = types.required([types.Enum(*DeviceCondition)])


class AcceleratorV25(Accelerator):
    """An accelerator as version 2.5 shows it.

    ``error`` is the last error of the job that cleans the accelerator, or that prepares it again
    after a reboot of its host. Only administrators and services see the error.
    """

    error = types.optional(str)


class AcceleratorV26(AcceleratorV25, row=read.AcceleratorRow, only=("attached_at", "attach_error")):
    """An accelerator as versions from 2.6 on show it.

    Both new fields are those of its ARQ: for a device that the agent attaches, and not Nova, since
    when the guest has the device, and why a running guest lacks it.
    """


_Tag = types.Text(core.MAX_TAG, min_length=1)


class Label(types.JsonObject):
    """The label of an accelerator. A missing field keeps its value, null removes it."""

    name = types.optional(types.Text(core.MAX_NAME, min_length=1))
    description = types.optional(types.Text(core.MAX_DESCRIPTION, lines=True))
    tags = types.optional(types.Validated("tags", core.parse_tags, [_Tag]))


def show(request: RequestContext, row: read.AcceleratorRow) -> dict[str, Any]:
    """Return an accelerator as JSON. Version 2.4 shows the state ``error`` as ``dirty``."""
    more: dict[str, Any] = {"state_reasons": conditions_at(request, row["state_reasons"])}
    if request.version < ERROR_SINCE:
        if row["state"] == AcceleratorState.ERROR:
            more["state"] = str(AcceleratorState.DIRTY)
        return request.serialize(Accelerator, row, ACCELERATORS.name, **more)
    # The error is about the host, which users do not see.
    if request.caller.project_scope is not None:
        more["error"] = None
    kind = AcceleratorV25 if request.version < ATTACHED_SINCE else AcceleratorV26
    return request.serialize(kind, row, ACCELERATORS.name, **more)


ACCELERATORS = Collection(
    "accelerators", "accelerator", read, AcceleratorV26, since=(2, 4), scoped=True, show=show
)


class Controller(Resource):
    """The operations on accelerators."""

    @ACCELERATORS.list_operation(
        query={
            "device": types.Uuid(),
            "driver": types.Text(),
            "host": types.Text(),
            "instance": types.Uuid(),
            "resource_class": types.Text(),
            "state": types.Enum(*AcceleratorState),
            "name": types.Text(min_length=1),
            "address": types.Text(),
        },
        query_since={"name": NAME_SINCE, "address": NAME_SINCE},
    )
    def find(
        self,
        request: RequestContext,
        page: PageRequest,
        device: str | None,
        host: str | None,
        instance: str | None,
        state: str | None,
        **filters: str | None,
    ) -> Any:
        """List the accelerators of the caller's project, or all for administrators and services."""
        states = [] if state is None else [state]
        if state == AcceleratorState.DIRTY and request.version < ERROR_SINCE:
            states.append(AcceleratorState.ERROR)  # shown as dirty
        rows = self.read_page(
            page,
            read.find,
            device_uuid=device,
            hostname=host,
            instance_uuid=instance,
            states=states,
            project_id=request.caller.project_scope,
            **filters,
        )
        return ACCELERATORS.document(request, rows)

    get = ACCELERATORS.get("Show one accelerator.")

    @ACCELERATORS.operation("PATCH accelerators/{uuid}", answer=AcceleratorV26, raises=(Conflict,))
    def update(self, request: RequestContext, uuid: str, body: Label) -> Any:
        """Set the label of a bound accelerator; the label is removed when the ARQ is unbound."""
        # A missing field is Unset, and null is None: only the former keeps its value.
        given = {name: getattr(body, name) for name in LABEL}
        label = {name: value for name, value in given.items() if value is not wsme.Unset}
        row = self.context.conductor.accelerator_update(
            uuid, core.parse_label(label), request.caller.project_scope
        )
        return ACCELERATORS.show_row(request, row)
