# SPDX-License-Identifier: Apache-2.0
"""/v2/accelerators: every attach handle with the request that holds it, and its label."""

from datetime import datetime
from typing import Any

import wsme
from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core import accelerator as core
from cyborg.core.accelerator import State
from cyborg.core.errors import Conflict, NotFound
from cyborg.core.life import Life
from cyborg.db.read import accelerators as read
from cyborg.db.read.paging import Row

NAME = "accelerators"
SINCE = (2, 4)
LABEL = ("name", "description", "tags")


class Accelerator(wtypes.Base):  # type: ignore[misc]
    """An accelerator: one thing that can be given to one instance.

    ``state_reasons`` has all that speaks against its device. The fields of its holder, and those of
    its label, are null while nobody holds it.
    """

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    type = wtypes.wsattr(str, mandatory=True)
    vendor = wtypes.wsattr(str, mandatory=True)
    model = wtypes.wsattr(str, mandatory=True)
    hostname = wtypes.wsattr(str, mandatory=True)
    driver = wtypes.wsattr(str)
    backend = wtypes.wsattr(str, mandatory=True)
    device_uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    deployable_uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    rp_uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    resource_class = wtypes.wsattr(str, mandatory=True)
    attach_handle_type = wtypes.wsattr(str, mandatory=True)
    attach_handle_info = wtypes.wsattr({str: str}, mandatory=True)
    state = wtypes.wsattr(types.OneOf(*State), mandatory=True)
    state_reasons = wtypes.wsattr([types.OneOf(*Life)], mandatory=True)
    arq_uuid = wtypes.wsattr(types.Uuid())
    instance_uuid = wtypes.wsattr(types.Uuid())
    project_id = wtypes.wsattr(str)
    name = wtypes.wsattr(str)
    description = wtypes.wsattr(str)
    tags = wtypes.wsattr([str], mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class Accelerators(wtypes.Base):  # type: ignore[misc]
    """A list of accelerators."""

    accelerators = wtypes.wsattr([Accelerator], mandatory=True)
    accelerators_links = wtypes.wsattr([types.Link])


_Tag = types.Text(core.LONGEST_TAG, shortest=1)


class Label(wtypes.Base):  # type: ignore[misc]
    """What an accelerator is called; a field that is left out stays, null takes it away."""

    name = wtypes.wsattr(types.Text(core.LONGEST_NAME, shortest=1))
    description = wtypes.wsattr(types.Text(core.LONGEST_DESCRIPTION, lines=True))
    tags = wtypes.wsattr(types.Checked("tags", core.parse_tags, [_Tag]))


def show(call: Call, row: Row) -> dict[str, Any]:
    """Return an accelerator as JSON."""
    return call.dump(Accelerator, row, NAME)


class Controller(Resource):
    """The operations on accelerators."""

    @operation(
        rule="cyborg:accelerator:get_all",
        since=SINCE,
        answer=Accelerators,
        query={
            "driver": types.Text(),
            "host": types.Text(),
            "instance": types.Uuid(),
            "resource_class": types.Text(),
            "state": types.OneOf(*State),
        },
        paged=True,
    )
    def find(
        self,
        call: Call,
        driver: str | None,
        host: str | None,
        instance: str | None,
        resource_class: str | None,
        state: str | None,
        page: Asked,
    ) -> Any:
        """List accelerators: those that the caller's project holds or, to who may, all."""
        with self.desk.reader.connect() as connection:
            found = page.read(
                lambda part: read.find(
                    connection,
                    page=part,
                    project_id=call.caller.scope,
                    driver=driver,
                    hostname=host,
                    instance_uuid=instance,
                    resource_class=resource_class,
                    state=state,
                )
            )
        return call.collection(NAME, show, found)

    @operation(
        rule="cyborg:accelerator:get_one",
        since=SINCE,
        answer=Accelerator,
        path={"uuid": types.Uuid()},
        raises=(NotFound,),
    )
    def get(self, call: Call, uuid: str) -> Any:
        """Show one accelerator."""
        with self.desk.reader.connect() as connection:
            row = read.get(connection, uuid, call.caller.scope)
        if row is None:
            raise NotFound(f"no accelerator {uuid}")
        return show(call, row)

    @operation(
        rule="cyborg:accelerator:update",
        since=SINCE,
        answer=Accelerator,
        path={"uuid": types.Uuid()},
        body=Label,
        raises=(NotFound, Conflict),
    )
    def update(self, call: Call, uuid: str, body: Label) -> Any:
        """Label an accelerator: the label lasts as long as the request that holds it."""
        given = {name: getattr(body, name) for name in LABEL}
        label = {name: value for name, value in given.items() if value is not wsme.Unset}
        row = self.desk.conductor.accelerator_update(
            uuid, core.parse_label(label), call.caller.scope
        )
        return show(call, row)
