# SPDX-License-Identifier: Apache-2.0
"""/v2/discoveries: request a discovery of hardware by the agents now, and show its result."""

from typing import Any

from cyborg.api import types
from cyborg.api.collection import Collection
from cyborg.api.controller import PageRequest, RequestContext, Resource
from cyborg.core.errors import Conflict, NotFound
from cyborg.db.discoveries import read

IN_PROGRESS, DONE, FAILED = "IN-PROGRESS", "DONE", "FAILED"
State = types.Enum(IN_PROGRESS, DONE, FAILED)


class BackendDiscovery(
    types.JsonObject, row=read.BackendRow, without=("uuid", "created_at", "updated_at")
):
    """The discovery of one backend on one host; ``error`` is the reason of a failure, or null."""

    state = types.required(State)


class DiscoverySummary(types.JsonObject, row=read.SummaryRow, links=True):
    """A discovery in a list; ``progress`` is the number of backends in each state."""

    state = types.required(State)


class Discovery(DiscoverySummary):
    """A discovery: in progress until all backends have finished, then failed if any has failed.

    ``progress`` is the number of backends in each state. ``backends`` are those of a page of hosts.
    """

    backends = types.required([BackendDiscovery])
    backends_links = types.optional([types.Link])


class DiscoveryCreated(types.JsonObject):
    """A new discovery."""

    uuid = types.required(types.Uuid())
    state = types.required(State)
    links = types.required([types.Link])


class DiscoveryCreate(types.JsonObject):
    """The backends that run a discovery: all, or only those of a host or of a driver.

    ``driver`` is the name of a driver or of a backend.
    """

    host = types.optional(types.Text(min_length=1))
    driver = types.optional(types.Text(min_length=1))


DISCOVERIES = Collection("discoveries", "discovery", read, DiscoverySummary, since=(2, 4))


class Controller(Resource):
    """The operations on discoveries."""

    find = DISCOVERIES.find(
        "List the discoveries of the last day.",
        read=read.find_summaries,
        uuid=types.Uuid(),
        host=types.Text(),
        state=State,
    )

    @DISCOVERIES.operation("GET discoveries/{uuid}", "get_one", answer=Discovery, paged=True)
    def get(self, request: RequestContext, uuid: str, page: PageRequest) -> Any:
        """Show a discovery with the state of each backend of a page of hosts.

        ``limit`` is a number of hosts, and ``marker`` the name of a host.
        """
        with self.context.reader.connect() as connection:
            row = DISCOVERIES.find_row(connection, uuid)
            hosts, marker = page.read(lambda window: read.find_hosts(connection, uuid, page=window))
            backends = read.find_backends(connection, uuid, hosts)
        details = {**row, "backends": backends}
        return request.serialize_page(Discovery, details, DISCOVERIES.name, "backends", marker)

    @DISCOVERIES.operation(
        "POST discoveries",
        answer=DiscoveryCreated,
        status=202,
        optional=True,
        raises=(NotFound, Conflict),
    )
    def create(self, request: RequestContext, body: DiscoveryCreate) -> Any:
        """Start a discovery, unless one of the same host and driver is in progress.

        It runs in the background.
        """
        result = self.context.conductor.discovery_create(body.host or None, body.driver or None)
        row = {"uuid": result["uuid"], "state": IN_PROGRESS}
        return request.created(DiscoveryCreated, row, DISCOVERIES.name)
