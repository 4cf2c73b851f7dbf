# SPDX-License-Identifier: Apache-2.0
"""/v2/hardware: the devices of every host in the words of the internal contract.

It is answered from the database, which every agent's report keeps: nobody waits for a host. Single
devices are adopted into a backend and released from it, each by a job.
"""

from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.api.v2 import jobs
from cyborg.core.errors import Conflict, NotFound
from cyborg.core.rollout import Kind
from cyborg.db.read import hardware as read
from cyborg.db.read.paging import Row

NAME = "hardware"
SINCE = (2, 4)


class Specs(wtypes.Base):  # type: ignore[misc]
    """What a device offers: ``num`` counts what can be given away of it."""

    remote = wtypes.wsattr(int, mandatory=True)
    num = wtypes.wsattr(int, mandatory=True)
    device_type = wtypes.wsattr(str, mandatory=True)
    acc_capability = wtypes.wsattr(types.Checked("capability tree", dict), mandatory=True)


class Status(wtypes.Base):  # type: ignore[misc]
    """What must be done before a device can be used."""

    setup_required = wtypes.wsattr(bool, mandatory=True)
    reboot_required = wtypes.wsattr(bool, mandatory=True)


class Hardware(wtypes.Base):  # type: ignore[misc]
    """A device as its agent last told of it, whether or not it is ready or even supported."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    acc_specs = wtypes.wsattr(Specs, mandatory=True)
    acc_status = wtypes.wsattr(Status, mandatory=True)
    host = wtypes.wsattr(str, mandatory=True)
    address = wtypes.wsattr(str, mandatory=True)
    driver = wtypes.wsattr(str)
    backend = wtypes.wsattr(str, mandatory=True)
    vendor_id = wtypes.wsattr(str)
    product_id = wtypes.wsattr(str)
    numa_node = wtypes.wsattr(int)
    health = wtypes.wsattr(str, mandatory=True)
    serial = wtypes.wsattr(str)


class AllHardware(wtypes.Base):  # type: ignore[misc]
    """A list of hardware."""

    hardware = wtypes.wsattr([Hardware], mandatory=True)
    hardware_links = wtypes.wsattr([types.Link])


_NAME = types.Text(shortest=1)


class AdoptedHardware(wtypes.Base):  # type: ignore[misc]
    """A device that a backend of its host shall manage although its rules leave it alone."""

    host = wtypes.wsattr(_NAME, mandatory=True)
    address = wtypes.wsattr(types.Text(120, shortest=1), mandatory=True)
    backend = wtypes.wsattr(_NAME, mandatory=True)


def show(_: Call, row: Row) -> dict[str, Any]:
    """Return a device as JSON."""
    return types.dump(Hardware, row)


class Controller(Resource):
    """The operations on hardware."""

    @operation(
        rule="cyborg:hardware:get_all",
        since=SINCE,
        answer=AllHardware,
        query={"host": types.Text(), "driver": types.Text()},
        paged=True,
    )
    def find(self, call: Call, host: str | None, driver: str | None, page: Asked) -> Any:
        """List the hardware of one host or of all."""
        with self.desk.reader.connect() as connection:
            found = page.read(
                lambda part: read.find(connection, page=part, host=host, driver=driver)
            )
        return call.collection(NAME, show, found)

    @operation(
        rule="cyborg:hardware:adopt",
        since=SINCE,
        answer=jobs.BegunJob,
        status=202,
        body=AdoptedHardware,
        raises=(NotFound, Conflict),
    )
    def adopt(self, call: Call, body: AdoptedHardware) -> Any:
        """Have a backend manage a device that it does not, and answer at once."""
        made = self.desk.conductor.hardware_adopt(body.host, body.address, body.backend)
        return jobs.begun(call, Kind.UPDATE, made)

    @operation(
        rule="cyborg:hardware:release",
        since=SINCE,
        answer=jobs.BegunJob,
        status=202,
        path={"uuid": types.Uuid()},
        raises=(NotFound, Conflict),
    )
    def release(self, call: Call, uuid: str) -> Any:
        """Have its backend leave a device alone, and answer at once."""
        return jobs.begun(call, Kind.UPDATE, self.desk.conductor.hardware_release(uuid))
