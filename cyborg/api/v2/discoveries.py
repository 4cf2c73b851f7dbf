# SPDX-License-Identifier: Apache-2.0
"""/v2/discoveries: telling agents to look at their hardware now, and what came of it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core.errors import NotFound
from cyborg.db.read import discoveries as read
from cyborg.db.read.paging import Row

NAME = "discoveries"
SINCE = (2, 4)
IN_PROGRESS, DONE, FAILED = "IN-PROGRESS", "DONE", "FAILED"
State = types.OneOf(IN_PROGRESS, DONE, FAILED)


class Part(wtypes.Base):  # type: ignore[misc]
    """How the discovery of one backend of one host is going; ``error`` tells why it failed."""

    host = wtypes.wsattr(str, mandatory=True)
    backend = wtypes.wsattr(str, mandatory=True)
    state = wtypes.wsattr(State, mandatory=True)
    error = wtypes.wsattr(str)


class Discovery(wtypes.Base):  # type: ignore[misc]
    """A discovery: in progress while one part is, failed if one part has."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    state = wtypes.wsattr(State, mandatory=True)
    backends = wtypes.wsattr([Part], mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class ListedDiscovery(wtypes.Base):  # type: ignore[misc]
    """A discovery in a list; ``progress`` counts its parts by their state."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    state = wtypes.wsattr(State, mandatory=True)
    progress = wtypes.wsattr({str: int}, mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)
    links = wtypes.wsattr([types.Link], mandatory=True)


class Discoveries(wtypes.Base):  # type: ignore[misc]
    """A list of discoveries."""

    discoveries = wtypes.wsattr([ListedDiscovery], mandatory=True)
    discoveries_links = wtypes.wsattr([types.Link])


class Begun(wtypes.Base):  # type: ignore[misc]
    """A discovery that has just begun."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    state = wtypes.wsattr(State, mandatory=True)
    links = wtypes.wsattr([types.Link], mandatory=True)


class NewDiscovery(wtypes.Base):  # type: ignore[misc]
    """Which backends shall look: all, those of a host, those of a driver (or one backend)."""

    host = wtypes.wsattr(types.Text(shortest=1))
    driver = wtypes.wsattr(types.Text(shortest=1))


def _show(call: Call, row: Row) -> Mapping[str, Any]:
    return call.dump(ListedDiscovery, row, NAME)


class Controller(Resource):
    """The operations on discoveries."""

    @operation(
        rule="cyborg:discovery:get_all",
        since=SINCE,
        answer=Discoveries,
        query={"host": types.Text(), "state": State},
        paged=True,
    )
    def find(self, call: Call, host: str | None, state: str | None, page: Asked) -> Any:
        """List the discoveries of the last day."""
        with self.desk.reader.connect() as connection:
            found = page.read(
                lambda part: read.whole(connection, page=part, host=host, state=state)
            )
        return call.collection(NAME, _show, found)

    @operation(
        rule="cyborg:discovery:create",
        since=SINCE,
        answer=Begun,
        status=202,
        body=NewDiscovery,
        optional=True,
        raises=(NotFound,),
    )
    def create(self, call: Call, body: NewDiscovery) -> Any:
        """Have backends look again, and answer at once."""
        made = self.desk.conductor.discovery_create(body.host or None, body.driver or None)
        call.locate(call.url(NAME, made["uuid"]))
        return call.dump(Begun, {"uuid": made["uuid"], "state": IN_PROGRESS}, NAME)

    @operation(
        rule="cyborg:discovery:get_one",
        since=SINCE,
        answer=Discovery,
        path={"uuid": types.Uuid()},
        raises=(NotFound,),
    )
    def get(self, call: Call, uuid: str) -> Any:
        """Show a discovery with its parts."""
        with self.desk.reader.connect() as connection:
            row = read.get(connection, uuid)
        if row is None:
            raise NotFound(f"no discovery {uuid}")
        states = {part["state"] for part in row["parts"]}
        state = next(state for state in (IN_PROGRESS, FAILED, DONE) if state in states)
        parts = [types.dump(Part, part) for part in row["parts"]]
        return call.dump(Discovery, row, NAME, state=state, backends=parts)
