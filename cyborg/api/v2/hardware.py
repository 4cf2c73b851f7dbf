# SPDX-License-Identifier: Apache-2.0
"""/v2/hardware and /v2/discoveries: the devices of all hosts as agents report them.

Reads are served from the database, without calls to agents. A device can be adopted into a backend
and released from it, each by a job. A discovery asks the agents to look for devices now.
"""

from typing import Any

from cyborg.api import types
from cyborg.api.controller import PageRequest, RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.api.v2 import jobs
from cyborg.core.drivers.rollout import Kind
from cyborg.core.errors import Conflict, NotFound
from cyborg.db.devices import hardware as read
from cyborg.db.discoveries import read as discoveries


class Specs(types.JsonObject):
    """The capabilities of a device; ``num`` is the number of its accelerators."""

    remote = types.required(int)
    num = types.required(int)
    device_type = types.required(str)
    # A tree of any depth, which no type of WSME describes.
    acc_capability = types.required(types.Validated("capability tree", dict))


class Status(types.JsonObject):
    """The actions that are required before a device can be used."""

    setup_required = types.required(bool)
    reboot_required = types.required(bool)


class Hardware(types.JsonObject, row=read.HardwareRow):
    """A device as last reported by its agent, even if it is not ready or not supported.

    ``not_offered`` is the reason why the device or one of its deployables is not offered, for
    example because the host uses it, or null. ``host_down`` is true if the agent is down.
    """

    acc_specs = types.required(Specs)
    acc_status = types.required(Status)
    vendor_id = types.optional(str)


_NAME = types.Text(min_length=1)


class HardwareAdopt(types.JsonObject):
    """A device that a backend of its host must manage although its rules do not match it.

    ``force`` accepts the uses of the device by the host.
    """

    host = types.required(_NAME)
    address = types.required(types.Text(120, min_length=1))
    backend = types.required(_NAME)
    # A default, so that the method gets a boolean in any case.
    force = types.optional(bool, default=False)


HARDWARE = Collection(
    "hardware", "hardware", read, Hardware, since=(2, 4), list_name="HardwareList"
)


class Controller(Resource):
    """The operations on hardware."""

    find = HARDWARE.find(
        "List the hardware of one host or of all hosts.", host=types.Text(), driver=types.Text()
    )

    @HARDWARE.operation("POST hardware", **jobs.STARTS_JOB)
    def adopt(self, request: RequestContext, body: HardwareAdopt) -> Any:
        """Adopt a device into a backend; a job does it in the background."""
        result = self.context.conductor.hardware_adopt(
            body.host, body.address, body.backend, body.force
        )
        return jobs.serialize_created(request, Kind.UPDATE, result)

    @HARDWARE.operation("DELETE hardware/{uuid}", **jobs.STARTS_JOB)
    def release(self, request: RequestContext, uuid: str) -> Any:
        """Release a device from its backend; a job does it in the background."""
        result = self.context.conductor.hardware_release(uuid)
        return jobs.serialize_created(request, Kind.UPDATE, result)


IN_PROGRESS, DONE, FAILED = "IN-PROGRESS", "DONE", "FAILED"
State = types.Enum(IN_PROGRESS, DONE, FAILED)


class BackendDiscovery(types.JsonObject, row=discoveries.BackendRow):
    """The discovery of one backend on one host; ``error`` is the reason of a failure, or null."""

    state = types.required(State)


class DiscoverySummary(types.JsonObject, row=discoveries.SummaryRow, links=True):
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


DISCOVERIES = Collection("discoveries", "discovery", discoveries, DiscoverySummary, since=(2, 4))


class DiscoveryController(Resource):
    """The operations on discoveries."""

    find = DISCOVERIES.find(
        "List the discoveries of the last day.",
        read=discoveries.find,
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
            # A page of hosts and not of backends: those of a host are shown together.
            hosts, marker = page.read(
                lambda window: discoveries.find_hosts(connection, uuid, page=window)
            )
            backends = discoveries.find_backends(connection, uuid, hosts)
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
