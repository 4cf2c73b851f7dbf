# SPDX-License-Identifier: Apache-2.0
"""/v2/discoveries: request a discovery of hardware by the agents now, and show its result."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.collection import Collection
from cyborg.api.controller import Resource
from cyborg.api.request_context import RequestContext
from cyborg.core.errors import NotFound
from cyborg.db.read import discoveries as read

IN_PROGRESS, DONE, FAILED = "IN-PROGRESS", "DONE", "FAILED"
State = types.Enum(IN_PROGRESS, DONE, FAILED)


class BackendDiscovery(types.JsonObject):
    """The discovery of one backend on one host; ``error`` is the reason of a failure, or null."""

    host = wtypes.wsattr(str, mandatory=True)
    backend = wtypes.wsattr(str, mandatory=True)
    state = wtypes.wsattr(State, mandatory=True)
    error = wtypes.wsattr(str)


class Discovery(types.JsonObject):
    """A discovery: in progress until all backends have finished, then failed if any has failed."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    state = wtypes.wsattr(State, mandatory=True)
    backends = wtypes.wsattr([BackendDiscovery], mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class DiscoverySummary(types.JsonObject):
    """A discovery in a list; ``progress`` is the number of backends in each state."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    state = wtypes.wsattr(State, mandatory=True)
    progress = wtypes.wsattr({str: int}, mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class DiscoveryCreated(types.JsonObject):
    """A new discovery."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    state = wtypes.wsattr(State, mandatory=True)
    links = wtypes.wsattr([types.Link], mandatory=True)


class DiscoveryCreate(types.JsonObject):
    """The backends that run a discovery: all, or only those of a host or of a driver.

    ``driver`` is the name of a driver or of a backend.
    """

    host = wtypes.wsattr(types.Text(min_length=1))
    driver = wtypes.wsattr(types.Text(min_length=1))


def _show_details(request: RequestContext, row: read.DiscoveryRow) -> Mapping[str, Any]:
    states = {backend["state"] for backend in row["backends"]}
    state = next(state for state in (IN_PROGRESS, FAILED, DONE) if state in states)
    return request.serialize(Discovery, row, DISCOVERIES.name, state=state)


DISCOVERIES = Collection("discoveries", "discovery", read, DiscoverySummary, since=(2, 4))


class Controller(Resource):
    """The operations on discoveries."""

    find = DISCOVERIES.find(
        "List the discoveries of the last day.",
        read=read.find_summaries,
        host=types.Text(),
        state=State,
    )
    get = DISCOVERIES.get(
        "Show a discovery with the state of each backend.", Discovery, _show_details
    )

    @DISCOVERIES.operation(
        "POST discoveries",
        "create",
        answer=DiscoveryCreated,
        status=202,
        body=DiscoveryCreate,
        optional=True,
        raises=(NotFound,),
    )
    def create(self, request: RequestContext, body: DiscoveryCreate) -> Any:
        """Start a discovery; it runs in the background."""
        result = self.context.conductor.discovery_create(body.host or None, body.driver or None)
        row = {"uuid": result["uuid"], "state": IN_PROGRESS}
        return request.created(DiscoveryCreated, row, DISCOVERIES.name)
