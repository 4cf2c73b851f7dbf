# SPDX-License-Identifier: Apache-2.0
"""Read the backends of all agents, one row for each backend."""

import functools
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

import sqlalchemy as sa

from cyborg.core.inventory import capability
from cyborg.core.inventory import functions as core_functions
from cyborg.core.inventory.functions import HandleUsage
from cyborg.db.binding.accelerators import BLOCKED, DEVICE_DRAINING
from cyborg.db.listing import Listing, columns_of
from cyborg.db.paging import Page
from cyborg.db.schema import attach_handles, backend_functions, deployables, devices, services
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
    functions: NotRequired[list[FunctionRow]]


class AgentBackendRow(BackendRow):
    """A backend with the state of its agent.

    ``backends`` has only this backend, so that the row looks like one of
    ``cyborg.db.services.read``.
    """

    created_at: datetime
    binary: str
    host: str
    last_seen_at: datetime
    late_at: datetime
    down_at: datetime
    down_since: datetime | None
    backends: list[BackendRow]


# The row id, and the columns of BackendRow: a page of agents has thousands of these rows.
COLUMNS = tuple(table.c[name] for name in ("id", "uuid", "name", "driver", "status", "error"))
_SERVICE_KEYS = ("binary", "host", "last_seen_at")
SORTABLE = {
    **columns_of(services, *_SERVICE_KEYS),
    **columns_of(table, "uuid", "name", "driver", "status", "created_at"),
}
_IN_USE = sa.or_(attach_handles.c.arq_id.is_not(None), attach_handles.c.needs_cleaning)
_IDLE = sa.not_(sa.or_(_IN_USE, attach_handles.c.draining))
_TOTAL, _USED = 1 << 40, 1 << 20  # the units of ``_count_handles``


class _Usage(NamedTuple):
    """The arguments of a HandleUsage, with the board info as text instead of the tree."""

    resource_class: str
    total: int
    used: int
    free: int
    board: str


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

    ``within`` limits the result to a capability and those below it. Executes one statement, or none
    without backends.
    """
    if not backends:
        return {}
    by_name = {(backend.host, backend.name): backend for backend in backends}
    # By backend id, then by the id of the device and the resource class.
    usages = defaultdict[int, dict[tuple[int, str], _Usage]](dict)
    for row in _read_usages(connection, backends):
        # On PostgreSQL the rows of other pairs of a host and a backend are read, too.
        if (backend := by_name.get((row.host, row.backend))) is None:
            continue
        # The sums of ``_count_handles``, NULL for a deployable without handles.
        total, rest = divmod(row.packed_counts or 0, _TOTAL)
        used, free = divmod(rest, _USED)
        # No handle of a host that is down can be claimed.
        if backend.host_down:
            free = 0
        key = row.device, row.resource_class
        # A device may have several deployables of a class.
        if (before := usages[backend.id].get(key)) is not None:
            total, used, free = before.total + total, before.used + used, before.free + free
        usages[backend.id][key] = _Usage(
            row.resource_class, total=total, used=used, free=free, board=row.board
        )
    return {
        id_: [
            {"function": item.name, "total": item.total, "used": item.used, "free": item.free}
            for item in _summarize(tuple(of_backend.values()), within)
        ]
        for id_, of_backend in usages.items()
    }


def offer(function: str) -> sa.ColumnElement[bool]:
    """Return the condition that a backend offers a capability."""
    ids = sa.select(backend_functions.c.backend_id).where(backend_functions.c.function == function)
    return table.c.id.in_(ids)


BACKENDS = Listing(
    row=AgentBackendRow,
    table=table,
    source=table.join(services, services.c.id == table.c.service_id),
    columns=[
        *COLUMNS,
        table.c.created_at,
        *(services.c[name] for name in ("binary", "host", "last_seen_at", "late_at", "down_at")),
        services.c.down_since,
    ],
    sortable=SORTABLE,
    filters={"host": services.c.host, "binary": services.c.binary, "function": offer},
    ids_first=True,
    joined=frozenset(_SERVICE_KEYS),
)


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    function: str | None = None,
    **criteria: Any,
) -> list[AgentBackendRow]:
    """Return backends with their capabilities; execute two statements, or three with a marker.

    ``function`` is the name of a capability. It selects the backends that offer the capability, and
    limits the result to this capability and those below it.
    """
    rows = BACKENDS.read_columns(connection, page=page, function=function, **criteria)
    offered = functions(connection, [_reference(row) for row in rows], function)
    return [_row(row, offered.get(row.pop("id"), [])) for row in rows]


# One row for each deployable and few columns: the conditions are evaluated and the handles counted
# in the database, because a page of agents has thousands of deployables with all their handles. The
# numbers of handles are one number for the same reason. They are a subquery for each deployable,
# which an index answers: PostgreSQL would scan all handles to join them with the devices of a page.
def _read_usages(
    connection: sa.Connection, backends: Collection[BackendReference]
) -> sa.CursorResult[Any]:
    """Return the resource class and the numbers of handles of each deployable, with its device."""
    hosts = {backend.host for backend in backends}
    names = {backend.name for backend in backends}
    blocked = sa.or_(BLOCKED, DEVICE_DRAINING)
    query = (
        sa.select(
            devices.c.host,
            devices.c.backend,
            devices.c.id.label("device"),
            deployables.c.resource_class,
            sa.cast(devices.c.vendor_board_info, sa.Text).label("board"),
            sa.case((blocked, _count_handles(idle=0)), else_=_count_handles(idle=1)).label(
                "packed_counts"
            ),
        )
        .join(deployables, deployables.c.device_id == devices.c.id)
        .where(devices.c.host.in_(hosts), devices.c.backend.in_(names))
    )
    # Of no use if each host has a backend of each name. PostgreSQL would compare each device with
    # one pair after another.
    has_all_pairs = len(backends) == len(hosts) * len(names)
    if not has_all_pairs and connection.dialect.name != "postgresql":
        pairs = sorted((backend.host, backend.name) for backend in backends)
        query = query.where(sa.tuple_(devices.c.host, devices.c.backend).in_(pairs))
    return connection.execute(query)


def _count_handles(*, idle: int) -> sa.ColumnElement[int]:
    """Return the numbers of handles of a deployable as one number, None without handles.

    All are counted in units of _TOTAL, those in use in units of _USED, idle ones as ``idle``.
    """
    value = sa.case((_IN_USE, _TOTAL + _USED), (_IDLE, _TOTAL + idle), else_=_TOTAL)
    query = sa.select(sa.cast(sa.func.sum(value), sa.BigInteger))
    return query.where(attach_handles.c.deployable_id == deployables.c.id).scalar_subquery()


# Cached: a cloud has many equal devices.
@functools.lru_cache(maxsize=1024)
def _summarize(usages: tuple[_Usage, ...], within: str | None) -> Sequence[core_functions.Function]:
    return core_functions.summarize_functions(
        [
            HandleUsage(resource_class, total, used, free, _encoded_tree(board))
            for resource_class, total, used, free, board in usages
        ],
        within,
    )


@functools.lru_cache(maxsize=1024)
def _encoded_tree(board: str) -> str:
    """Return the text of the capability tree in the JSON text of a board info."""
    return capability.encoded_text(json.loads(board))


def _reference(row: Mapping[str, Any]) -> BackendReference:
    return BackendReference(row["id"], row["host"], row["name"], row["down_since"] is not None)


def _row(row: Mapping[str, Any], offered: list[FunctionRow]) -> AgentBackendRow:
    backend = {**row, "functions": offered}
    return cast(AgentBackendRow, {**backend, "backends": [backend]})
