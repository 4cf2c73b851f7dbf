# SPDX-License-Identifier: Apache-2.0
"""Read the outbox: messages that are not delivered yet, and dead letters."""

from collections.abc import Collection
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.paging import Page
from cyborg.db.rows import fetch_all
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


_HIDDEN = ("id", "owner", "lease_until", "trace_context")
COLUMNS = [column for column in table.c if column.name not in _HIDDEN]
SORTABLE = {
    name: table.c[name]
    for name in (
        "uuid",
        "kind",
        "subject",
        "state",
        "attempts",
        "next_try_at",
        "created_at",
        "updated_at",
    )
}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuids: Collection[str] | None = None,
    state: str | None = None,
    kind: str | None = None,
    subject: str | None = None,
) -> list[MessageRow]:
    """Return messages of the outbox; execute one statement, or two with a marker."""
    query = sa.select(*COLUMNS)
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if state is not None:
        query = query.where(table.c.state == state)
    if kind is not None:
        query = query.where(table.c.kind == kind)
    if subject is not None:
        query = query.where(table.c.subject == subject)
    query = paging.paginate(connection, query, table, page, SORTABLE)
    return fetch_all(MessageRow, connection.execute(query))


def get(connection: sa.Connection, uuid: str) -> MessageRow | None:
    """Return one message, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)
