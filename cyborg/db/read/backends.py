# SPDX-License-Identifier: Apache-2.0
"""Read the backends of all agents, one row for each backend."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NotRequired, TypedDict, cast

import sqlalchemy as sa

from cyborg.core.inventory import capability, device_state
from cyborg.core.inventory import functions as core_functions
from cyborg.core.inventory.functions import HandleUsage
from cyborg.db import failed_restores, paging
from cyborg.db.paging import Page
from cyborg.db.schema import attach_handles, deployables, devices, services
from cyborg.db.schema import backends as table


class FunctionRow(TypedDict):
    """A capability such as ``crypto.ipsec.aes``, computed from the devices of a backend.

    ``cyborg.core.inventory.functions`` defines the names and the numbers.
    """

    function: str
    total: int
    used: int
    free: int


class BackendRow(TypedDict):
    """A backend of an agent; with its capabilities (``functions``) on request."""

    uuid: str
    name: str
    driver: str
    status: str
    error: str | None
    remarks: list[str] | None
    settings: list[dict[str, Any]] | None
    cordoned: bool
    created_at: datetime
    updated_at: datetime | None
    functions: NotRequired[list[FunctionRow]]


class AgentBackendRow(BackendRow):
    """A backend with the state of its agent.

    ``backends`` has only this backend, so that the row looks like one of
    ``cyborg.db.read.services``.
    """

    binary: str
    host: str
    last_seen_at: datetime
    late_at: datetime
    down_at: datetime
    down_since: datetime | None
    backends: list[BackendRow]


_SERVICE_KEYS = ("binary", "host", "last_seen_at")
SORTABLE = {
    **{name: services.c[name] for name in _SERVICE_KEYS},
    **{name: table.c[name] for name in ("uuid", "name", "driver", "status", "created_at")},
}
_IN_USE = sa.or_(attach_handles.c.arq_id.is_not(None), attach_handles.c.needs_cleaning)
_IDLE = sa.not_(sa.or_(_IN_USE, attach_handles.c.draining))
_WITH_DEVICES = table.join(services, services.c.id == table.c.service_id).join(
    devices, sa.and_(devices.c.host == services.c.host, devices.c.backend == table.c.name)
)
_NO_HANDLES: Mapping[str, int] = {"total": 0, "used": 0, "idle": 0}
_DEVICE_COLUMNS = (
    *("status", "health", "setup_required", "reboot_required", "deliverable", "cordoned"),
    "failing",
    "draining",
)


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    host: str | None = None,
    binary: str | None = None,
    function: str | None = None,
) -> list[AgentBackendRow]:
    """Return backends with their capabilities; execute five statements, or six with a marker.

    ``function`` is the name of a capability. It selects the backends that offer the capability, and
    limits the result to this capability and those below it. It adds one statement.
    """
    source = table.join(services, services.c.id == table.c.service_id)
    sort_key = None if page is None else page.sort_key
    is_joined = host is not None or binary is not None or sort_key in _SERVICE_KEYS
    ids = sa.select(table.c.id).select_from(source if is_joined else table)
    if host is not None:
        ids = ids.where(services.c.host == host)
    if binary is not None:
        ids = ids.where(services.c.binary == binary)
    if function is not None:
        ids = ids.where(paging.id_in(table.c.id, ids_offering(connection, function)))
    query = sa.select(
        *(column for column in table.c if column.name != "service_id"),
        services.c.binary,
        services.c.host,
        services.c.last_seen_at,
        services.c.late_at,
        services.c.down_at,
        services.c.down_since,
    ).select_from(source)
    query = paging.paginate_ids(connection, query, ids, table, page, SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    offered = functions(connection, [_reference(row) for row in found], function)
    return [_row(row, offered.get(row.pop("id"), [])) for row in found]


@dataclass(frozen=True, slots=True)
class BackendReference:
    """A backend with its host, to find its devices."""

    id: int
    host: str
    name: str
    host_down: bool


def functions(
    connection: sa.Connection, backends: Collection[BackendReference], within: str | None = None
) -> dict[int, list[FunctionRow]]:
    """Return the capabilities of backends by backend id.

    ``within`` limits the result to a capability and those below it. Executes four statements, or
    none without backends: for the devices, the failed restores, the deployables and the handles.
    """
    if not backends:
        return {}
    found = _devices(connection, backends)
    failed = failed_restores.providers(connection)
    usages_by_backend: dict[int, dict[tuple[int, str], HandleUsage]] = {}
    for row in _deployables(connection, found):
        device = found[row["device_id"]]
        usages = usages_by_backend.setdefault(device.backend_id, {})
        key = row["device_id"], row["resource_class"]
        is_failed = row["rp_uuid"] in failed
        usages[key] = device.add_deployable(row, usages.get(key), restore_failed=is_failed)
    return {
        backend: [
            {"function": item.name, "total": item.total, "used": item.used, "free": item.free}
            for item in core_functions.summarize_functions(usages.values(), within)
        ]
        for backend, usages in usages_by_backend.items()
    }


def ids_offering(connection: sa.Connection, function: str) -> set[int]:
    """Return the ids of the backends that offer a capability, in one statement.

    Reads every device of the resource classes of the capability, because no column has
    capabilities.
    """
    query = (
        sa.select(table.c.id, deployables.c.resource_class, devices.c.vendor_board_info)
        .select_from(_WITH_DEVICES)
        .join(deployables, deployables.c.device_id == devices.c.id)
        .where(deployables.c.resource_class.in_(core_functions.resource_classes_of(function)))
    )
    return {
        id_
        for id_, resource_class, board in connection.execute(query)
        if core_functions.has_function(resource_class, capability.encoded_text(board), function)
    }


@dataclass(frozen=True, slots=True)
class _Device:
    """A device and the facts that decide whether its deployables are schedulable."""

    backend_id: int
    tree: str
    facts: device_state.DeviceFacts

    def add_deployable(
        self,
        deployable: Mapping[Any, Any],
        usage: HandleUsage | None,
        *,
        restore_failed: bool,
    ) -> HandleUsage:
        """Add the handles of a deployable to the usage of its resource class on this device.

        Return the new usage. ``usage`` is None for the first deployable of the resource class.
        """
        programming = deployable["job_id"] is not None
        draining = self.facts.draining or bool(deployable["draining"])
        facts = self.facts
        if programming or restore_failed or draining != facts.draining:
            facts = replace(
                facts, programming=programming, restore_failed=restore_failed, draining=draining
            )
        free = deployable["idle"] if device_state.evaluate(facts).schedulable else 0
        total, used = deployable["total"], deployable["used"]
        if usage is not None:
            total, used, free = usage.total + total, usage.used + used, usage.free + free
        return HandleUsage(deployable["resource_class"], total, used, free, self.tree)


# The tables are read one after another by the ids that the previous statement found. PostgreSQL
# would scan all handles to join them with the devices of a page.
def _devices(
    connection: sa.Connection, backends: Collection[BackendReference]
) -> dict[int, _Device]:
    by_name = {(backend.host, backend.name): backend for backend in backends}
    query = sa.select(
        *(devices.c[name] for name in ("id", "host", "backend", "vendor_board_info")),
        *(devices.c[name] for name in _DEVICE_COLUMNS),
    ).where(devices.c.host.in_({backend.host for backend in backends}))
    return {
        row["id"]: _Device(
            backend.id,
            capability.encoded_text(row["vendor_board_info"]),
            device_state.DeviceFacts(
                **{name: row[name] for name in _DEVICE_COLUMNS}, host_down=backend.host_down
            ),
        )
        for row in connection.execute(query).mappings()
        if (backend := by_name.get((row["host"], row["backend"])))
    }


def _deployables(
    connection: sa.Connection, devices: Collection[int]
) -> Iterable[Mapping[str, Any]]:
    query = sa.select(
        *(
            deployables.c[name]
            for name in ("id", "device_id", "resource_class", "draining", "job_id", "rp_uuid")
        )
    ).where(paging.id_in(deployables.c.device_id, devices))
    found = [dict(row) for row in connection.execute(query).mappings()]
    counts = _handles(connection, [row["id"] for row in found])
    return ({**row, **counts.get(row["id"], _NO_HANDLES)} for row in found)


def _handles(connection: sa.Connection, deployables: Collection[int]) -> dict[int, sa.RowMapping]:
    """Return the numbers of handles of deployables by row id, which is also in each row."""
    query = (
        sa.select(
            attach_handles.c.deployable_id.label("id"),
            sa.func.count().label("total"),
            sa.func.count(sa.case((_IN_USE, 1))).label("used"),
            sa.func.count(sa.case((_IDLE, 1))).label("idle"),
        )
        .where(paging.id_in(attach_handles.c.deployable_id, deployables))
        .group_by(attach_handles.c.deployable_id)
    )
    return {row["id"]: row for row in connection.execute(query).mappings()}


def _reference(row: Mapping[str, Any]) -> BackendReference:
    return BackendReference(row["id"], row["host"], row["name"], row["down_since"] is not None)


def _row(row: Mapping[str, Any], offered: list[FunctionRow]) -> AgentBackendRow:
    backend = {**row, "functions": offered}
    return cast(AgentBackendRow, {**backend, "backends": [backend]})
