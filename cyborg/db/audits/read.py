# SPDX-License-Identifier: Apache-2.0
"""Read audits and their findings."""

from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.paging import Page
from cyborg.db.schema import audits as table


class AuditRow(TypedDict):
    """An audit without its findings; ``host`` is None for all hosts."""

    uuid: str
    host: str | None
    repair: bool
    state: str
    error: str | None
    sources: list[str]
    hosts_done: int
    hosts_total: int
    num_findings: int
    created_at: datetime
    updated_at: datetime | None


class AuditDetailsRow(AuditRow):
    """An audit with its findings."""

    findings: list[dict[str, Any]]


_HIDDEN = ("id", "owner", "lease_until", "last_host", "findings")
COLUMNS = [column for column in table.c if column.name not in _HIDDEN]
SORTABLE = {name: table.c[name] for name in ("uuid", "host", "state", "created_at", "updated_at")}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    host: str | None = None,
    state: str | None = None,
) -> list[AuditRow]:
    """Return audits without their findings; execute one statement, or two with a marker."""
    query = sa.select(*COLUMNS)
    if host is not None:
        query = query.where(table.c.host == host)
    if state is not None:
        query = query.where(table.c.state == state)
    query = paging.paginate(connection, query, table, page, SORTABLE)
    return [
        cast(AuditRow, {**row, "repair": bool(row["repair"])})
        for row in connection.execute(query).mappings()
    ]


def get(connection: sa.Connection, uuid: str) -> AuditDetailsRow | None:
    """Return one audit with its findings, or None."""
    query = sa.select(*COLUMNS, table.c.findings).where(table.c.uuid == uuid)
    row = connection.execute(query).mappings().first()
    if row is None:
        return None
    return cast(AuditDetailsRow, {**row, "repair": bool(row["repair"])})
