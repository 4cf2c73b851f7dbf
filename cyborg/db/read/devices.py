# SPDX-License-Identifier: Apache-2.0
"""Reading devices.

Rows: uuid, hostname, address, backend, type, vendor, model, std_board_info and vendor_board_info
(objects), numa_node, serial, health, setup_required, reboot_required, status (what the operator
wants: enabled or maintaining), draining, created_at, updated_at.
"""

from collections.abc import Collection

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import devices as table

COLUMNS = [
    table.c.host.label("hostname"),
    *(column for column in table.c if column.name not in ("id", "host")),
]
SORTABLE = {
    "hostname": table.c.host,
    **{
        name: table.c[name]
        for name in (
            "uuid",
            "type",
            "vendor",
            "model",
            "address",
            "health",
            "status",
            "created_at",
            "updated_at",
        )
    },
}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuids: Collection[str] | None = None,
    type: str | None = None,
    vendor: str | None = None,
    hostname: str | None = None,
    status: str | None = None,
) -> list[Row]:
    """Return devices, in one statement; a marker adds one."""
    query = sa.select(*COLUMNS)
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    equal = {table.c.type: type, table.c.vendor: vendor, table.c.host: hostname}
    for column, value in (equal | {table.c.status: status}).items():
        if value is not None:
            query = query.where(column == value)
    query = paging.cut(connection, query, table, page, SORTABLE)
    return [dict(row) for row in connection.execute(query).mappings()]


def get(connection: sa.Connection, uuid: str) -> Row | None:
    """Return one device, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)
