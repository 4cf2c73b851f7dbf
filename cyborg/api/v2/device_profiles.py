# SPDX-License-Identifier: Apache-2.0
"""/v2/device_profiles: what users may ask for, by name."""

from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core.errors import Conflict, InUse, Invalid, NotFound
from cyborg.core.profile import parse_groups, parse_name
from cyborg.db.read import device_profiles as read
from cyborg.db.read.paging import Row

NAME = "device_profiles"


def _groups(value: Any) -> list[dict[str, str]]:
    return [group.to_dict() for group in parse_groups(value)]


class DeviceProfile(wtypes.Base):  # type: ignore[misc]
    """A device profile."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    name = wtypes.wsattr(str, mandatory=True)
    description = wtypes.wsattr(str)
    groups = wtypes.wsattr([{str: str}], mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class DeviceProfiles(wtypes.Base):  # type: ignore[misc]
    """A list of device profiles."""

    device_profiles = wtypes.wsattr([DeviceProfile], mandatory=True)
    device_profiles_links = wtypes.wsattr([types.Link])


class OneDeviceProfile(wtypes.Base):  # type: ignore[misc]
    """A device profile, wrapped."""

    device_profile = wtypes.wsattr(DeviceProfile, mandatory=True)


class NewDeviceProfile(wtypes.Base):  # type: ignore[misc]
    """The wish for a device profile."""

    name = wtypes.wsattr(types.Checked("name", parse_name, types.Text(shortest=1)), mandatory=True)
    groups = wtypes.wsattr(types.Checked("groups", _groups, [{str: str}]), mandatory=True)
    uuid = wtypes.wsattr(types.Uuid())
    description = wtypes.wsattr(types.Text(4096, lines=True))


def show(call: Call, row: Row) -> dict[str, Any]:
    """Return a profile as JSON."""
    return call.dump(DeviceProfile, row, NAME)


class Controller(Resource):
    """The operations on device profiles."""

    @operation(
        rule="cyborg:device_profile:get_all",
        answer=DeviceProfiles,
        query={"name": types.Commas()},
        paged=True,
    )
    def find(self, call: Call, name: tuple[str, ...] | None, page: Asked) -> Any:
        """List device profiles, all or those of the names given."""
        with self.desk.reader.connect() as connection:
            found = page.read(lambda part: read.find(connection, page=part, names=name))
        return call.collection(NAME, show, found)

    @operation(
        rule="cyborg:device_profile:get_one",
        answer=OneDeviceProfile,
        path={"key": types.Key()},
        raises=(NotFound,),
    )
    def get(self, call: Call, key: str) -> Any:
        """Show the device profile of this uuid or name."""
        with self.desk.reader.connect() as connection:
            row = read.get(connection, key)
        if row is None:
            raise NotFound(f"no device profile {key}")
        return {"device_profile": show(call, row)}

    @operation(
        rule="cyborg:device_profile:create",
        answer=DeviceProfile,
        status=201,
        body=NewDeviceProfile,
        listed=True,
        raises=(Conflict,),
    )
    def create(self, call: Call, body: NewDeviceProfile) -> Any:
        """Make a device profile."""
        row = self.desk.conductor.device_profile_create(
            {
                "name": body.name,
                "groups": body.groups,
                "uuid": body.uuid or None,
                "description": body.description or None,
            }
        )
        return show(call, row)

    @operation(
        rule="cyborg:device_profile:delete",
        status=204,
        query={"value": types.Commas()},
        raises=(NotFound, InUse),
    )
    def delete_many(self, call: Call, value: tuple[str, ...] | None) -> None:
        """Delete the device profiles of these uuids or names, all or none."""
        if not value:
            raise Invalid("value: expected the uuids or names of device profiles", field="value")
        self.desk.conductor.device_profile_delete(list(value))

    @operation(
        rule="cyborg:device_profile:delete",
        status=204,
        path={"key": types.Key()},
        raises=(NotFound, InUse),
    )
    def delete(self, call: Call, key: str) -> None:
        """Delete the device profile of this uuid or name."""
        self.desk.conductor.device_profile_delete([key])
