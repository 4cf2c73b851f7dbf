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
    down_since: datetime | None
    backends: list[BackendRow]


SORTABLE = {
    "binary": services.c.binary,
    "host": services.c.host,
    "last_seen_at": services.c.last_seen_at,
    **{name: table.c[name] for name in ("uuid", "name", "driver", "status", "created_at")},
}
_IN_USE = sa.or_(attach_handles.c.arq_id.is_not(None), attach_handles.c.needs_cleaning)
_IDLE = sa.not_(sa.or_(_IN_USE, attach_handles.c.draining))
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
    """Return backends with their capabilities; execute four statements, or five with a marker.

    ``function`` is the name of a capability. It selects the backends that offer the capability, and
    limits the result to this capability and those below it. It adds one statement.
    """
    query = (
        sa.select(
            *(column for column in table.c if column.name != "service_id"),
            services.c.binary,
            services.c.host,
            services.c.last_seen_at,
            services.c.down_since,
        )
        .select_from(table)
        .join(services, services.c.id == table.c.service_id)
    )
    if host is not None:
        query = query.where(services.c.host == host)
    if binary is not None:
        query = query.where(services.c.binary == binary)
    if function is not None:
        query = query.where(id_in(table.c.id, ids_offering(connection, function)))
    query = paging.paginate(connection, query, table, page, SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    chosen = query.with_only_columns(table.c.id).subquery()
    offered = functions(connection, table.c.id == chosen.c.id, chosen, function) if found else {}
    return [_row(row, offered.get(row.pop("id"), [])) for row in found]


def functions(
    connection: sa.Connection,
    joined: sa.ColumnElement[bool],
    chosen: sa.FromClause,
    within: str | None = None,
) -> dict[int, list[FunctionRow]]:
    """Return the capabilities of backends by backend id.

    The backends are selected by a join of the table with ``chosen``; ``joined`` is the condition of
    the join. ``within`` limits the result to a capability and those below it. Executes three
    statements: for the devices, the failed restores and the deployables.
    """
    source = _join_devices(chosen.join(table, joined))
    found = _devices(connection, source)
    failed = failed_restores.providers(connection)
    usages_by_backend: dict[int, dict[tuple[int, str], HandleUsage]] = {}
    for row in _deployables(connection, source):
        if row["device_id"] in found:  # a device may be added between the two statements
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
        .select_from(_join_devices(table))
        .join(deployables, deployables.c.device_id == devices.c.id)
        .where(deployables.c.resource_class.in_(core_functions.resource_classes_of(function)))
    )
    return {
        id_
        for id_, resource_class, board in connection.execute(query)
        if core_functions.has_function(resource_class, capability.encoded_text(board), function)
    }


def id_in(column: sa.ColumnElement[int], ids: Collection[int]) -> sa.ColumnElement[bool]:
    """Return the condition that the value of a column is in ``ids``.

    The ids are written into the statement, because they may be too many for bound parameters. This
    is safe, because they are integers from this database.
    """
    kind = sa.BigInteger()
    return column.in_(
        sa.bindparam("ids", sorted(ids), kind, expanding=True, literal_execute=True, unique=True)
    )


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
        facts = replace(
            self.facts,
            programming=deployable["job_id"] is not None,
            restore_failed=restore_failed,
            draining=self.facts.draining or bool(deployable["draining"]),
        )
        free = deployable["idle"] if device_state.evaluate(facts).schedulable else 0
        usage = usage or HandleUsage(deployable["resource_class"], 0, 0, 0, self.tree)
        return replace(
            usage,
            total=usage.total + deployable["total"],
            used=usage.used + deployable["used"],
            free=usage.free + free,
        )


def _join_devices(start: sa.FromClause) -> sa.FromClause:
    """Join the backends in ``start`` with their services and their devices."""
    same_backend = sa.and_(devices.c.host == services.c.host, devices.c.backend == table.c.name)
    return start.join(services, services.c.id == table.c.service_id).join(devices, same_backend)


def _devices(connection: sa.Connection, source: sa.FromClause) -> dict[int, _Device]:
    query = sa.select(
        devices.c.id,
        table.c.id.label("backend_id"),
        devices.c.vendor_board_info,
        services.c.down_since,
        *(devices.c[name] for name in _DEVICE_COLUMNS),
    ).select_from(source)
    return {
        row["id"]: _Device(
            row["backend_id"],
            capability.encoded_text(row["vendor_board_info"]),
            device_state.DeviceFacts(
                **{name: row[name] for name in _DEVICE_COLUMNS},
                host_down=row["down_since"] is not None,
            ),
        )
        for row in connection.execute(query).mappings()
    }


def _deployables(connection: sa.Connection, source: sa.FromClause) -> Iterable[sa.RowMapping]:
    # GROUP BY names each column, because a server in strict mode may not detect that they depend on
    # the key. The backend comes first: with the key first SQLite would scan every deployable.
    columns = [
        deployables.c[name]
        for name in ("device_id", "resource_class", "draining", "job_id", "rp_uuid")
    ]
    query = (
        sa.select(
            *columns,
            sa.func.count(attach_handles.c.id).label("total"),
            sa.func.count(sa.case((_IN_USE, 1))).label("used"),
            sa.func.count(sa.case((_IDLE, 1))).label("idle"),
        )
        .select_from(
            source.join(deployables, deployables.c.device_id == devices.c.id).outerjoin(
                attach_handles, attach_handles.c.deployable_id == deployables.c.id
            )
        )
        .group_by(table.c.id, deployables.c.id, *columns)
    )
    return connection.execute(query).mappings()


def _row(row: Mapping[str, Any], offered: list[FunctionRow]) -> AgentBackendRow:
    backend = {**row, "functions": offered}
    return cast(AgentBackendRow, {**backend, "backends": [backend]})
