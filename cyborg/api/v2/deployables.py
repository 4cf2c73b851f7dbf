# SPDX-License-Identifier: Apache-2.0
"""/v2/deployables and /v2/attributes: resource providers, and their key-value pairs."""

import json
from datetime import datetime
from typing import Any

from cyborg.api import types
from cyborg.api.controller import RequestContext, Resource
from cyborg.api.operation import Collection
from cyborg.core.errors import Conflict, InUse, NotFound, WrongState
from cyborg.core.inventory.device_set import OfferState
from cyborg.core.jobs.job import PATH, VERB, parse_program
from cyborg.db.deployables import attributes as attributes_read
from cyborg.db.deployables import device_sets, read

PLACEMENT_SINCE = (2, 4)
DEVICE_SET_SINCE = (2, 6)


class Deployable(
    types.JsonObject,
    row=read.DeployableRow,
    only=(
        *("uuid", "parent_uuid", "root_uuid", "name", "num_accelerators", "device_uuid"),
        *("rp_uuid", "driver_name", "bitstream_id", "created_at", "updated_at"),
    ),
    names={"parent_uuid": "parent_id", "root_uuid": "root_id", "device_uuid": "device_id"},
    links=True,
):
    """A deployable."""

    # A text, as OpenStack Cyborg has it: see show.
    attributes_list = types.required(str)


class PlacementStatus(types.JsonObject):
    """Whether Placement is up to date; ``error`` says why it is not and what to do, or is null."""

    status = types.required(types.Enum("in_sync", "stale", "error"))
    stale_since = types.optional(datetime)
    error = types.optional(str)


class DeployableV24(Deployable, row=read.DeployableRow, only=("draining",)):
    """A deployable as versions from 2.4 on show it.

    ``draining`` is true if it was removed from its host while an ARQ was bound to it.
    """

    placement = types.required(PlacementStatus)


class SetMember(types.JsonObject, row=device_sets.MemberRow):
    """A member of a device set: the addresses of a device, its deployable and its handle.

    The uuids of the device and of the accelerator, which is the handle, are null if the host does
    not have it. ``arq_uuid`` is the request that owns it through the set, or null.
    """


class DeviceSet(types.JsonObject, row=device_sets.DeviceSetRow):
    """Devices of one host that are allocated together, and whether Placement offers them.

    ``offer_reason`` says why the set is not offered, or is null. ``instance_uuid`` and
    ``project_id`` are those of the owner of the whole set.
    """


class DeployableV26(
    DeployableV24,
    row=read.DeployableRow,
    only=("hostname", "address", "resource_class", "traits", "device_set"),
):
    """A deployable as versions from 2.6 on show it: ``device_set`` is null unless it is one."""


class Image(types.JsonObject):
    """An image of the image service."""

    image_uuid = types.required(types.Uuid())


class ProgramOperation(types.JsonObject):
    """The JSON patch operation that programs an image."""

    path = types.required(types.Enum(PATH))
    op = types.required(types.Enum(VERB))
    value = types.required([Image])


Program = types.Validated("one JSON patch operation", parse_program, [ProgramOperation])


def show(request: RequestContext, row: read.DeployableRow) -> dict[str, Any]:
    """Return a deployable as JSON."""
    more: dict[str, Any] = {
        # A list of objects with one key each, in a string: the format of OpenStack Cyborg.
        "attributes_list": json.dumps([{key: value} for key, value in row["attributes"].items()]),
        "links": request.links(DEPLOYABLES.name, row["uuid"], bookmark=True),
    }
    if request.version < PLACEMENT_SINCE:
        return request.serialize(Deployable, row, DEPLOYABLES.name, **more)
    more["placement"] = _placement_status(row)
    datatype = DeployableV24 if request.version < DEVICE_SET_SINCE else DeployableV26
    return request.serialize(datatype, row, DEPLOYABLES.name, **more)


def _placement_status(row: read.DeployableRow) -> dict[str, Any]:
    # A provider that is only due for verification also has stale_since, but is in sync.
    status = "error" if row["error"] else "stale" if row["stale"] else "in_sync"
    since = None if status == "in_sync" else row["stale_since"]
    return {"status": status, "stale_since": since, "error": row["error"]}


DEPLOYABLES = Collection("deployables", "deployable", read, DeployableV26, show=show)


class Controller(Resource):
    """The operations on deployables."""

    find = DEPLOYABLES.find(
        "List deployables.",
        {"host": "hostname"},
        query_since=dict.fromkeys(("rp_uuid", "host", "name", "member", "offer"), DEVICE_SET_SINCE),
        rp_uuid=types.Uuid(),
        host=types.Text(),
        name=types.Text(),
        member=types.Uuid(),
        offer=types.Repeated(types.Enum(*OfferState)),
    )
    get = DEPLOYABLES.get("Show one deployable.")

    @DEPLOYABLES.operation(
        "PATCH deployables/{uuid}/program",
        answer=DeployableV26,
        body=Program,
        raises=(InUse, WrongState),
    )
    def program(self, request: RequestContext, uuid: str, body: str) -> Any:
        """Program an image into a deployable; programming runs in the background."""
        # The call returns nothing; the row is that of before the job, which runs on the host.
        self.context.conductor.deployable_program(uuid, body)
        return show(request, DEPLOYABLES.read_row(self, request, uuid))

    @DEPLOYABLES.operation(
        "PATCH deployables/{uuid}/program/{suffix}",
        "program",
        answer=DeployableV26,
        body=Program,
        raises=(InUse, WrongState),
    )
    def program_with_suffix(
        self, request: RequestContext, uuid: str, suffix: str, body: str
    ) -> Any:
        """Program an image; openstacksdk adds a last segment to the path, which is ignored."""
        self.context.conductor.deployable_program(uuid, body)
        return show(request, DEPLOYABLES.read_row(self, request, uuid))


class Attribute(
    types.JsonObject,
    row=attributes_read.AttributeRow,
    names={"deployable_uuid": "deployable_id"},
    links=True,
):
    """An attribute of a deployable."""


class AttributeCreate(types.JsonObject):
    """An attribute to create."""

    deployable_id = types.required(types.Uuid())
    key = types.required(types.Text(min_length=1))
    value = types.required(types.Text(min_length=1))


ATTRIBUTES = Collection("attributes", "attribute", attributes_read, Attribute)


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
        answer=Attribute,
        status=201,
        envelope="attribute",
        raises=(NotFound, Conflict),
    )
    def create(self, request: RequestContext, body: AttributeCreate) -> Any:
        """Create an attribute of a deployable; reports of the agent do not change it."""
        row = self.context.conductor.attribute_create(body.deployable_id, body.key, body.value)
        return ATTRIBUTES.show_row(request, row)

    @ATTRIBUTES.operation("DELETE attributes/{uuid}")
    def delete(self, request: RequestContext, uuid: str) -> None:
        """Delete an attribute."""
        self.context.conductor.attribute_delete(uuid)
