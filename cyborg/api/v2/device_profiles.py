# SPDX-License-Identifier: Apache-2.0
"""/v2/device_profiles: named requests for accelerators, which flavors refer to.

Their capacity is the number of further servers. An administrator sees it by host, other callers for
the whole cloud.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cyborg.api import types
from cyborg.api.controller import PageRequest, RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.api.v2 import explanations
from cyborg.core.binding.profile import check_targets, parse_groups, parse_name
from cyborg.core.errors import Conflict, Forbidden, InUse, Invalid, NotFound
from cyborg.core.explain.capacity import HostCapacity, count_capacity
from cyborg.core.explain.predicates import Predicate
from cyborg.db import paging
from cyborg.db.explain import provider_counts
from cyborg.db.profiles import read

TARGET_SINCE = (2, 5)


def _groups(value: Any) -> list[dict[str, str]]:
    return [group.to_dict() for group in parse_groups(value)]


class DeviceProfile(types.JsonObject, row=read.DeviceProfileRow, links=True):
    """A device profile."""


class DeviceProfileEnvelope(types.JsonObject):
    """An object with a device profile as its only value."""

    device_profile = types.required(DeviceProfile)


class DeviceProfileCreate(types.JsonObject):
    """A device profile to create."""

    name = types.required(types.Validated("name", parse_name, types.Text(min_length=1)))
    groups = types.required(types.Validated("groups", _groups, [{str: str}]))
    uuid = types.optional(types.Uuid())
    description = types.optional(types.Text(4096, lines=True))


DEVICE_PROFILES = Collection("device_profiles", "device_profile", read, DeviceProfile, scoped=True)


class Controller(Resource):
    """The operations on device profiles."""

    find = DEVICE_PROFILES.find(
        "List all device profiles, or those with the given names. The hidden profile of a device "
        "context is listed by its name only.",
        {"name": "names"},
        name=types.CommaSeparated(),
    )

    @DEVICE_PROFILES.operation("GET device_profiles/{key}", "get_one", answer=DeviceProfileEnvelope)
    def get(self, request: RequestContext, key: str) -> Any:
        """Show a device profile by uuid or name."""
        row = DEVICE_PROFILES.read_row(self, request, key)
        return {"device_profile": DEVICE_PROFILES.show_row(request, row)}

    @DEVICE_PROFILES.operation(
        "POST device_profiles",
        answer=DeviceProfile,
        status=201,
        single_item_list=True,
        raises=(Conflict,),
    )
    def create(self, request: RequestContext, body: DeviceProfileCreate) -> Any:
        """Create a device profile; from version 2.5 on, ``accel:attach_target`` is checked."""
        # Older versions accept any value, and existing clients may send one.
        if request.version >= TARGET_SINCE:
            check_targets(parse_groups(body.groups))
        row = self.context.conductor.device_profile_create(
            {
                "name": body.name,
                "groups": body.groups,
                # Unset is a value of WSME, and not known on the bus.
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

    @DEVICE_PROFILES.operation("DELETE device_profiles/{key}", raises=(InUse,))
    def delete(self, request: RequestContext, key: str) -> None:
        """Delete a device profile by uuid or name."""
        self.context.conductor.device_profile_delete([key])


class Loss(types.JsonObject):
    """A number of handles that cannot be used now, by the predicate that they fail first.

    ``remedy`` is null for a caller who is not an administrator.
    """

    code = types.required(str)
    reason = types.required(str)
    remedy = types.optional(str)
    handles = types.required(int)


_NAMES = {"host": "hostname", "free": "free_handles", "total": "handles"}


class HostCapacityType(types.JsonObject, row=HostCapacity, names=_NAMES):
    """The capacity of one host."""

    losses = types.required([Loss])


class Capacity(
    types.JsonObject, row=HostCapacity, only=("servers", "exact", "free", "total"), names=_NAMES
):
    """How many more servers with a device profile fit now.

    ``servers`` is a lower bound if it is not ``exact``. ``handles`` counts the handles of matching
    devices. ``losses`` are ordered by their number of handles; ``hosts`` is a page of the hosts,
    for an administrator.
    """

    uuid = types.required(types.Uuid())
    name = types.required(str)
    losses = types.required([Loss])
    hosts = types.required([HostCapacityType])
    hosts_links = types.optional([types.Link])


class CapacityController(Resource):
    """The operation on capacities."""

    @explanations.EXPLANATIONS.operation(
        "GET device_profiles/{key}/capacity",
        answer=Capacity,
        query={"host": types.Text()},
        paged=True,
        takes_turns=True,
        raises=(Forbidden,),
    )
    def capacity(
        self, request: RequestContext, key: str, host: str | None, page: PageRequest
    ) -> Any:
        """Show how many more servers with a device profile fit now, and why handles cannot be used.

        Only an administrator sees the hosts, or may select one of them. For other callers, the
        quota of their project limits the number.
        """
        elevated = explanations.check_host(request, host)
        profile, demands = explanations.read_demands(self, request, key)
        project = request.caller.project_id
        # The number of servers that the quota still allows, None without limit.
        room = None if elevated else explanations.count_room(self, project, demands)
        with explanations.take_turn(self, host):
            with self.context.reader.connect() as connection:
                counts = provider_counts.find(connection, demands, host=host)
            capacities = count_capacity(demands, counts)
        # Hosts without a matching device would only be noise.
        hosts = [item for item in capacities if item.total or item.losses]
        losses = Counter[Predicate]()
        for item in hosts:
            losses.update(item.losses)
        servers, free = sum(item.servers for item in hosts), sum(item.free for item in hosts)
        # One lower bound makes the sum a lower bound.
        exact = all(item.exact for item in hosts)
        # The free handles beyond the quota count as lost to it, so that the numbers add up. The
        # number of servers is exact then: the quota is, and the bound of the hosts is higher.
        if room is not None and room < servers:
            usable = room * sum(demand.count for demand in demands)
            losses[Predicate.QUOTA] = free - usable
            servers = room
            free = usable
            exact = True
        document = {
            "uuid": profile["uuid"],
            "name": profile["name"],
            "servers": servers,
            "exact": exact,
            "free_handles": free,
            "handles": sum(item.total for item in hosts),
            "losses": _losses(losses, elevated=elevated),
            "hosts": [],
        }
        if not elevated:
            return document
        # A page ends with the uuid of its last row: a host has only its name.
        rows: list[dict[str, Any]] = [
            {"uuid": item.host, "hostname": item.host, "servers": item.servers, "capacity": item}
            for item in hosts
        ]
        shown, marker = page.read(
            lambda window: paging.paginate_rows(rows, window, ("hostname", "servers"))
        )
        document["hosts"] = [_host(row["capacity"]) for row in shown]
        path = f"device_profiles/{profile['uuid']}/capacity"
        return request.add_next_link(document, path, "hosts", marker)


def _host(capacity: HostCapacity) -> dict[str, Any]:
    losses = _losses(capacity.losses, elevated=True)
    return types.serialize(HostCapacityType, {**asdict(capacity), "losses": losses})


def _losses(losses: Mapping[Predicate, int], *, elevated: bool) -> list[dict[str, Any]]:
    return [
        {**explanations.describe_predicate(predicate, elevated), "handles": count}
        for predicate, count in Counter(losses).most_common()
    ]
