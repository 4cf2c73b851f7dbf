# SPDX-License-Identifier: Apache-2.0
"""/v2/devices: the cards and functions that the agents found."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core.errors import Invalid, NotFound
from cyborg.db.read import devices as read
from cyborg.db.read.paging import Row

NAME = "devices"
STATUS_SINCE = (2, 3)
FILTERS = ("hostname", "type", "vendor")


class Device(wtypes.Base):  # type: ignore[misc]
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


class DeviceWithStatus(Device):
    """A device, from version 2.3 on."""

    status = wtypes.wsattr(types.OneOf("enabled", "maintaining"), mandatory=True)


class Devices(wtypes.Base):  # type: ignore[misc]
    """A list of devices."""

    devices = wtypes.wsattr([DeviceWithStatus], mandatory=True)
    devices_links = wtypes.wsattr([types.Link])


def show(call: Call, row: Row) -> dict[str, Any]:
    """Return a device as JSON."""
    return call.dump(
        Device if call.version < STATUS_SINCE else DeviceWithStatus,
        row,
        NAME,
        std_board_info=json.dumps(row["std_board_info"]),
        vendor_board_info=json.dumps(row["vendor_board_info"]),
    )


class Controller(Resource):
    """The operations on devices."""

    @operation(
        rule="cyborg:device:get_all",
        answer=Devices,
        query={
            **dict.fromkeys(FILTERS, types.Text()),
            "filters.field": types.Many(types.OneOf(*FILTERS)),
            "filters.value": types.Many(types.Text()),
        },
        paged=True,
    )
    def find(self, call: Call, page: Asked, **filters: Any) -> Any:
        """List devices; a filter's value that no device has gives an empty list."""
        wanted = _wanted(filters)
        if wanted is None:
            return call.collection(NAME, show, ([], None))
        with self.desk.reader.connect() as connection:
            found = page.read(lambda part: read.find(connection, page=part, **wanted))
        return call.collection(NAME, show, found)

    @operation(
        rule="cyborg:device:get_one",
        answer=DeviceWithStatus,
        path={"uuid": types.Key()},
        raises=(NotFound,),
    )
    def get(self, call: Call, uuid: str) -> Any:
        """Show one device."""
        with self.desk.reader.connect() as connection:
            row = read.get(connection, uuid)
        if row is None:
            raise NotFound(f"no device {uuid}")
        return show(call, row)

    @operation(
        rule="cyborg:device:enable",
        status=204,
        path={"uuid": types.Key()},
        raises=(NotFound,),
    )
    def enable(self, call: Call, uuid: str) -> None:
        """Open a device to new requests."""
        self._set(uuid, "enabled")

    @operation(
        rule="cyborg:device:disable",
        status=204,
        path={"uuid": types.Key()},
        raises=(NotFound,),
    )
    def disable(self, call: Call, uuid: str) -> None:
        """Close a device to new requests; what is bound stays bound."""
        self._set(uuid, "maintaining")

    def _set(self, uuid: str, status: str) -> None:
        try:
            device = types.load(types.Uuid(), uuid, "uuid")
        except Invalid:
            raise NotFound(f"no device {uuid}") from None
        self.desk.conductor.device_set_status(device, status)


def _wanted(filters: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the filters that were given, of both forms; None when two of them contradict."""
    fields, values = filters["filters.field"] or [], filters["filters.value"] or []
    if len(fields) != len(values):
        raise Invalid("filters.field and filters.value come in pairs", field="filters.field")
    wanted: dict[str, str] = {}
    plain = [(name, filters[name]) for name in FILTERS if filters[name] is not None]
    for name, value in [*plain, *zip(fields, values, strict=True)]:
        if wanted.setdefault(name, value) != value:
            return None
    return wanted
