# SPDX-License-Identifier: Apache-2.0
"""Read deployables, each with the uuids of its parent, root and device.

Fields: uuid, parent_uuid and root_uuid (None for a root), device_uuid, hostname, driver_name (the
backend that discovered the device), address, name, rp_uuid, resource_class, traits, attributes (the
agent's, overridden by the operator's), bitstream_id, num_accelerators, draining (of the deployable
or its device), created_at, updated_at. Three fields are about the resource provider: stale
(Placement does not have the current revision), stale_since and error.
"""

from collections.abc import Collection
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.core.jobs.job import JobKind, JobState
from cyborg.db import paging
from cyborg.db.paging import Page
from cyborg.db.schema import arqs, attributes, devices, jobs, providers
from cyborg.db.schema import deployables as table

# Not a column, which could keep an outdated value after the ARQ of such a job is released. The
# subquery starts at the few open jobs, and does not depend on the outer query: it is run once.
FAILED_RESTORES: sa.Select[Any] = (
    sa.select(arqs.c.device_rp_uuid)
    .join(jobs, jobs.c.id == arqs.c.job_id)
    .where(
        jobs.c.state == JobState.OPEN,
        jobs.c.kind == JobKind.RESTORE,
        jobs.c.error.is_not(None),
        # A NULL in the result would make the condition below NULL instead of false.
        arqs.c.device_rp_uuid.is_not(None),
    )
)
"""The providers of the deployables with a bound handle that the host failed to prepare again.

They are found by the open restore jobs after a reboot.
"""

RESTORE_FAILED: sa.ColumnElement[bool] = table.c.rp_uuid.in_(FAILED_RESTORES)
"""The condition that a deployable is one of these."""


def failed_restores(connection: sa.Connection) -> set[str]:
    """Return the provider uuids of all deployables with a failed restore."""
    return set(connection.scalars(FAILED_RESTORES))


class DeployableRow(TypedDict):
    """A deployable, its parent, root and device, and the state of its provider."""

    uuid: str
    address: str
    name: str
    rp_uuid: str
    resource_class: str
    traits: list[str]
    attributes: dict[str, str]
    bitstream_id: str | None
    num_accelerators: int
    created_at: datetime
    updated_at: datetime | None
    parent_uuid: str | None
    root_uuid: str | None
    device_uuid: str
    hostname: str
    driver_name: str
    draining: bool
    stale: bool
    stale_since: datetime | None
    error: str | None


_parent = table.alias("parents")
_root = table.alias("roots")
_INTERNAL = ("device_id", "host", "parent_id", "root_id", "job_id", "draining", "desired_image")
COLUMNS = [
    *(column for column in table.c if column.name not in _INTERNAL),
    _parent.c.uuid.label("parent_uuid"),
    _root.c.uuid.label("root_uuid"),
    devices.c.uuid.label("device_uuid"),
    table.c.host.label("hostname"),
    devices.c.backend.label("driver_name"),
    sa.or_(table.c.draining, devices.c.draining).label("draining"),
    sa.func.coalesce(providers.c.published_revision < providers.c.revision, sa.true()).label(
        "stale"
    ),
    providers.c.stale_since,
    providers.c.error,
]
SORTABLE = {
    "hostname": table.c.host,
    **{
        name: table.c[name]
        for name in (
            "uuid",
            "name",
            "rp_uuid",
            "resource_class",
            "num_accelerators",
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
    device_uuid: str | None = None,
    hostname: str | None = None,
    rp_uuid: str | None = None,
) -> list[DeployableRow]:
    """Return deployables; execute two statements, or three with a marker."""
    query = (
        sa.select(*COLUMNS)
        .select_from(table)
        .join(devices, devices.c.id == table.c.device_id)
        .outerjoin(_parent, _parent.c.id == table.c.parent_id)
        .outerjoin(_root, _root.c.id == table.c.root_id)
        .outerjoin(providers, providers.c.uuid == table.c.rp_uuid)
    )
    conditions: list[sa.ColumnElement[bool]] = []
    if uuids is not None:
        conditions.append(table.c.uuid.in_(uuids))
    if device_uuid is not None:
        device = sa.select(devices.c.id).where(devices.c.uuid == device_uuid)
        conditions.append(table.c.device_id == device.scalar_subquery())
    if hostname is not None:
        conditions.append(table.c.host == hostname)
    if rp_uuid is not None:
        conditions.append(table.c.rp_uuid == rp_uuid)
    ids = sa.select(table.c.id).where(*conditions)
    query = paging.paginate_ids(connection, query, ids, table, page, SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    operator_attributes = _attributes(connection, query) if found else {}
    for row in found:
        row["attributes"] = row["attributes"] | operator_attributes.get(row.pop("id"), {})
        row["draining"], row["stale"] = bool(row["draining"]), bool(row["stale"])
    return [cast(DeployableRow, row) for row in found]


def get(connection: sa.Connection, uuid: str) -> DeployableRow | None:
    """Return one deployable, or None."""
    return next(iter(find(connection, uuids=[uuid])), None)


def _attributes(connection: sa.Connection, found: sa.Select[Any]) -> dict[int, dict[str, str]]:
    chosen = found.with_only_columns(table.c.id).subquery()
    query = (
        sa.select(attributes.c.deployable_id, attributes.c.key, attributes.c.value)
        .join(chosen, chosen.c.id == attributes.c.deployable_id)
        .order_by(attributes.c.id)
    )
    values: dict[int, dict[str, str]] = {}
    for deployable, key, value in connection.execute(query):
        values.setdefault(deployable, {})[key] = value
    return values


def read_names(connection: sa.Connection, imported: str) -> tuple[set[str], set[str]]:
    """Return the traits and resource classes of all devices, also of their other layouts.

    The second set is that of the devices of backend ``imported``, the first that of all others.
    """
    query = sa.select(
        devices.c.backend, table.c.resource_class, table.c.traits, devices.c.layouts
    ).join(devices, devices.c.id == table.c.device_id)
    reported, offered = set[str](), set[str]()
    for row in connection.execute(query):
        names = offered if row.backend == imported else reported
        names |= {row.resource_class, *row.traits}
        for layout in row.layouts:
            names |= {*layout["offers"], *layout.get("traits", ())}
    return reported, offered
