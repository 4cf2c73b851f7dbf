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


class Deployables(wtypes.Base):  # type: ignore[misc]
    """A list of deployables."""

    deployables = wtypes.wsattr([Deployable], mandatory=True)
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
    return call.dump(
        Deployable,
        row,
        NAME,
        parent_id=row["parent_uuid"],
        root_id=row["root_uuid"],
        device_id=row["device_uuid"],
        attributes_list=json.dumps([{key: value} for key, value in row["attributes"].items()]),
        links=call.links(NAME, row["uuid"], bookmark=True),
    )


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
        answer=Deployable,
        path={"uuid": types.Uuid()},
        raises=(NotFound,),
    )
    def get(self, call: Call, uuid: str) -> Any:
        """Show one deployable."""
        return self._show(call, uuid)

    @operation(
        rule="cyborg:deployable:program",
        answer=Deployable,
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
        answer=Deployable,
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
