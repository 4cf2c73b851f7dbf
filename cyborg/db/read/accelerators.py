# SPDX-License-Identifier: Apache-2.0
"""Reading accelerators: every attach handle, joined with the request that holds it.

Rows: uuid (the handle's), type, vendor and model of the device, hostname, backend, driver (None
once its agent has that backend no longer), device_uuid, deployable_uuid, rp_uuid, resource_class,
attach_handle_type, attach_handle_info, state (``core.accelerator``), state_reasons (what speaks
against the device, ``core.life``), created_at and updated_at of the handle; and of the request
arq_uuid, instance_uuid, project_id, name, description (all None without one) and tags (then []).
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import sqlalchemy as sa

from cyborg.core import accelerator, life
from cyborg.core.accelerator import State
from cyborg.core.device import Health
from cyborg.core.states import RequestState
from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import attach_handles as table
from cyborg.db.schema import backends, deployables, devices, requests, services

_DRAINING = sa.or_(table.c.draining, deployables.c.draining, devices.c.draining)
_PROGRAMMING = deployables.c.job_id.is_not(None)
_OF_DEVICE = ("status", "health", "setup_required", "reboot_required", "withdrawn")
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
    requests.c.uuid.label("arq_uuid"),
    requests.c.instance_uuid,
    requests.c.project_id,
    requests.c.label_name.label("name"),
    requests.c.label_description.label("description"),
    requests.c.label_tags.label("tags"),
    table.c.created_at,
    table.c.updated_at,
    requests.c.state.label("holder"),
    table.c.prepared,
    _DRAINING.label("draining"),
    *(devices.c[name] for name in _OF_DEVICE),
    _PROGRAMMING.label("programming"),
    _HOST_DOWN.label("host_down"),
]
_FACTS = tuple(field.name for field in fields(life.Facts))
_HIDDEN = {*_FACTS, "holder", "prepared"}
_FROM = (
    table.join(deployables, deployables.c.id == table.c.deployable_id)
    .join(devices, devices.c.id == deployables.c.device_id)
    .outerjoin(
        services, sa.and_(services.c.host == devices.c.host, services.c.binary == "cyborg-agent")
    )
    .outerjoin(
        backends,
        sa.and_(backends.c.service_id == services.c.id, backends.c.name == devices.c.backend),
    )
    .outerjoin(requests, requests.c.id == table.c.request_id)
)
_ALL = sa.select(*COLUMNS).select_from(_FROM)
# For the filter alone; what is shown is decided by core. A test holds the two against each other.
STATE = sa.case(
    (_DRAINING, State.DRAINING),
    (requests.c.state == RequestState.BIND_STARTED, State.PREPARING),
    (requests.c.id.is_not(None), State.BOUND),
    (table.c.prepared, State.DIRTY),
    (
        sa.or_(
            devices.c.status != life.ENABLED,
            devices.c.withdrawn,
            devices.c.health == Health.UNHEALTHY,
            devices.c.setup_required,
            devices.c.reboot_required,
            _PROGRAMMING,
            _HOST_DOWN,
        ),
        State.CLOSED,
    ),
    else_=State.FREE,
)
SORTABLE = {
    "hostname": devices.c.host,
    "backend": devices.c.backend,
    "type": devices.c.type,
    "resource_class": deployables.c.resource_class,
    "instance_uuid": requests.c.instance_uuid,
    "project_id": requests.c.project_id,
    "name": requests.c.label_name,
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
    state: str | None = None,
) -> list[Row]:
    """Return accelerators, in one statement; a marker adds one.

    ``project_id`` leaves those alone that a request of this project holds; ``driver`` is the name
    of a driver or of a backend.
    """
    query = _ALL
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    if driver is not None:
        query = query.where(sa.or_(backends.c.driver == driver, devices.c.backend == driver))
    for column, value in (
        (requests.c.project_id, project_id),
        (devices.c.host, hostname),
        (requests.c.instance_uuid, instance_uuid),
        (deployables.c.resource_class, resource_class),
        (STATE, state),
    ):
        if value is not None:
            query = query.where(column == value)
    query = paging.cut(connection, query, table, page, SORTABLE)
    return [_row(row) for row in connection.execute(query).mappings()]


def get(connection: sa.Connection, uuid: str, project_id: str | None = None) -> Row | None:
    """Return one accelerator, or None; with a project, only if a request of it holds it."""
    return next(iter(find(connection, uuids=[uuid], project_id=project_id)), None)


def _row(row: Mapping[Any, Any]) -> dict[str, Any]:
    # An expression is a number on some databases.
    facts: dict[str, Any] = {name: row[name] for name in _FACTS} | {
        name: bool(row[name]) for name in _FACTS if name not in ("status", "health")
    }
    standing = life.decide(life.Facts(**facts))
    state = accelerator.decide(
        accelerator.Facts(row["holder"], row["prepared"], facts["draining"], standing.open)
    )
    shown = {name: value for name, value in row.items() if name not in _HIDDEN}
    reasons = [str(reason) for reason in standing.reasons]
    return {**shown, "tags": row["tags"] or [], "state": str(state), "state_reasons": reasons}
