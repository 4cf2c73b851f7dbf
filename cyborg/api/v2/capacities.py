# SPDX-License-Identifier: Apache-2.0
"""/v2/device_profiles/{key}/capacity: for how many more servers devices are available.

An administrator sees hosts. Other callers see numbers of the whole cloud.
"""

from collections import Counter
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.controller import Resource
from cyborg.api.paging import PageRequest
from cyborg.api.request_context import RequestContext
from cyborg.api.v2.explanations import (
    EXPLANATIONS,
    check_host,
    count_room,
    read_demands,
    resource_classes_of,
    with_links,
)
from cyborg.core.errors import Forbidden, NotFound
from cyborg.core.explain.capacity import HostCapacity, compute_capacity
from cyborg.core.explain.predicates import Predicate
from cyborg.db import paging
from cyborg.db.explain import provider_states


class Loss(types.JsonObject):
    """A number of handles that cannot be used now, by the predicate that they fail first.

    ``remedy`` is null for a caller who is not an administrator.
    """

    code = wtypes.wsattr(str, mandatory=True)
    reason = wtypes.wsattr(str, mandatory=True)
    remedy = wtypes.wsattr(str)
    handles = wtypes.wsattr(int, mandatory=True)


class HostCapacityType(types.JsonObject):
    """The capacity of one host."""

    hostname = wtypes.wsattr(str, mandatory=True)
    servers = wtypes.wsattr(int, mandatory=True)
    exact = wtypes.wsattr(bool, mandatory=True)
    free_handles = wtypes.wsattr(int, mandatory=True)
    handles = wtypes.wsattr(int, mandatory=True)
    losses = wtypes.wsattr([Loss], mandatory=True)


class Capacity(types.JsonObject):
    """How many more servers with a device profile fit now.

    ``servers`` is a lower bound if it is not ``exact``. ``handles`` counts the handles of matching
    devices. ``losses`` are ordered by their number of handles; ``hosts`` is a page of the hosts,
    for an administrator.
    """

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    name = wtypes.wsattr(str, mandatory=True)
    servers = wtypes.wsattr(int, mandatory=True)
    exact = wtypes.wsattr(bool, mandatory=True)
    free_handles = wtypes.wsattr(int, mandatory=True)
    handles = wtypes.wsattr(int, mandatory=True)
    losses = wtypes.wsattr([Loss], mandatory=True)
    hosts = wtypes.wsattr([HostCapacityType], mandatory=True)
    hosts_links = wtypes.wsattr([types.Link])


class CapacityController(Resource):
    """The operation on capacities."""

    @EXPLANATIONS.operation(
        "GET device_profiles/{key}/capacity",
        "capacity",
        answer=Capacity,
        query={"host": types.Text()},
        paged=True,
        raises=(NotFound, Forbidden),
    )
    def capacity(
        self, request: RequestContext, key: str, host: str | None, page: PageRequest
    ) -> Any:
        """Show how many more servers with a device profile fit now, and why handles cannot be used.

        Only an administrator sees the hosts, or may select one of them. For other callers, the
        quota of their project limits the number.
        """
        elevated = check_host(request, host)
        profile, demands = read_demands(self, request, key)
        room = None if elevated else count_room(self, request.caller.project_id, demands)
        with self.context.reader.connect() as connection:
            states = provider_states.find(
                connection,
                resource_classes=resource_classes_of(demands),
                host=host,
                attach_targets={demand.target for demand in demands},
            )
        found = [each for each in compute_capacity(demands, states) if each.total or each.losses]
        losses = Counter[Predicate]()
        for each in found:
            losses.update(each.losses)
        servers, free = sum(each.servers for each in found), sum(each.free for each in found)
        exact = all(each.exact for each in found)
        if room is not None and room < servers:
            usable = room * sum(demand.count for demand in demands)
            losses[Predicate.QUOTA] = free - usable
            servers, free, exact = room, usable, True
        document = {
            "uuid": profile["uuid"],
            "name": profile["name"],
            "servers": servers,
            "exact": exact,
            "free_handles": free,
            "handles": sum(each.total for each in found),
            "losses": _losses(losses, elevated),
            "hosts": [],
        }
        if not elevated:
            return document
        # A page ends with the uuid of its last row: a host has only its name.
        rows: list[dict[str, Any]] = [
            {"uuid": each.host, "hostname": each.host, "servers": each.servers, "capacity": each}
            for each in found
        ]
        shown, marker = page.read(
            lambda window: paging.paginate_rows(rows, window, ("hostname", "servers"))
        )
        document["hosts"] = [_host(row["capacity"]) for row in shown]
        path = f"device_profiles/{profile['uuid']}/capacity"
        return with_links(request, document, path, "hosts", marker)


def _host(capacity: HostCapacity) -> dict[str, Any]:
    return {
        "hostname": capacity.host,
        "servers": capacity.servers,
        "exact": capacity.exact,
        "free_handles": capacity.free,
        "handles": capacity.total,
        "losses": _losses(Counter(capacity.losses), True),
    }


def _losses(losses: Counter[Predicate], elevated: bool) -> list[dict[str, Any]]:
    return [
        {
            "code": predicate.value,
            "reason": predicate.description,
            "remedy": predicate.remedy if elevated else None,
            "handles": count,
        }
        for predicate, count in losses.most_common()
    ]
