# SPDX-License-Identifier: Apache-2.0
"""/v2/outbox: what neighbours have not been told yet, and what they never took."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.call import Call
from cyborg.api.operation import operation
from cyborg.api.paging import Asked
from cyborg.api.resource import Resource
from cyborg.core.errors import NotFound, WrongState
from cyborg.db.read import outbox as read
from cyborg.db.read.paging import Row

NAME = "outbox"
SINCE = (2, 4)
STATES = ("pending", "dead")


class Message(wtypes.Base):  # type: ignore[misc]
    """A message for a neighbour; ``error`` is why its last delivery failed, or null."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    kind = wtypes.wsattr(str, mandatory=True)
    subject = wtypes.wsattr(str, mandatory=True)
    state = wtypes.wsattr(types.OneOf(*STATES), mandatory=True)
    attempts = wtypes.wsattr(int, mandatory=True)
    next_try_at = wtypes.wsattr(datetime, mandatory=True)
    error = wtypes.wsattr(str)
    payload = wtypes.wsattr(types.Checked("object", dict), mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)


class Messages(wtypes.Base):  # type: ignore[misc]
    """A list of messages."""

    outbox = wtypes.wsattr([Message], mandatory=True)
    outbox_links = wtypes.wsattr([types.Link])


def show(_: Call, row: Row) -> Mapping[str, Any]:
    """Return a message as JSON."""
    return types.dump(Message, row)


class Controller(Resource):
    """The operations on the outbox."""

    @operation(
        rule="cyborg:outbox:get_all",
        since=SINCE,
        answer=Messages,
        query={"state": types.OneOf(*STATES), "kind": types.Text(64)},
        paged=True,
    )
    def find(self, call: Call, state: str | None, kind: str | None, page: Asked) -> Any:
        """List messages that are to be delivered (pending) and that nobody took (dead)."""
        with self.desk.reader.connect() as connection:
            found = page.read(lambda part: read.find(connection, page=part, state=state, kind=kind))
        return call.collection(NAME, show, found)

    @operation(
        rule="cyborg:outbox:retry",
        since=SINCE,
        status=204,
        path={"uuid": types.Uuid()},
        raises=(NotFound, WrongState),
    )
    def retry(self, call: Call, uuid: str) -> None:
        """Have a dead message delivered now."""
        self.desk.conductor.outbox_retry(uuid)

    @operation(
        rule="cyborg:outbox:delete",
        since=SINCE,
        status=204,
        path={"uuid": types.Uuid()},
        raises=(NotFound, WrongState),
    )
    def delete(self, call: Call, uuid: str) -> None:
        """Forget a dead message."""
        self.desk.conductor.outbox_delete(uuid)
