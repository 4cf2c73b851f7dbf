# SPDX-License-Identifier: Apache-2.0
"""Read the discoveries that operators requested."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.listing import Listing
from cyborg.db.paging import NameRow, Page
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import discoveries as table
from cyborg.db.schema import discovery_backends as backends


class BackendRow(TypedDict):
    """One backend of one host that must answer a discovery."""

    host: str
    backend: str
    state: str
    error: str | None


class SummaryRow(TypedDict):
    """A discovery; ``progress`` is the number of its backends by state.

    ``state`` is IN-PROGRESS while a backend is in progress, else FAILED if a backend has failed.
    ``updated_at`` is the time of the last outcome.
    """

    uuid: str
    state: str
    progress: dict[str, int]
    created_at: datetime
    updated_at: datetime | None


_COUNTS = {"DONE": "done", "FAILED": "failed", "IN-PROGRESS": "in_progress"}
_STATE = sa.case(
    (table.c.in_progress > 0, "IN-PROGRESS"), (table.c.failed > 0, "FAILED"), else_="DONE"
)


def _has_host(host: str) -> sa.ColumnElement[bool]:
    return table.c.id.in_(sa.select(backends.c.discovery_id).where(backends.c.host == host))


def _count_by_state(_: sa.Connection, rows: list[dict[str, Any]]) -> list[SummaryRow]:
    for row in rows:
        counts = {state: row.pop(name) for state, name in _COUNTS.items()}
        row["progress"] = {state: count for state, count in counts.items() if count}
    return cast(list[SummaryRow], rows)


DISCOVERIES = Listing(
    row=SummaryRow,
    table=table,
    columns=[
        *(table.c[name] for name in ("uuid", "created_at", "updated_at", *_COUNTS.values())),
        _STATE.label("state"),
    ],
    sortable={
        "uuid": table.c.uuid,
        "state": _STATE,
        "created_at": table.c.created_at,
        "updated_at": table.c.updated_at,
    },
    filters={"uuid": table.c.uuid, "host": _has_host, "state": _STATE},
    complete=_count_by_state,
)
find = DISCOVERIES.find
get = DISCOVERIES.get


def find_hosts(connection: sa.Connection, uuid: str, *, page: Page | None = None) -> list[NameRow]:
    """Return the hosts of a discovery, ordered by name; the marker is any text."""
    return paging.find_names(connection, backends.c.host, _belongs_to(uuid), page, "host")


def find_backends(
    connection: sa.Connection, uuid: str, hosts: Sequence[NameRow]
) -> list[BackendRow]:
    """Return the backends of a page of hosts, in the order of the hosts, then by name."""
    if not hosts:
        return []
    query = sa.select(*row_columns(BackendRow, backends))
    query = query.where(_belongs_to(uuid), paging.on_page(backends.c.host, hosts))
    rows = fetch_all(BackendRow, connection.execute(query))
    return paging.sort_by_page(rows, hosts, lambda row: (row["host"], row["backend"]))


def _belongs_to(uuid: str) -> sa.ColumnElement[bool]:
    discovery = sa.select(table.c.id).where(table.c.uuid == uuid)
    return backends.c.discovery_id == discovery.scalar_subquery()
