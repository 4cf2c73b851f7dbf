# SPDX-License-Identifier: Apache-2.0
"""``cyborg outbox-*``: pending messages to other services, and dead letters."""

from cyborg.cli.common import base, formatting, listing
from cyborg.cli.common.base import argument, field_argument
from cyborg.cli.common.collection import Collection

MESSAGE_COLUMNS = formatting.columns_of("uuid, kind, subject, state, attempts, error")
LONG_MESSAGE_COLUMNS = formatting.columns_of(
    "created_at, updated_at, next_try_at, payload", after=MESSAGE_COLUMNS
)
OUTBOX = Collection(
    "/outbox", MESSAGE_COLUMNS, LONG_MESSAGE_COLUMNS, nouns="messages", has_objects=False
)
_MESSAGES = argument("message", nargs="+", help="uuid of a dead letter")


class MessageList(listing.Lister, of=OUTBOX):
    """List pending messages and dead letters of the outbox."""

    ARGUMENTS = (
        field_argument(
            "--state",
            choices=["pending", "dead"],
            help="only messages in this state; both by default",
        ),
        field_argument(
            "--kind", help="only messages of this kind, such as nova-event or notification"
        ),
    )


class MessageRetry(base.CallEach, of=OUTBOX):
    """Retry the delivery of dead letters."""

    ARGUMENTS = (_MESSAGES,)
    METHOD, SUFFIX, ACTION = "POST", "/retry", "retry"


class MessageDelete(base.CallEach, of=OUTBOX):
    """Delete dead letters."""

    ARGUMENTS = (_MESSAGES,)
