# SPDX-License-Identifier: Apache-2.0
"""Read devices.

Fields: uuid, hostname, address, backend, type, vendor, model, std_board_info and vendor_board_info
(objects), numa_node, serial, health, health_reason, health_since, setup_required, reboot_required,
status (set by the operator: enabled or maintaining), cordoned (its backend is disabled or being
uninstalled), draining, programming (any deployable is being programmed), host_down, placement (the
worst state of its resource providers: error, stale or in_sync; None if it has none), created_at,
updated_at.
"""

from collections.abc import Collection
from datetime import datetime
from typing import cast

import sqlalchemy as sa

from cyborg.core.hosts.service import AGENT
from cyborg.db.read import paging
from cyborg.db.read.paging import Page
from cyborg.db.rows import DeviceColumns
from cyborg.db.schema import deployables, providers, services
from cyborg.db.schema import devices as table


class DeviceRow(DeviceColumns):
    """A device; ``placement`` is the worst state of its resource providers."""

    hostname: str
    programming: bool
    host_down: bool
    placement: str | None
    created_at: datetime
    updated_at: datetime | None


_deployables = deployables.alias("device_deployables")
COLUMNS = [
    table.c.host.label("hostname"),
    *(column for column in table.c if column.name not in ("id", "host")),
    sa.exists()
    .where(deployables.c.device_id == table.c.id, deployables.c.job_id.is_not(None))
    .correlate(table)
    .label("programming"),
    services.c.down_since.is_not(None).label("host_down"),
    sa.select(
        sa.func.max(
            sa.case(
                (providers.c.error.is_not(None), 2),
                (
                    sa.func.coalesce(
                        providers.c.published_revision < providers.c.revision, sa.true()
                    ),
                    1,
                ),
                else_=0,
            )
        )
    )
    .select_from(_deployables.outerjoin(providers, providers.c.uuid == _deployables.c.rp_uuid))
    .where(_deployables.c.device_id == table.c.id)
    .correlate(table)
    .scalar_subquery()
    .label("placement"),
]
_PLACEMENT = {None: None, 0: "in_sync", 1: "stale", 2: "error"}
_FROM = table.outerjoin(
    services, sa.and_(services.c.host == table.c.host, services.c.binary == AGENT)
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
) -> list[DeviceRow]:
    """Return devices; execute one statement, or two with a marker."""
    query = sa.select(*COLUMNS).select_from(_FROM)
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    equal = {"type": type, "vendor": vendor, "host": hostname, "status": status}
    for name, value in (equal | {"health": health, "address": address}).items():
        if value is not None:
            query = query.where(table.c[name] == value)
    query = paging.paginate(connection, query, table, page, SORTABLE)
    return [
        # Some databases return a boolean expression as a number.
        cast(
            DeviceRow,
            {
                **row,
                "programming": bool(row["programming"]),
                "host_down": bool(row["host_down"]),
                "placement": _PLACEMENT[row["placement"]],
            },
        )
        for row in connection.execute(query).mappings()
    ]


def get(connection: sa.Connection, uuid: str) -> DeviceRow | None:
    """Return one device, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)
