# SPDX-License-Identifier: Apache-2.0
"""/v2/deployables: the parts of devices, each of which is one resource provider."""

import json
from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core.errors import InUse, NotFound, WrongState
from cyborg.core.program import PATH, VERB, parse_program
from cyborg.db.read import deployables as read
from cyborg.db.read.paging import Row

NAME = "deployables"
PLACEMENT_SINCE = (2, 4)


class Deployable(wtypes.Base):  # type: ignore[misc]
    """A deployable."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    parent_id = wtypes.wsattr(types.Uuid())
    root_id = wtypes.wsattr(types.Uuid())
    name = wtypes.wsattr(str, mandatory=True)
    num_accelerators = wtypes.wsattr(int, mandatory=True)
    device_id = wtypes.wsattr(types.Uuid(), mandatory=True)
    attributes_list = wtypes.wsattr(str, mandatory=True)
    rp_uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    driver_name = wtypes.wsattr(str, mandatory=True)
    bitstream_id = wtypes.wsattr(str)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class Placed(wtypes.Base):  # type: ignore[misc]
    """How far Placement has been told; ``error`` says why it could not be, and what to do."""

    status = wtypes.wsattr(types.OneOf("in_sync", "stale", "error"), mandatory=True)
    stale_since = wtypes.wsattr(datetime)
    error = wtypes.wsattr(str)


class PlacedDeployable(Deployable):
    """A deployable, from version 2.4 on; a draining one its host has no longer."""

    draining = wtypes.wsattr(bool, mandatory=True)
    placement = wtypes.wsattr(Placed, mandatory=True)


class Deployables(wtypes.Base):  # type: ignore[misc]
    """A list of deployables."""

    deployables = wtypes.wsattr([PlacedDeployable], mandatory=True)
    deployables_links = wtypes.wsattr([types.Link])


class Image(wtypes.Base):  # type: ignore[misc]
    """An image of the image service."""

    image_uuid = wtypes.wsattr(types.Uuid(), mandatory=True)


class ProgramOperation(wtypes.Base):  # type: ignore[misc]
    """The operation of a JSON patch that loads an image."""

    path = wtypes.wsattr(types.OneOf(PATH), mandatory=True)
    op = wtypes.wsattr(types.OneOf(VERB), mandatory=True)
    value = wtypes.wsattr([Image], mandatory=True)


Program = types.Checked("one JSON patch operation", parse_program, [ProgramOperation])


def show(call: Call, row: Row) -> dict[str, Any]:
    """Return a deployable as JSON."""
    more: dict[str, Any] = {
        "parent_id": row["parent_uuid"],
        "root_id": row["root_uuid"],
        "device_id": row["device_uuid"],
        "attributes_list": json.dumps([{key: value} for key, value in row["attributes"].items()]),
        "links": call.links(NAME, row["uuid"], bookmark=True),
    }
    if call.version < PLACEMENT_SINCE:
        return call.dump(Deployable, row, NAME, **more)
    more["placement"] = types.dump(Placed, _placed(row))
    return call.dump(PlacedDeployable, row, NAME, **more)


def _placed(row: Row) -> dict[str, Any]:
    # A row that is only compared again has a time, too: it counts as in sync all the while.
    status = "error" if row["error"] else "stale" if row["stale"] else "in_sync"
    since = None if status == "in_sync" else row["stale_since"]
    return {"status": status, "stale_since": since, "error": row["error"]}


class Controller(Resource):
    """The operations on deployables."""

    @operation(rule="cyborg:deployable:get_all", answer=Deployables, paged=True)
    def find(self, call: Call, page: Asked) -> Any:
        """List deployables."""
        with self.desk.reader.connect() as connection:
            found = page.read(lambda part: read.find(connection, page=part))
        return call.collection(NAME, show, found)

    @operation(
        rule="cyborg:deployable:get_one",
        answer=PlacedDeployable,
        path={"uuid": types.Uuid()},
        raises=(NotFound,),
    )
    def get(self, call: Call, uuid: str) -> Any:
        """Show one deployable."""
        return self._show(call, uuid)

    @operation(
        rule="cyborg:deployable:program",
        answer=PlacedDeployable,
        path={"uuid": types.Uuid()},
        body=Program,
        raises=(NotFound, InUse, WrongState),
    )
    def program(self, call: Call, uuid: str, body: str) -> Any:
        """Have an image loaded; the answer comes before that is done."""
        self.desk.conductor.deployable_program(uuid, body)
        return self._show(call, uuid)

    @operation(
        rule="cyborg:deployable:program",
        answer=PlacedDeployable,
        path={"uuid": types.Uuid(), "again": types.Key()},
        body=Program,
        raises=(NotFound, InUse, WrongState),
    )
    def program_again(self, call: Call, uuid: str, again: str, body: str) -> Any:
        """Do the same as without the last part of the path, which openstacksdk adds."""
        self.desk.conductor.deployable_program(uuid, body)
        return self._show(call, uuid)

    def _show(self, call: Call, uuid: str) -> Any:
        with self.desk.reader.connect() as connection:
            row = read.get(connection, uuid)
        if row is None:
            raise NotFound(f"no deployable {uuid}")
        return show(call, row)
