# SPDX-License-Identifier: Apache-2.0
"""Reading devices.

Rows: uuid, hostname, address, backend, type, vendor, model, std_board_info and vendor_board_info
(objects), numa_node, serial, health, health_reason, health_since, setup_required, reboot_required,
status (what the operator wants: enabled or maintaining), withdrawn (its backend is disabled or
being uninstalled), draining, programming (any part of it is being programmed), host_down,
created_at, updated_at.
"""

from collections.abc import Collection

import sqlalchemy as sa

from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import deployables, services
from cyborg.db.schema import devices as table

COLUMNS = [
    table.c.host.label("hostname"),
    *(column for column in table.c if column.name not in ("id", "host")),
    sa.exists()
    .where(deployables.c.device_id == table.c.id, deployables.c.job_id.is_not(None))
    .correlate(table)
    .label("programming"),
    services.c.down_since.is_not(None).label("host_down"),
]
_FROM = table.outerjoin(
    services, sa.and_(services.c.host == table.c.host, services.c.binary == "cyborg-agent")
)
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
    health: str | None = None,
    address: str | None = None,
) -> list[Row]:
    """Return devices, in one statement; a marker adds one."""
    query = sa.select(*COLUMNS).select_from(_FROM)
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    equal = {"type": type, "vendor": vendor, "host": hostname, "status": status}
    for name, value in (equal | {"health": health, "address": address}).items():
        if value is not None:
            query = query.where(table.c[name] == value)
    query = paging.cut(connection, query, table, page, SORTABLE)
    return [
        # An expression is a number on some databases.
        {**row, "programming": bool(row["programming"]), "host_down": bool(row["host_down"])}
        for row in connection.execute(query).mappings()
    ]


def get(connection: sa.Connection, uuid: str) -> Row | None:
    """Return one device, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)
