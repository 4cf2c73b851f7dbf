# SPDX-License-Identifier: Apache-2.0
"""Read accelerators: each attach handle, joined with the ARQ that owns it.

``state`` is an AcceleratorState. ``error`` is the last error of the job that cleans the handle, or
that prepares it again after a reboot of its host; None if it has not failed. ``state_reasons`` are
the conditions (DeviceCondition) that make the device unschedulable. ``driver`` is None if the agent
no longer has this backend.
"""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.core.arq import accelerator
from cyborg.core.arq.accelerator import AcceleratorState
from cyborg.core.arq.states import ArqState
from cyborg.core.hosts.service import AGENT
from cyborg.core.inventory import device_state
from cyborg.core.inventory.device import Health
from cyborg.db import failed_restores, paging
from cyborg.db.paging import Page
from cyborg.db.schema import arqs, backends, deployables, devices, jobs, services
from cyborg.db.schema import attach_handles as table


class AcceleratorRow(TypedDict):
    """An attach handle; the fields of the ARQ are None if no ARQ owns the handle."""

    uuid: str
    type: str
    vendor: str
    model: str
    backend: str
    hostname: str
    driver: str | None
    device_uuid: str
    deployable_uuid: str
    rp_uuid: str
    resource_class: str
    attach_handle_type: str
    attach_handle_info: dict[str, Any]
    arq_uuid: str | None
    instance_uuid: str | None
    project_id: str | None
    name: str | None
    description: str | None
    tags: list[str]
    created_at: datetime
    updated_at: datetime | None
    error: str | None
    state: str
    state_reasons: list[str]


_DRAINING = sa.or_(table.c.draining, deployables.c.draining, devices.c.draining)
_PROGRAMMING = deployables.c.job_id.is_not(None)
_DEVICE_COLUMNS = (
    *("status", "health", "setup_required", "reboot_required", "deliverable", "cordoned"),
    "failing",
)
_CLEANING = jobs.alias("cleaning")
_OWNER_JOB = jobs.alias("owner_job")
_CLEANING_FAILED = sa.and_(table.c.arq_id.is_(None), _CLEANING.c.error.is_not(None))
_HOST_DOWN = services.c.down_since.is_not(None)
COLUMNS = [
    table.c.uuid,
    *(devices.c[name] for name in ("type", "vendor", "model", "backend")),
    devices.c.host.label("hostname"),
    backends.c.driver,
    devices.c.uuid.label("device_uuid"),
    deployables.c.uuid.label("deployable_uuid"),
    deployables.c.rp_uuid,
    deployables.c.resource_class,
    table.c.type.label("attach_handle_type"),
    table.c.info.label("attach_handle_info"),
    arqs.c.uuid.label("arq_uuid"),
    arqs.c.instance_uuid,
    arqs.c.project_id,
    arqs.c.label_name.label("name"),
    arqs.c.label_description.label("description"),
    arqs.c.label_tags.label("tags"),
    table.c.created_at,
    table.c.updated_at,
    sa.case((table.c.arq_id.is_(None), _CLEANING.c.error), else_=_OWNER_JOB.c.error).label("error"),
    arqs.c.state.label("holder"),
    table.c.needs_cleaning,
    _DRAINING.label("draining"),
    *(devices.c[name] for name in _DEVICE_COLUMNS),
    _PROGRAMMING.label("programming"),
    failed_restores.IS_FAILED.label("restore_failed"),
    _HOST_DOWN.label("host_down"),
]
_INTERNAL = {*device_state.FACTS, "holder", "needs_cleaning"}
_FROM = (
    table.join(deployables, deployables.c.id == table.c.deployable_id)
    .join(devices, devices.c.id == deployables.c.device_id)
    .outerjoin(services, sa.and_(services.c.host == devices.c.host, services.c.binary == AGENT))
    .outerjoin(
        backends,
        sa.and_(backends.c.service_id == services.c.id, backends.c.name == devices.c.backend),
    )
    .outerjoin(arqs, arqs.c.id == table.c.arq_id)
    .outerjoin(_CLEANING, _CLEANING.c.id == table.c.job_id)
    .outerjoin(_OWNER_JOB, _OWNER_JOB.c.id == arqs.c.job_id)
)
_ALL = sa.select(*COLUMNS).select_from(_FROM)
# Only for the filter; core computes the state in the result. A test compares the two.
STATE = sa.case(
    (_DRAINING, AcceleratorState.DRAINING),
    (arqs.c.state == ArqState.BIND_STARTED, AcceleratorState.PREPARING),
    (arqs.c.id.is_not(None), AcceleratorState.BOUND),
    (sa.and_(table.c.needs_cleaning, _CLEANING_FAILED), AcceleratorState.ERROR),
    (table.c.needs_cleaning, AcceleratorState.DIRTY),
    (
        sa.or_(
            devices.c.status != device_state.ENABLED,
            devices.c.cordoned,
            devices.c.health == Health.UNHEALTHY,
            devices.c.setup_required,
            devices.c.reboot_required,
            devices.c.failing,
            sa.not_(devices.c.deliverable),
            _PROGRAMMING,
            failed_restores.IS_FAILED,
            _HOST_DOWN,
        ),
        AcceleratorState.CORDONED,
    ),
    else_=AcceleratorState.FREE,
)
SORTABLE = {
    "hostname": devices.c.host,
    "backend": devices.c.backend,
    "type": devices.c.type,
    "resource_class": deployables.c.resource_class,
    "instance_uuid": arqs.c.instance_uuid,
    "project_id": arqs.c.project_id,
    "name": arqs.c.label_name,
    **{name: table.c[name] for name in ("uuid", "created_at", "updated_at")},
}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuids: Collection[str] | None = None,
    project_id: str | None = None,
    driver: str | None = None,
    hostname: str | None = None,
    instance_uuid: str | None = None,
    resource_class: str | None = None,
    states: Collection[str] = (),
) -> list[AcceleratorRow]:
    """Return accelerators; execute one statement, or two with a marker.

    ``project_id`` selects accelerators owned by an ARQ of this project. ``driver`` is the name of a
    driver or of a backend. Without ``states``, accelerators in all states are selected.
    """
    query = _ALL
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if driver is not None:
        query = query.where(sa.or_(backends.c.driver == driver, devices.c.backend == driver))
    for column, value in (
        (arqs.c.project_id, project_id),
        (devices.c.host, hostname),
        (arqs.c.instance_uuid, instance_uuid),
        (deployables.c.resource_class, resource_class),
    ):
        if value is not None:
            query = query.where(column == value)
    if states:
        query = query.where(STATE.in_(states))
    query = paging.paginate(connection, query, table, page, SORTABLE)
    return [_row(row) for row in connection.execute(query).mappings()]


def get(
    connection: sa.Connection, uuid: str, project_id: str | None = None
) -> AcceleratorRow | None:
    """Return one accelerator, or None; with a project, only if an ARQ of this project owns it."""
    return next(iter(find(connection, uuids=[uuid], project_id=project_id)), None)


def _row(row: Mapping[Any, Any]) -> AcceleratorRow:
    condition = device_state.evaluate_row(row)
    state = accelerator.evaluate(
        accelerator.AcceleratorFacts(
            row["holder"],
            row["needs_cleaning"],
            row["error"] is not None,
            bool(row["draining"]),
            condition.schedulable,
        )
    )
    shown = {name: value for name, value in row.items() if name not in _INTERNAL}
    reasons = [str(reason) for reason in condition.reasons]
    computed = {"tags": row["tags"] or [], "state": str(state), "state_reasons": reasons}
    return cast(AcceleratorRow, {**shown, **computed})
