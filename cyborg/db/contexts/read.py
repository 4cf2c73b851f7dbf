# SPDX-License-Identifier: Apache-2.0
"""Read device contexts."""

from collections.abc import Collection
from datetime import datetime
from typing import Any, NotRequired, TypedDict, cast

import sqlalchemy as sa

from cyborg.core.contexts.states import LEASED
from cyborg.core.maintenance import SuccessorState, successor_state
from cyborg.db.listing import Listing, columns_of
from cyborg.db.schema import attachments
from cyborg.db.schema import device_contexts as table


class SuccessorRow(TypedDict):
    """The successor of a context whose device is under maintenance; ``error`` is for operators."""

    state: SuccessorState
    error: str | None


class NewContextRow(TypedDict):
    """A device context as it is inserted."""

    uuid: str
    project_id: str | None
    name: str | None
    description: str | None
    state: str
    groups: list[dict[str, str]]
    config_data: dict[str, str]
    device_profile: str | None
    expires_at: datetime | None
    created_at: datetime


class ContextRow(NewContextRow):
    """A device context; ``expires_at`` is the end of its lease while it has one.

    Lists omit ``failure``, which has 14 kilobytes with 32 long reasons, and columns that only the
    conductor needs; the conductor reads all columns, without the successor.
    """

    id: NotRequired[int]
    hostname: str | None
    instance_uuid: str | None
    error: str | None
    failure: NotRequired[dict[str, Any] | None]
    epoch: int
    lease_expires_at: NotRequired[datetime | None]
    updated_at: datetime | None
    successor: NotRequired[SuccessorRow | None]


EXPIRES_AT = sa.case(
    (table.c.state.in_(sorted(LEASED)), table.c.lease_expires_at), else_=table.c.expires_at
)
SORTABLE = {
    "expires_at": EXPIRES_AT,
    **columns_of(
        table,
        *("uuid", "name", "state", "device_profile", "hostname", "instance_uuid", "project_id"),
        *("created_at", "updated_at"),
    ),
}


def _complete(connection: sa.Connection, rows: list[dict[str, Any]]) -> list[ContextRow]:
    # A context without an instance has no successor.
    found = successors(connection, [row["uuid"] for row in rows if row["instance_uuid"]])
    return [cast(ContextRow, {**row, "successor": found.get(row["uuid"])}) for row in rows]


def successors(connection: sa.Connection, uuids: Collection[str]) -> dict[str, SuccessorRow]:
    """Return the oldest successor of each of these contexts that has one, by its uuid.

    A successor for a former instance of the context is left out.
    """
    if not uuids:
        return {}
    query = (
        sa.select(
            attachments.c.successor_of,
            attachments.c.state,
            attachments.c.step,
            attachments.c.error,
        )
        .join(table, table.c.uuid == attachments.c.successor_of)
        .where(
            attachments.c.successor_of.in_(sorted(uuids)),
            attachments.c.instance_uuid == table.c.instance_uuid,
        )
        # The dictionary keeps the last row of a context, which is that of the oldest successor.
        .order_by(attachments.c.id.desc())
    )
    return {
        row.successor_of: {"state": successor_state(row.state, row.step), "error": row.error}
        for row in connection.execute(query)
    }


def count(connection: sa.Connection, project_id: str) -> int:
    """Return the number of contexts of a project."""
    query = sa.select(sa.func.count()).where(table.c.project_id == project_id)
    return int(connection.scalar(query) or 0)


CONTEXTS = Listing(
    row=ContextRow,
    table=table,
    columns=[
        *(c for c in table.c if c.name not in ("id", "failure", "expires_at", "lease_expires_at")),
        EXPIRES_AT.label("expires_at"),
    ],
    details=[table.c.failure],
    sortable=SORTABLE,
    filters=columns_of(
        table,
        *("state", "instance_uuid", "hostname", "device_profile", "name", "project_id"),
    ),
    complete=_complete,
)
find = CONTEXTS.find
get = CONTEXTS.get
