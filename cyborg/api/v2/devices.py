# SPDX-License-Identifier: Apache-2.0
"""/v2/devices: the cards and functions that the agents found."""

import json
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core import life
from cyborg.core.device import Health
from cyborg.core.errors import Invalid, NotFound
from cyborg.core.life import Life
from cyborg.db.read import devices as read
from cyborg.db.read.paging import Row

NAME = "devices"
STATUS_SINCE = (2, 3)
LIFE_SINCE = (2, 4)
FILTERS = ("hostname", "type", "vendor")
STATUSES = types.OneOf("enabled", "maintaining")
MORE_FILTERS = {"status": STATUSES, "health": types.OneOf(*Health), "address": types.Text()}


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
    """A device, at version 2.3; ``status`` is what the operator wants."""

    status = wtypes.wsattr(STATUSES, mandatory=True)


class DeviceWithLife(DeviceWithStatus):
    """A device, from version 2.4 on.

    Only in state ``ready`` is anything of it given out; ``state_reasons`` has all that speaks
    against it, of which ``state`` is the first.
    """

    state = wtypes.wsattr(types.OneOf(*Life), mandatory=True)
    state_reasons = wtypes.wsattr([types.OneOf(*Life)], mandatory=True)
    health = wtypes.wsattr(types.OneOf(*Health), mandatory=True)
    health_reason = wtypes.wsattr(str)
    health_since = wtypes.wsattr(datetime, mandatory=True)
    address = wtypes.wsattr(str, mandatory=True)
    backend = wtypes.wsattr(str, mandatory=True)
    numa_node = wtypes.wsattr(int)
    serial = wtypes.wsattr(str)
    setup_required = wtypes.wsattr(bool, mandatory=True)
    reboot_required = wtypes.wsattr(bool, mandatory=True)
    draining = wtypes.wsattr(bool, mandatory=True)


class Devices(wtypes.Base):  # type: ignore[misc]
    """A list of devices."""

    devices = wtypes.wsattr([DeviceWithLife], mandatory=True)
    devices_links = wtypes.wsattr([types.Link])


def show(call: Call, row: Row) -> dict[str, Any]:
    """Return a device as JSON."""
    more: dict[str, Any] = {
        name: json.dumps(row[name]) for name in ("std_board_info", "vendor_board_info")
    }
    if call.version < STATUS_SINCE:
        return call.dump(Device, row, NAME, **more)
    if call.version < LIFE_SINCE:
        return call.dump(DeviceWithStatus, row, NAME, **more)
    standing = life.decide(life.Facts(**{name: row[name] for name in _FACTS}))
    more |= {"state": standing.state, "state_reasons": list(standing.reasons)}
    return call.dump(DeviceWithLife, row, NAME, **more)


_FACTS = tuple(field.name for field in fields(life.Facts))


class Controller(Resource):
    """The operations on devices."""

    @operation(
        rule="cyborg:device:get_all",
        answer=Devices,
        query={
            **dict.fromkeys(FILTERS, types.Text()),
            **MORE_FILTERS,
            "filters.field": types.Many(types.OneOf(*FILTERS)),
            "filters.value": types.Many(types.Text()),
        },
        later=dict.fromkeys(MORE_FILTERS, LIFE_SINCE),
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
        answer=DeviceWithLife,
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
    names = (*FILTERS, *MORE_FILTERS)
    plain = [(name, filters[name]) for name in names if filters[name] is not None]
    for name, value in [*plain, *zip(fields, values, strict=True)]:
        if wanted.setdefault(name, value) != value:
            return None
    return wanted
