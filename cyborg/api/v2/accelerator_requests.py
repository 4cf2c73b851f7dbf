# SPDX-License-Identifier: Apache-2.0
"""/v2/accelerator_requests: accelerators asked for, bound to instances and given back."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core.errors import (
    Conflict,
    CyborgError,
    Forbidden,
    Invalid,
    NotFound,
    ServiceTokenRequired,
    Unresolved,
)
from cyborg.core.profile import parse_name
from cyborg.core.request import Bind, Unbind, parse_patch
from cyborg.core.states import RESOLVED
from cyborg.db.read import requests as read
from cyborg.db.read.paging import Row

NAME = "accelerator_requests"
KEY = "arqs"
PATHS = ("/hostname", "/device_rp_uuid", "/instance_uuid", "/project_id")
PROJECT_SINCE = (2, 1)


class AcceleratorRequest(wtypes.Base):  # type: ignore[misc]
    """An accelerator request (ARQ)."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    state = wtypes.wsattr(str, mandatory=True)
    device_profile_name = wtypes.wsattr(str, mandatory=True)
    device_profile_group_id = wtypes.wsattr(int, mandatory=True)
    hostname = wtypes.wsattr(str)
    device_rp_uuid = wtypes.wsattr(types.Uuid())
    instance_uuid = wtypes.wsattr(types.Uuid())
    project_id = wtypes.wsattr(str)
    attach_handle_type = wtypes.wsattr(str, mandatory=True)
    attach_handle_uuid = wtypes.wsattr(types.Uuid())
    attach_handle_info = wtypes.wsattr({str: str}, mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class AcceleratorRequests(wtypes.Base):  # type: ignore[misc]
    """A list of accelerator requests."""

    arqs = wtypes.wsattr([AcceleratorRequest], mandatory=True)
    arqs_links = wtypes.wsattr([types.Link])


class NewAcceleratorRequests(wtypes.Base):  # type: ignore[misc]
    """The wish for the accelerator requests of a device profile."""

    device_profile_name = wtypes.wsattr(types.Text(65536, lines=True), mandatory=True)


class PatchOperation(wtypes.Base):  # type: ignore[misc]
    """One operation of a JSON patch: all of a body add, or all remove."""

    path = wtypes.wsattr(types.OneOf(*PATHS), mandatory=True)
    op = wtypes.wsattr(types.OneOf("add", "remove"), mandatory=True)
    value = wtypes.wsattr(types.Text())


Patch = types.Checked(
    "map of request uuid to JSON patch operations", parse_patch, {str: [PatchOperation]}
)


def show(call: Call, row: Row) -> dict[str, Any]:
    """Return a request as JSON."""
    return call.dump(AcceleratorRequest, row, NAME)


class Controller(Resource):
    """The operations on accelerator requests."""

    @operation(
        rule="cyborg:arq:get_all",
        answer=AcceleratorRequests,
        query={"instance": types.Uuid(), "bind_state": types.OneOf("resolved")},
        paged=True,
        raises=(Unresolved,),
    )
    def find(self, call: Call, instance: str | None, bind_state: str | None, page: Asked) -> Any:
        """List requests; of an instance and resolved, only if not one of them is undecided."""
        scope = call.caller.scope
        states = sorted(RESOLVED) if bind_state and not instance else None
        with self.desk.reader.connect() as connection:
            if bind_state and instance:
                _insist(read.find(connection, instance_uuid=instance, project_id=scope), instance)
            found = page.read(
                lambda part: read.find(
                    connection, page=part, instance_uuid=instance, project_id=scope, states=states
                )
            )
        return call.collection(KEY, show, found, NAME)

    @operation(
        rule="cyborg:arq:get_one",
        answer=AcceleratorRequest,
        path={"uuid": types.Uuid()},
        raises=(NotFound,),
    )
    def get(self, call: Call, uuid: str) -> Any:
        """Show one request."""
        with self.desk.reader.connect() as connection:
            row = read.get(connection, uuid, call.caller.scope)
        if row is None:
            raise NotFound(f"no accelerator request {uuid}")
        return show(call, row)

    @operation(
        rule="cyborg:arq:create",
        answer=AcceleratorRequests,
        status=201,
        body=NewAcceleratorRequests,
        lenient=True,
        raises=(NotFound,),
    )
    def create(self, call: Call, body: NewAcceleratorRequests) -> Any:
        """Make one request for each unit of each group of a profile, in the order of the groups."""
        name = body.device_profile_name
        try:
            parse_name(name)
        except CyborgError:
            # What cannot be a name is the name of none.
            raise NotFound(f"device_profile_name: no device profile {name[:255]!r}") from None
        made = self.desk.conductor.arq_create(name, call.caller.project_id)
        return call.collection(KEY, show, (made[KEY], None))

    @operation(
        rule="cyborg:arq:update",
        status=202,
        body=Patch,
        service="binding or unbinding a request",
        raises=(NotFound, Conflict),
    )
    def patch(self, call: Call, body: Sequence[Bind | Unbind]) -> None:
        """Bind requests to an instance, or unbind them: all of them or none."""
        self._patch(call, body)

    @operation(
        rule="cyborg:arq:update",
        status=202,
        path={"uuid": types.Uuid()},
        body=Patch,
        service="binding or unbinding a request",
        raises=(NotFound, Conflict),
    )
    def patch_one(self, call: Call, uuid: str, body: Sequence[Bind | Unbind]) -> None:
        """Bind or unbind one request."""
        if [wish.request for wish in body] != [uuid]:
            raise Invalid(f"body: expected the operations of {uuid} alone", field="body")
        self._patch(call, body)

    @operation(
        rule="cyborg:arq:delete",
        status=204,
        query={"arqs": types.Commas(), "instance": types.Uuid()},
        raises=(NotFound, Conflict),
    )
    def delete_many(self, call: Call, arqs: tuple[str, ...] | None, instance: str | None) -> None:
        """Delete requests: these, or all those of an instance."""
        if (arqs is None) == (instance is None):
            raise Invalid("expected either arqs or instance", field="arqs")
        if instance is not None and not call.caller.is_service:
            raise ServiceTokenRequired("deleting by instance requires a service token")
        if arqs is None:
            self._delete(call, None, instance)
        elif not arqs:
            raise Invalid("arqs: expected uuids of accelerator requests", field="arqs")
        else:
            self._delete(call, [types.load(types.Uuid(), arq, "arqs") for arq in arqs], None)

    @operation(
        rule="cyborg:arq:delete",
        status=204,
        path={"uuid": types.Uuid()},
        raises=(NotFound, Conflict),
    )
    def delete(self, call: Call, uuid: str) -> None:
        """Delete one request."""
        self._delete(call, [uuid], None)

    def _patch(self, call: Call, body: Sequence[Bind | Unbind]) -> None:
        if any(isinstance(wish, Bind) and wish.project_id is not None for wish in body):
            _may_name_project(call)
        verb = "bind" if isinstance(body[0], Bind) else "unbind"
        wishes = [
            {key: value for key, value in asdict(wish).items() if value is not None}
            for wish in body
        ]
        self.desk.conductor.arq_patch(wishes, verb, call.caller.scope, call.caller.reach)

    def _delete(self, call: Call, uuids: list[str] | None, instance: str | None) -> None:
        who = call.caller
        self.desk.conductor.arq_delete(uuids, instance, who.scope, who.is_service)


def _insist(rows: Sequence[Row], instance: str) -> None:
    if undecided := [row["uuid"] for row in rows if row["state"] not in RESOLVED]:
        raise Unresolved(
            f"{len(undecided)} of {len(rows)} requests of instance {instance} are not resolved "
            "yet: ask again"
        )


def _may_name_project(call: Call) -> None:
    if call.version < PROJECT_SINCE:
        raise Invalid("/project_id is there from version 2.1 on", field="/project_id")
    if not call.caller.is_elevated:
        raise Forbidden("/project_id is for administrators", field="/project_id")
