# SPDX-License-Identifier: Apache-2.0
"""/v2/devices: the cards and functions that agents discovered."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.collection import Collection
from cyborg.api.controller import Resource
from cyborg.api.paging import PageRequest
from cyborg.api.request_context import RequestContext
from cyborg.core.errors import Invalid, NotFound
from cyborg.core.inventory import device_state
from cyborg.core.inventory.device import Health
from cyborg.core.inventory.device_state import DeviceCondition
from cyborg.db.read import devices as read

STATUS_SINCE = (2, 3)
STATE_SINCE = (2, 4)
FILTERS = ("hostname", "type", "vendor")
STATUSES = types.Enum("enabled", "maintaining")
PATH = {"uuid": types.UuidOrName()}
MORE_FILTERS = {"status": STATUSES, "health": types.Enum(*Health), "address": types.Text()}


class Device(types.JsonObject):
    """A device, up to version 2.2."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    type = wtypes.wsattr(str, mandatory=True)
    vendor = wtypes.wsattr(str, mandatory=True)
    model = wtypes.wsattr(str, mandatory=True)
    std_board_info = wtypes.wsattr(str, mandatory=True)
    vendor_board_info = wtypes.wsattr(str, mandatory=True)
    hostname = wtypes.wsattr(str, mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class DeviceV23(Device):
    """A device, at version 2.3; ``status`` is set by the operator."""

    status = wtypes.wsattr(STATUSES, mandatory=True)


class DeviceV24(DeviceV23):
    """A device, from version 2.4 on.

    Only accelerators of a device in state ``ready`` can be bound. ``state_reasons`` are all
    conditions that prevent this; ``state`` is the first of them. ``placement`` is the worst status
    of its resource providers, null if it has none.
    """

    state = wtypes.wsattr(types.Enum(*DeviceCondition), mandatory=True)
    state_reasons = wtypes.wsattr([types.Enum(*DeviceCondition)], mandatory=True)
    health = wtypes.wsattr(types.Enum(*Health), mandatory=True)
    health_reason = wtypes.wsattr(str)
    health_since = wtypes.wsattr(datetime, mandatory=True)
    address = wtypes.wsattr(str, mandatory=True)
    backend = wtypes.wsattr(str, mandatory=True)
    numa_node = wtypes.wsattr(int)
    serial = wtypes.wsattr(str)
    setup_required = wtypes.wsattr(bool, mandatory=True)
    reboot_required = wtypes.wsattr(bool, mandatory=True)
    draining = wtypes.wsattr(bool, mandatory=True)
    placement = wtypes.wsattr(types.Enum("in_sync", "stale", "error"))


def show(request: RequestContext, row: read.DeviceRow) -> dict[str, Any]:
    """Return a device as JSON."""
    more: dict[str, Any] = {
        "std_board_info": json.dumps(row["std_board_info"]),
        "vendor_board_info": json.dumps(row["vendor_board_info"]),
    }
    if request.version < STATUS_SINCE:
        return request.serialize(Device, row, DEVICES.name, **more)
    if request.version < STATE_SINCE:
        return request.serialize(DeviceV23, row, DEVICES.name, **more)
    status = device_state.evaluate_row(row)
    more |= {"state": status.state, "state_reasons": list(status.reasons)}
    return request.serialize(DeviceV24, row, DEVICES.name, **more)


DEVICES = Collection("devices", "device", read, DeviceV24, show=show)


class Controller(Resource):
    """The operations on devices."""

    @DEVICES.list_operation(
        query={
            **dict.fromkeys(FILTERS, types.Text()),
            **MORE_FILTERS,
            "filters.field": types.Repeated(types.Enum(*FILTERS)),
            "filters.value": types.Repeated(types.Text()),
        },
        query_since=dict.fromkeys(MORE_FILTERS, STATE_SINCE),
    )
    def find(self, request: RequestContext, page: PageRequest, **filters: Any) -> Any:
        """List devices. Filters that no device matches give an empty list."""
        criteria = _merge_filters(filters)
        rows = ([], None) if criteria is None else self.read_page(page, read.find, **criteria)
        return DEVICES.document(request, rows)

    get = DEVICES.get("Show one device.", path=PATH)

    @DEVICES.operation("POST devices/{uuid}/enable", "enable", path=PATH, raises=(NotFound,))
    def enable(self, request: RequestContext, uuid: str) -> None:
        """Enable a device: new ARQs can be bound to it."""
        self._set(uuid, "enabled")

    @DEVICES.operation("POST devices/{uuid}/disable", "disable", path=PATH, raises=(NotFound,))
    def disable(self, request: RequestContext, uuid: str) -> None:
        """Disable a device: no new ARQs are bound to it, existing bindings stay."""
        self._set(uuid, "maintaining")

    def _set(self, uuid: str, status: str) -> None:
        try:
            device = types.load(types.Uuid(), uuid, "uuid")
        except Invalid:
            raise NotFound(f"no device {uuid}") from None
        self.context.conductor.device_set_status(device, status)


def _merge_filters(filters: Mapping[str, Any]) -> dict[str, str] | None:
    """Return plain and ``filters.field`` filters as one dict; None if two are contradictory."""
    fields, values = filters["filters.field"] or [], filters["filters.value"] or []
    if len(fields) != len(values):
        raise Invalid("filters.field and filters.value must come in pairs", field="filters.field")
    merged: dict[str, str] = {}
    names = (*FILTERS, *MORE_FILTERS)
    plain = [(name, filters[name]) for name in names if filters[name] is not None]
    for name, value in [*plain, *zip(fields, values, strict=True)]:
        if merged.setdefault(name, value) != value:
            return None
    return merged
