# SPDX-License-Identifier: Apache-2.0
"""/v2/attributes: what operators noted about deployables."""

from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core.errors import Conflict, NotFound
from cyborg.db.read import attributes as read
from cyborg.db.read.paging import Row

NAME = "attributes"


class Attribute(wtypes.Base):  # type: ignore[misc]
    """An attribute of a deployable."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    deployable_id = wtypes.wsattr(types.Uuid(), mandatory=True)
    key = wtypes.wsattr(str, mandatory=True)
    value = wtypes.wsattr(str, mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class Attributes(wtypes.Base):  # type: ignore[misc]
    """A list of attributes."""

    attributes = wtypes.wsattr([Attribute], mandatory=True)
    attributes_links = wtypes.wsattr([types.Link])


class NewAttribute(wtypes.Base):  # type: ignore[misc]
    """The wish for an attribute."""

    deployable_id = wtypes.wsattr(types.Uuid(), mandatory=True)
    key = wtypes.wsattr(types.Text(shortest=1), mandatory=True)
    value = wtypes.wsattr(types.Text(shortest=1), mandatory=True)


def show(call: Call, row: Row) -> dict[str, Any]:
    """Return an attribute as JSON."""
    return call.dump(Attribute, row, NAME, deployable_id=row["deployable_uuid"])


class Controller(Resource):
    """The operations on attributes."""

    @operation(
        rule="cyborg:attribute:get_all",
        answer=Attributes,
        query={"deployable_id": types.Uuid(), "key": types.Text()},
        paged=True,
    )
    def find(self, call: Call, deployable_id: str | None, key: str | None, page: Asked) -> Any:
        """List attributes."""
        with self.desk.reader.connect() as connection:
            found = page.read(
                lambda part: read.find(
                    connection, page=part, deployable_uuid=deployable_id, key=key
                )
            )
        return call.collection(NAME, show, found)

    @operation(
        rule="cyborg:attribute:get_one",
        answer=Attribute,
        path={"uuid": types.Uuid()},
        raises=(NotFound,),
    )
    def get(self, call: Call, uuid: str) -> Any:
        """Show one attribute."""
        with self.desk.reader.connect() as connection:
            row = read.get(connection, uuid)
        if row is None:
            raise NotFound(f"no attribute {uuid}")
        return show(call, row)

    @operation(
        rule="cyborg:attribute:create",
        answer=Attribute,
        status=201,
        body=NewAttribute,
        wrapped="attribute",
        raises=(NotFound, Conflict),
    )
    def create(self, call: Call, body: NewAttribute) -> Any:
        """Give an attribute to a deployable; no report of its agent takes it away."""
        row = self.desk.conductor.attribute_create(body.deployable_id, body.key, body.value)
        return show(call, row)

    @operation(
        rule="cyborg:attribute:delete",
        status=204,
        path={"uuid": types.Uuid()},
        raises=(NotFound,),
    )
    def delete(self, call: Call, uuid: str) -> None:
        """Take an attribute away."""
        self.desk.conductor.attribute_delete(uuid)
