# SPDX-License-Identifier: Apache-2.0
"""Read the outbox: messages that are not delivered yet, and dead letters."""

from datetime import datetime
from typing import Any, TypedDict

from cyborg.db.listing import Listing, columns_of
from cyborg.db.rows import row_columns
from cyborg.db.schema import outbox as table


class MessageRow(TypedDict):
    """A message that is not delivered yet, or a dead letter."""

    uuid: str
    kind: str
    subject: str
    state: str
    attempts: int
    next_try_at: datetime
    error: str | None
    payload: dict[str, Any]
    created_at: datetime
    updated_at: datetime | None


SORTABLE = columns_of(
    table,
    *("uuid", "kind", "subject", "state", "attempts", "next_try_at", "created_at", "updated_at"),
)
MESSAGES = Listing(
    row=MessageRow,
    table=table,
    columns=row_columns(MessageRow, table),
    sortable=SORTABLE,
    filters=columns_of(table, "state", "kind", "subject"),
)
find = MESSAGES.find
get = MESSAGES.get
