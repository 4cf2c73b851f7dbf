# SPDX-License-Identifier: Apache-2.0
"""Read deployables, each with the uuids of its parent, root and device.

Fields: uuid, parent_uuid and root_uuid (None for a root), device_uuid, hostname, driver_name (the
backend that discovered the device), address, name, rp_uuid, resource_class, traits, attributes (the
agent's, overridden by the operator's), bitstream_id, num_accelerators, draining (of the deployable
or its device), device_set (None unless it is one), created_at, updated_at. Three fields are about
the resource provider: stale (Placement does not have the current revision), stale_since and error.
"""

from datetime import datetime
from typing import Any, NamedTuple, TypedDict, cast

import sqlalchemy as sa

from cyborg.core.jobs.job import JobKind, JobState
from cyborg.db.deployables import attributes, device_sets
from cyborg.db.deployables.device_sets import DeviceSetRow
from cyborg.db.listing import Listing, columns_of
from cyborg.db.schema import arqs, deployables, devices, jobs, providers

# The providers of the deployables with a bound handle that the host failed to prepare again.
# They are found by the open restore jobs after a reboot.
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

# The condition that a deployable is one of these.
RESTORE_FAILED: sa.ColumnElement[bool] = deployables.c.rp_uuid.in_(FAILED_RESTORES)


def failed_restores(connection: sa.Connection) -> set[str]:
    """Return the provider uuids of all deployables with a failed restore."""
    return set(connection.scalars(FAILED_RESTORES))


class DeployableColumns(TypedDict):
    """The columns of a deployable that a list shows as they are, except its times."""

    uuid: str
    address: str
    name: str
    rp_uuid: str
    resource_class: str
    traits: list[str]
    attributes: dict[str, str]
    bitstream_id: str | None
    num_accelerators: int


class DeployableRow(DeployableColumns):
    """A deployable, its parent, root and device, and the state of its provider."""

    created_at: datetime
    updated_at: datetime | None
    parent_uuid: str | None
    root_uuid: str | None
    device_uuid: str
    hostname: str
    driver_name: str
    draining: bool
    device_set: DeviceSetRow | None
    stale: bool
    stale_since: datetime | None
    error: str | None


_parent = deployables.alias("parents")
_root = deployables.alias("roots")
_INTERNAL = (
    *("device_id", "host", "parent_id", "root_id", "job_id", "draining", "desired_image"),
    *("set_size", "set_group", "offer"),
)
SORTABLE = {
    "hostname": deployables.c.host,
    **columns_of(
        deployables,
        *("uuid", "name", "rp_uuid", "resource_class", "num_accelerators"),
        *("created_at", "updated_at"),
    ),
}


def _of_device(uuid: str) -> sa.ColumnElement[bool]:
    device = sa.select(devices.c.id).where(devices.c.uuid == uuid)
    return deployables.c.device_id == device.scalar_subquery()


def _complete(connection: sa.Connection, rows: list[dict[str, Any]]) -> list[DeployableRow]:
    added = attributes.of_deployables(connection, [row["id"] for row in rows])
    sets = [row["id"] for row in rows if row["device_set"] is not None]
    members = device_sets.find_members(connection, sets)
    for row in rows:
        id_, offer, reason = row.pop("id"), row.pop("offer"), row.pop("offer_reason")
        # An attribute of the operator hides that of the agent with the same key.
        row["attributes"] |= {item.key: item.value for item in added.get(id_, ())}
        if (reported := row["device_set"]) is not None:
            row["device_set"] = device_sets.make_row(reported, offer, reason, members.get(id_, {}))
    return cast(list[DeployableRow], rows)


DEPLOYABLES = Listing(
    row=DeployableRow,
    table=deployables,
    source=deployables.join(devices, devices.c.id == deployables.c.device_id)
    .outerjoin(_parent, _parent.c.id == deployables.c.parent_id)
    .outerjoin(_root, _root.c.id == deployables.c.root_id)
    .outerjoin(providers, providers.c.uuid == deployables.c.rp_uuid),
    columns=[
        *(column for column in deployables.c if column.name not in _INTERNAL),
        _parent.c.uuid.label("parent_uuid"),
        _root.c.uuid.label("root_uuid"),
        devices.c.uuid.label("device_uuid"),
        deployables.c.host.label("hostname"),
        devices.c.backend.label("driver_name"),
        device_sets.OFFER.label("offer"),
        sa.or_(deployables.c.draining, devices.c.draining).label("draining"),
        # A deployable without a provider is not published yet.
        sa.func.coalesce(providers.c.published_revision < providers.c.revision, sa.true()).label(
            "stale"
        ),
        providers.c.stale_since,
        providers.c.error,
    ],
    sortable=SORTABLE,
    filters={
        "device_uuid": _of_device,
        "hostname": deployables.c.host,
        "rp_uuid": deployables.c.rp_uuid,
        "name": deployables.c.name,
        "member": device_sets.has_member,
        "offer": device_sets.is_offered_as,
    },
    ids_first=True,
    complete=_complete,
)
find = DEPLOYABLES.find
get = DEPLOYABLES.get


class Names(NamedTuple):
    """Traits and resource classes of devices: of reported ones, and of imported ones.

    ``imported`` has those that an import has stored and no agent has reported yet.
    """

    reported: set[str]
    imported: set[str]


def read_names(connection: sa.Connection, imported: str) -> Names:
    """Return the traits and resource classes of all devices, also of their other layouts.

    ``imported`` is the backend of devices that were imported and not reported yet.
    """
    query = sa.select(
        devices.c.backend, deployables.c.resource_class, deployables.c.traits, devices.c.layouts
    ).join(devices, devices.c.id == deployables.c.device_id)
    reported_names, imported_names = set[str](), set[str]()
    for row in connection.execute(query):
        names = imported_names if row.backend == imported else reported_names
        names |= {row.resource_class, *row.traits}
        for layout in row.layouts:
            names |= {*layout["offers"], *layout.get("traits", ())}
    return Names(reported=reported_names, imported=imported_names)
