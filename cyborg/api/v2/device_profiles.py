# SPDX-License-Identifier: Apache-2.0
"""/v2/device_profiles: named requests for accelerators, which flavors refer to."""

from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.collection import Collection
from cyborg.api.controller import Resource
from cyborg.api.request_context import RequestContext
from cyborg.core.binding.profile import check_targets, parse_groups, parse_name
from cyborg.core.errors import Conflict, InUse, Invalid, NotFound
from cyborg.db.profiles import read

TARGET_SINCE = (2, 5)


def _groups(value: Any) -> list[dict[str, str]]:
    return [group.to_dict() for group in parse_groups(value)]


class DeviceProfile(types.JsonObject):
    """A device profile."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    name = wtypes.wsattr(str, mandatory=True)
    description = wtypes.wsattr(str)
    groups = wtypes.wsattr([{str: str}], mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class DeviceProfileEnvelope(types.JsonObject):
    """An object with a device profile as its only value."""

    device_profile = wtypes.wsattr(DeviceProfile, mandatory=True)


class DeviceProfileCreate(types.JsonObject):
    """A device profile to create."""

    name = wtypes.wsattr(
        types.Validated("name", parse_name, types.Text(min_length=1)), mandatory=True
    )
    groups = wtypes.wsattr(types.Validated("groups", _groups, [{str: str}]), mandatory=True)
    uuid = wtypes.wsattr(types.Uuid())
    description = wtypes.wsattr(types.Text(4096, lines=True))


DEVICE_PROFILES = Collection(
    "device_profiles", "device_profile", read, DeviceProfile, noun="device profile", scoped=True
)


class Controller(Resource):
    """The operations on device profiles."""

    find = DEVICE_PROFILES.find(
        "List all device profiles, or those with the given names. The hidden profile of a device "
        "context is listed by its name only.",
        {"name": "names"},
        name=types.CommaSeparated(),
    )

    @DEVICE_PROFILES.operation(
        "GET device_profiles/{key}", "get_one", answer=DeviceProfileEnvelope, raises=(NotFound,)
    )
    def get(self, request: RequestContext, key: str) -> Any:
        """Show a device profile by uuid or name."""
        row = DEVICE_PROFILES.read_row(self, request, key)
        return {"device_profile": DEVICE_PROFILES.show_row(request, row)}

    @DEVICE_PROFILES.operation(
        "POST device_profiles",
        "create",
        answer=DeviceProfile,
        status=201,
        body=DeviceProfileCreate,
        single_item_list=True,
        raises=(Conflict,),
    )
    def create(self, request: RequestContext, body: DeviceProfileCreate) -> Any:
        """Create a device profile; from version 2.5 on, ``accel:attach_target`` is checked."""
        if request.version >= TARGET_SINCE:
            check_targets(parse_groups(body.groups))
        row = self.context.conductor.device_profile_create(
            {
                "name": body.name,
                "groups": body.groups,
                "uuid": body.uuid or None,
                "description": body.description or None,
            }
        )
        return DEVICE_PROFILES.show_row(request, row)

    @DEVICE_PROFILES.operation(
        "DELETE device_profiles",
        "delete",
        query={"value": types.CommaSeparated()},
        raises=(NotFound, InUse),
    )
    def delete_many(self, request: RequestContext, value: tuple[str, ...] | None) -> None:
        """Delete several device profiles by uuid or name, all or none."""
        if not value:
            raise Invalid("value: expected the uuids or names of device profiles", field="value")
        self.context.conductor.device_profile_delete(list(value))

    @DEVICE_PROFILES.operation("DELETE device_profiles/{key}", "delete", raises=(NotFound, InUse))
    def delete(self, request: RequestContext, key: str) -> None:
        """Delete a device profile by uuid or name."""
        self.context.conductor.device_profile_delete([key])
