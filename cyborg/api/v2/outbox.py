# SPDX-License-Identifier: Apache-2.0
"""/v2/outbox: messages to other services that are pending, and dead letters."""

from datetime import datetime

from wsme import types as wtypes

from cyborg.api import types
from cyborg.api.collection import Collection
from cyborg.api.controller import Resource
from cyborg.api.request_context import RequestContext
from cyborg.core.errors import NotFound, WrongState
from cyborg.db.outbox import read as outbox_read

MESSAGE_STATES = ("pending", "dead")


class Message(types.JsonObject):
    """A message to another service; ``error`` is the error of the last failed delivery, or null."""

    uuid = wtypes.wsattr(types.Uuid(), mandatory=True)
    kind = wtypes.wsattr(str, mandatory=True)
    subject = wtypes.wsattr(str, mandatory=True)
    state = wtypes.wsattr(types.Enum(*MESSAGE_STATES), mandatory=True)
    attempts = wtypes.wsattr(int, mandatory=True)
    next_try_at = wtypes.wsattr(datetime, mandatory=True)
    error = wtypes.wsattr(str)
    payload = wtypes.wsattr(types.Validated("object", dict), mandatory=True)
    created_at = wtypes.wsattr(datetime, mandatory=True)
    updated_at = wtypes.wsattr(datetime)


OUTBOX = Collection("outbox", "outbox", outbox_read, Message, nouns="messages", since=(2, 4))


class OutboxController(Resource):
    """The operations on the outbox."""

    find = OUTBOX.find(
        "List pending messages and dead letters (messages whose delivery failed for good).",
        state=types.Enum(*MESSAGE_STATES),
        kind=types.Text(64),
        subject=types.Text(),
    )

    @OUTBOX.operation("POST outbox/{uuid}/retry", "retry", raises=(NotFound, WrongState))
    def retry(self, request: RequestContext, uuid: str) -> None:
        """Retry the delivery of a dead letter now."""
        self.context.conductor.outbox_retry(uuid)

    @OUTBOX.operation("DELETE outbox/{uuid}", "delete", raises=(NotFound, WrongState))
    def delete(self, request: RequestContext, uuid: str) -> None:
        """Delete a dead letter."""
        self.context.conductor.outbox_delete(uuid)
