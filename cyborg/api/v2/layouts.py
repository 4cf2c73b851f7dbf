# SPDX-License-Identifier: Apache-2.0
"""/v2/devices/{uuid}/layout: how a device is partitioned."""

from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.collection import Collection
from cyborg.api.controller import Resource
from cyborg.api.request_context import RequestContext
from cyborg.api.v2 import jobs
from cyborg.core.errors import NotFound
from cyborg.core.inventory.device import MAX_TEXT
from cyborg.core.jobs.job import JobKind
from cyborg.db.devices import read


class Layout(types.JsonObject):
    """A layout: the number of handles of each resource class, and the traits of the deployables."""

    name = wtypes.wsattr(str, mandatory=True)
    offers = wtypes.wsattr({str: int}, mandatory=True)
    traits = wtypes.wsattr([str], mandatory=True)


class DeviceLayout(types.JsonObject):
    """The current layout of a device, null if it has none, and all its possible layouts."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    layout = wtypes.wsattr(str)
    layouts = wtypes.wsattr([Layout], mandatory=True)
    links = wtypes.wsattr([types.Link], mandatory=True)


class LayoutChange(types.JsonObject):
    """The name of the layout to apply to a device.

    With ``drain``, the device is cordoned, and its job waits until no handle of it is in use.
    """

    layout = wtypes.wsattr(types.Text(MAX_TEXT, min_length=1), mandatory=True)
    drain = wtypes.wsattr(types.BOOLEAN)


LAYOUTS = Collection("devices", "layout", read, DeviceLayout, since=(2, 5))


class LayoutController(Resource):
    """The operations on layouts."""

    @LAYOUTS.operation(
        "GET devices/{uuid}/layout", "get_one", answer=DeviceLayout, raises=(NotFound,)
    )
    def get_layout(self, request: RequestContext, uuid: str) -> Any:
        """Show the layout of a device, and its possible layouts."""
        return request.serialize(DeviceLayout, LAYOUTS.read_row(self, request, uuid), LAYOUTS.name)

    @LAYOUTS.operation("PUT devices/{uuid}/layout", "set", body=LayoutChange, **jobs.STARTS_JOB)
    def set_layout(self, request: RequestContext, uuid: str, body: LayoutChange) -> Any:
        """Apply a layout to a device that no ARQ uses; a job does it in the background."""
        result = self.context.conductor.device_set_layout(uuid, body.layout, bool(body.drain))
        return jobs.serialize_created(request, JobKind.PARTITION, result)
