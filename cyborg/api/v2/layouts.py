# SPDX-License-Identifier: Apache-2.0
"""/v2/devices/{uuid}/layout: the layouts of a device."""

from typing import Any

import sqlalchemy as sa

from cyborg.api import types
from cyborg.api.controller import RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.api.v2 import jobs
from cyborg.core.device_sets import layouts
from cyborg.core.errors import Invalid
from cyborg.core.inventory import device as core
from cyborg.core.inventory import device_state
from cyborg.core.jobs.job import JobKind
from cyborg.db.device_sets import read as device_sets
from cyborg.db.devices import read
from cyborg.db.devices.read import DeviceRow

PREVIEW_SINCE = (2, 6)


class Layout(types.JsonObject, row=core.Layout):
    """A layout: the number of handles of each resource class, and the traits of the deployables."""


class DeviceLayout(types.JsonObject):
    """The current layout of a device, null if it has none, and all its possible layouts."""

    uuid = types.required(types.Uuid())
    layout = types.optional(str)
    layouts = types.required([Layout])
    links = types.required([types.Link])


class SetChange(types.JsonObject, row=layouts.SetChange, without=("id",)):
    """The offer of a device set, which is a deployable, before and after a change of a layout.

    ``reason`` says why the set is not offered afterwards, or is null.
    """

    uuid = types.required(types.Uuid())
    address = types.required(str)
    size = types.required(int)


class LayoutPreview(types.JsonObject):
    """What a layout of the device would change in the offers of the device sets of its host.

    A set that the device leaves is listed also if it is not offered before.
    """

    layout = types.required(str)
    device_sets = types.required([SetChange])


class DeviceLayoutV26(DeviceLayout):
    """The layouts of a device as versions from 2.6 on show them.

    ``preview`` is that of the layout in the query, null without it.
    """

    preview = types.optional(LayoutPreview)


class LayoutChange(types.JsonObject):
    """The name of the layout to apply to a device.

    With ``drain``, the device is cordoned, and its job waits until no handle of it is in use.
    """

    layout = types.required(types.Text(core.MAX_TEXT, min_length=1))
    drain = types.optional(types.BOOLEAN)


LAYOUTS = Collection("devices", "layout", read, DeviceLayoutV26, since=(2, 5))


class Controller(Resource):
    """The operations on layouts."""

    @LAYOUTS.operation(
        "GET devices/{uuid}/layout",
        "get_one",
        answer=DeviceLayoutV26,
        query={"preview": types.Text(core.MAX_TEXT, min_length=1)},
        query_since={"preview": PREVIEW_SINCE},
        raises=(Invalid,),
    )
    def get_layout(self, request: RequestContext, uuid: str, preview: str | None) -> Any:
        """Show the layout of a device, its possible layouts, and the effect of another one."""
        with self.context.reader.connect() as connection:
            row = LAYOUTS.find_row(connection, uuid)
            sets = None if preview is None else _preview(connection, row, preview)
        if request.version < PREVIEW_SINCE:
            return request.serialize(DeviceLayout, row, LAYOUTS.name)
        shown = None if sets is None else {"layout": preview, "device_sets": sets}
        return request.serialize(DeviceLayoutV26, row, LAYOUTS.name, preview=shown)

    @LAYOUTS.operation("PUT devices/{uuid}/layout", "set", **jobs.STARTS_JOB)
    def set_layout(self, request: RequestContext, uuid: str, body: LayoutChange) -> Any:
        """Apply a layout to a device that no ARQ uses; a job does it in the background."""
        result = self.context.conductor.device_set_layout(uuid, body.layout, bool(body.drain))
        return jobs.serialize_created(request, JobKind.PARTITION, result)


def _preview(connection: sa.Connection, row: DeviceRow, name: str) -> list[dict[str, Any]]:
    """Return the changes of the device sets of the host by a layout. Raise Invalid."""
    found = next((layout for layout in row["layouts"] if layout["name"] == name), None)
    if found is None:
        names = ", ".join(layout["name"] for layout in row["layouts"]) or "none, it has no layouts"
        raise Invalid(f"unknown layout {name!r}, expected one of {names}", field="preview")
    # The offers do not depend on whether the host is down, and another layout has other handles.
    others = {"host_down": False, "withheld": False, "deliverable": True}
    status = device_state.evaluate_row(row, **others)
    change = layouts.LayoutChange(
        host=row["hostname"],
        device=row["address"],
        layout=core.Layout.from_dict(found),
        condition=None if status.schedulable else str(status.state),
    )
    rows = {each["id"]: each for each in device_sets.sets_of_host(connection, change.host)}
    if not rows:
        return []
    units = device_sets.units_of_host(connection, change.host)
    sets, uses = device_sets.make_sets([*rows.values()], units)
    names_of_groups = sorted({each["set_group"] for each in rows.values() if each["set_group"]})
    groups = {group: device_sets.summarize_group(connection, group) for group in names_of_groups}
    sizes = {each.id: each.device_set.size for each in sets}
    return [
        {
            "uuid": rows[each.id]["uuid"],
            "address": rows[each.id]["address"],
            "size": sizes[each.id],
            "before": each.before,
            "after": each.after,
            "reason": each.reason,
        }
        for each in layouts.preview_layout(change, sets, uses, groups)
    ]
