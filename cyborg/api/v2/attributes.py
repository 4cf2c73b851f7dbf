# SPDX-License-Identifier: Apache-2.0
"""/v2/attributes: key-value pairs that operators attach to deployables."""

from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.collection import Collection
from cyborg.api.controller import Resource
from cyborg.api.request_context import RequestContext
from cyborg.core.errors import Conflict, NotFound
from cyborg.db.deployables import attributes as attributes_read
from cyborg.db.paging import Row


class Attribute(types.JsonObject):
    """An attribute of a deployable."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    deployable_id = wtypes.wsattr(types.Uuid(), mandatory=True)
    key = wtypes.wsattr(str, mandatory=True)
    value = wtypes.wsattr(str, mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class AttributeCreate(types.JsonObject):
    """An attribute to create."""

    deployable_id = wtypes.wsattr(types.Uuid(), mandatory=True)
    key = wtypes.wsattr(types.Text(min_length=1), mandatory=True)
    value = wtypes.wsattr(types.Text(min_length=1), mandatory=True)


def show_attribute(
    request: RequestContext, row: attributes_read.AttributeRow | Row
) -> dict[str, Any]:
    """Return an attribute as JSON."""
    return request.serialize(Attribute, row, ATTRIBUTES.name, deployable_id=row["deployable_uuid"])


ATTRIBUTES = Collection("attributes", "attribute", attributes_read, Attribute, show=show_attribute)


class AttributeController(Resource):
    """The operations on attributes."""

    find = ATTRIBUTES.find(
        "List attributes.",
        {"deployable_id": "deployable_uuid"},
        deployable_id=types.Uuid(),
        key=types.Text(),
    )
    get = ATTRIBUTES.get("Show one attribute.")

    @ATTRIBUTES.operation(
        "POST attributes",
        "create",
        answer=Attribute,
        status=201,
        body=AttributeCreate,
        envelope="attribute",
        raises=(NotFound, Conflict),
    )
    def create(self, request: RequestContext, body: AttributeCreate) -> Any:
        """Create an attribute of a deployable; reports of the agent do not change it."""
        row = self.context.conductor.attribute_create(body.deployable_id, body.key, body.value)
        return show_attribute(request, row)

    @ATTRIBUTES.operation("DELETE attributes/{uuid}", "delete", raises=(NotFound,))
    def delete(self, request: RequestContext, uuid: str) -> None:
        """Delete an attribute."""
        self.context.conductor.attribute_delete(uuid)
