# SPDX-License-Identifier: Apache-2.0
"""Read devices.

Fields: uuid, hostname, address, backend, type, vendor, model, std_board_info and vendor_board_info
(objects), numa_node, serial, health, health_reason, health_since, setup_required, reboot_required,
deliverable, undeliverable_reason, topology (an object), layout (the name of the current layout),
layouts (``core.inventory.device.Layout``), desired_layout (the last layout that an operator chose),
boot_check (``core.inventory.device_state``), status (set by the operator: enabled or maintaining),
cordoned (its backend is disabled or being uninstalled), draining, programming (any deployable is
being programmed), restore_failed (of any deployable: ``db.deployables.read``), host_down,
job_errors (texts: until when a failing device is closed; the last failed job of each kind, until
one of the kind succeeds (``core.jobs.progress``); the errors of open jobs that apply a layout or an
image; and, one for each handle, the errors of open jobs that clean its handles, or prepare them
again after a reboot), failing (closed, because its last prepare jobs failed), placement (the worst
state of its resource providers: error, stale or in_sync; None if it has none), maintenance (its
maintenance window: ``db.devices.drains``; None if it has none), use (its handles by use, the clean
ones as free: ``db.handles.usage``), created_at, updated_at.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from typing import Any, cast

import sqlalchemy as sa

from cyborg.core.hosts import AGENT
from cyborg.core.jobs.job import JobKind, JobState
from cyborg.core.jobs.progress import Failure
from cyborg.db import paging
from cyborg.db.deployables import read as failed_restores
from cyborg.db.devices import drains
from cyborg.db.devices.drains import MaintenanceRow
from cyborg.db.handles import usage as handles
from cyborg.db.paging import Page
from cyborg.db.rows import DeviceColumns
from cyborg.db.schema import (
    arqs,
    attach_handles,
    deployables,
    device_maintenances,
    jobs,
    providers,
    services,
)
from cyborg.db.schema import devices as table

MAX_JOB_ERRORS = 16
"""Maximum number of errors of one device."""


class DeviceRow(DeviceColumns):
    """A device; ``placement`` is the worst state of its resource providers."""

    hostname: str
    programming: bool
    restore_failed: bool
    host_down: bool
    placement: str | None
    job_errors: list[str]
    maintenance: MaintenanceRow | None
    use: dict[str, int]
    created_at: datetime
    updated_at: datetime | None


_deployables = deployables.alias("device_deployables")
COLUMNS = [
    table.c.id.label("row_id"),
    table.c.host.label("hostname"),
    *(column for column in table.c if column.name not in ("id", "host")),
    sa.exists()
    .where(deployables.c.device_id == table.c.id, deployables.c.job_id.is_not(None))
    .correlate(table)
    .label("programming"),
    sa.exists()
    .where(deployables.c.device_id == table.c.id, failed_restores.RESTORE_FAILED)
    .correlate(table)
    .label("restore_failed"),
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
    *drains.COLUMNS,
]
_INTERNAL = {"row_id", *(column.name for column in drains.COLUMNS)}
_PLACEMENT = {None: None, 0: "in_sync", 1: "stale", 2: "error"}
_FROM = table.outerjoin(
    services, sa.and_(services.c.host == table.c.host, services.c.binary == AGENT)
).outerjoin(device_maintenances, device_maintenances.c.device_uuid == table.c.uuid)
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
    deliverable: bool | None = None,
    address: str | None = None,
    model: str | None = None,
    backend: str | None = None,
) -> list[DeviceRow]:
    """Return devices; execute four statements, or five with a marker.

    If one of them has a maintenance window, execute two more.
    """
    equal = {"type": type, "vendor": vendor, "host": hostname, "status": status}
    others = {"health": health, "deliverable": deliverable, "address": address}
    others |= {"model": model, "backend": backend}
    conditions: list[sa.ColumnElement[bool]] = [
        table.c[name] == value for name, value in (equal | others).items() if value is not None
    ]
    if uuids is not None:
        conditions.append(table.c.uuid.in_(uuids))
    query = sa.select(*COLUMNS).select_from(_FROM)
    ids = sa.select(table.c.id).where(*conditions)
    query = paging.paginate_ids(connection, query, ids, table, page, SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    windows = drains.build_rows(connection, found)
    errors = _job_errors(connection, [row["uuid"] for row in found])
    uses = handles.of_devices(connection, [row["row_id"] for row in found])
    return [
        # Some databases return a boolean expression as a number.
        cast(
            DeviceRow,
            {
                **{name: value for name, value in row.items() if name not in _INTERNAL},
                "maintenance": windows.get(row["uuid"]),
                "job_errors": [*_failures(row), *errors.get(row["uuid"], [])][:MAX_JOB_ERRORS],
                "programming": bool(row["programming"]),
                "restore_failed": bool(row["restore_failed"]),
                "host_down": bool(row["host_down"]),
                "placement": _PLACEMENT[row["placement"]],
                "use": uses[row["row_id"]],
            },
        )
        for row in found
    ]


def get(connection: sa.Connection, uuid: str) -> DeviceRow | None:
    """Return one device, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)


def _failures(row: Mapping[Any, Any]) -> Iterator[str]:
    """Yield texts about the ended jobs of a device that failed."""
    if row["retry_at"] is not None:
        until = f"{row['retry_at']:%Y-%m-%dT%H:%M:%SZ}"
        yield f"closed until {until}, because {row['failed_prepares']} prepare jobs failed in a row"
    for failure in row["job_failures"] or ():
        yield Failure.from_dict(failure).describe()


def _job_errors(connection: sa.Connection, uuids: Collection[str]) -> dict[str, list[str]]:
    """Return the errors of open jobs on devices and their handles, by the uuid of the device."""
    if not uuids:
        return {}
    j, h = jobs.c, attach_handles.c
    cleaned = jobs.join(attach_handles, sa.and_(h.job_id == j.id, h.arq_id.is_(None)))
    restored = jobs.join(arqs, arqs.c.job_id == j.id).join(attach_handles, h.arq_id == arqs.c.id)
    failed = sa.and_(j.state == JobState.OPEN, j.error.is_not(None), table.c.uuid.in_(uuids))
    queries = [
        sa.select(table.c.uuid, h.id, h.address, j.kind, j.uuid.label("job"), j.error)
        .select_from(
            source.join(deployables, deployables.c.id == h.deployable_id).join(
                table, table.c.id == deployables.c.device_id
            )
        )
        .where(failed)
        for source in (cleaned, restored)
    ]
    programmed = jobs.join(deployables, deployables.c.job_id == j.id)
    # Jobs of the whole device or of a deployable come first.
    first = (table.c.uuid, sa.literal(0).label("id"), table.c.address, j.kind, j.uuid, j.error)
    queries += [
        sa.select(*first)
        .select_from(jobs.join(table, table.c.uuid == j.subject))
        .where(failed, j.kind == JobKind.PARTITION),
        sa.select(*first)
        .select_from(programmed.join(table, table.c.id == deployables.c.device_id))
        .where(failed, j.kind == JobKind.PROGRAM),
    ]
    found = defaultdict[str, list[str]](list)
    for row in sorted(connection.execute(sa.union_all(*queries)), key=lambda row: row.id):
        handle = f"handle {row.address}, " if row.id else ""
        found[row.uuid].append(f"{handle}{row.kind} job {row.job}: {row.error}")
    return found
