# SPDX-License-Identifier: Apache-2.0
"""/v2/hardware: the discovered devices of all hosts, in the format of agent reports.

Reads are served from the database, without calls to agents. A device can be adopted into a backend
and released from it, each by a job.
"""

from typing import Any

from cyborg.api import types
from cyborg.api.collection import Collection
from cyborg.api.controller import RequestContext, Resource
from cyborg.api.v2 import jobs
from cyborg.core.drivers.rollout import Kind
from cyborg.db.devices import hardware as read


class Specs(types.JsonObject):
    """The capabilities of a device; ``num`` is the number of its accelerators."""

    remote = types.required(int)
    num = types.required(int)
    device_type = types.required(str)
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
