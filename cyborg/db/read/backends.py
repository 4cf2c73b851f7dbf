# SPDX-License-Identifier: Apache-2.0
"""Reading the backends of all agents, each a row of its own.

Rows: uuid, status, binary, host, last_seen_at, down_since, created_at and backends: a list of this
one alone, as ``cyborg.db.read.services`` has it, so that both kinds of rows are shown alike. Its
``functions`` are those of ``cyborg.core.service``, each {function, total, used, free}, of the
devices that the database has of it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from cyborg.core import capability, life, service
from cyborg.core.service import Holding
from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import attach_handles, deployables, devices, services
from cyborg.db.schema import backends as table

SORTABLE = {
    "binary": services.c.binary,
    "host": services.c.host,
    "last_seen_at": services.c.last_seen_at,
    **{name: table.c[name] for name in ("uuid", "name", "driver", "status", "created_at")},
}
_HELD = sa.or_(attach_handles.c.request_id.is_not(None), attach_handles.c.prepared)
_IDLE = sa.not_(sa.or_(_HELD, attach_handles.c.draining))
_DEVICE = ("status", "health", "setup_required", "reboot_required", "withdrawn", "draining")


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    host: str | None = None,
    binary: str | None = None,
    function: str | None = None,
) -> list[Row]:
    """Return backends with their functions, in three statements; a marker adds one.

    ``function`` adds one, and leaves alone the backends that offer it, with it and what is below.
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
        query = query.where(among(table.c.id, offering(connection, function)))
    query = paging.cut(connection, query, table, page, SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    chosen = query.with_only_columns(table.c.id).subquery()
    held = functions(connection, table.c.id == chosen.c.id, chosen, function) if found else {}
    return [_row(row, held.get(row.pop("id"), [])) for row in found]


def functions(
    connection: sa.Connection,
    joined: sa.ColumnElement[bool],
    chosen: sa.FromClause,
    within: str | None = None,
) -> dict[int, list[Row]]:
    """Return the functions of backends by their ids, each {function, total, used, free}.

    Which backends is said by what the table is joined with, and on what. In two statements: one for
    the devices and one for what they hold.
    """
    way = _way(chosen.join(table, joined))
    cards = _cards(connection, way)
    holdings: dict[int, dict[tuple[int, str], Holding]] = {}
    for row in _parts(connection, way):
        if row["device_id"] in cards:  # it may have come between the two statements
            card = cards[row["device_id"]]
            of_backend = holdings.setdefault(card.backend_id, {})
            key = row["device_id"], row["resource_class"]
            of_backend[key] = card.hold(row, of_backend.get(key))
    return {
        backend: [
            {"function": one.name, "total": one.total, "used": one.used, "free": one.free}
            for one in service.functions(held.values(), within)
        ]
        for backend, held in holdings.items()
    }


def offering(connection: sa.Connection, function: str) -> set[int]:
    """Return the ids of the backends that offer a function, in one statement.

    It reads every device of the function's resource classes: a tree is no column.
    """
    query = (
        sa.select(table.c.id, deployables.c.resource_class, devices.c.vendor_board_info)
        .select_from(_way(table))
        .join(deployables, deployables.c.device_id == devices.c.id)
        .where(deployables.c.resource_class.in_(service.classes(function)))
    )
    return {
        id_
        for id_, resource_class, board in connection.execute(query)
        if service.offers(resource_class, capability.told(board), function)
    }


def among(column: sa.ColumnElement[int], ids: Collection[int]) -> sa.ColumnElement[bool]:
    """Return the condition that a column is one of so many ids that no statement could bind them.

    They are numbers of ours, so they are written into the statement.
    """
    kind = sa.BigInteger()
    return column.in_(
        sa.bindparam("ids", sorted(ids), kind, expanding=True, literal_execute=True, unique=True)
    )


@dataclass(frozen=True, slots=True)
class _Card:
    """A device, and what of it decides whether its parts are open."""

    backend_id: int
    tree: str
    facts: life.Facts

    def hold(self, part: Mapping[Any, Any], before: Holding | None) -> Holding:
        """Return what its parts of one resource class hold, with one more of them."""
        facts = replace(
            self.facts,
            programming=part["job_id"] is not None,
            draining=self.facts.draining or bool(part["draining"]),
        )
        free = part["idle"] if life.decide(facts).open else 0
        one = before or Holding(part["resource_class"], 0, 0, 0, self.tree)
        return replace(
            one,
            total=one.total + part["total"],
            used=one.used + part["used"],
            free=one.free + free,
        )


def _way(start: sa.FromClause) -> sa.FromClause:
    """Join backends, which ``start`` has, with their services and their devices."""
    here = sa.and_(devices.c.host == services.c.host, devices.c.backend == table.c.name)
    return start.join(services, services.c.id == table.c.service_id).join(devices, here)


def _cards(connection: sa.Connection, way: sa.FromClause) -> dict[int, _Card]:
    query = sa.select(
        devices.c.id,
        table.c.id.label("backend_id"),
        devices.c.vendor_board_info,
        services.c.down_since,
        *(devices.c[name] for name in _DEVICE),
    ).select_from(way)
    return {
        row["id"]: _Card(
            row["backend_id"],
            capability.told(row["vendor_board_info"]),
            life.Facts(
                **{name: row[name] for name in _DEVICE}, host_down=row["down_since"] is not None
            ),
        )
        for row in connection.execute(query).mappings()
    }


def _parts(connection: sa.Connection, way: sa.FromClause) -> Iterable[sa.RowMapping]:
    # Each is named in GROUP BY, for a server that is told to be strict may not know that they
    # follow from the key. The backend comes first: by the key SQLite would walk every deployable.
    part = [deployables.c[name] for name in ("device_id", "resource_class", "draining", "job_id")]
    query = (
        sa.select(
            *part,
            sa.func.count(attach_handles.c.id).label("total"),
            sa.func.count(sa.case((_HELD, 1))).label("used"),
            sa.func.count(sa.case((_IDLE, 1))).label("idle"),
        )
        .select_from(
            way.join(deployables, deployables.c.device_id == devices.c.id).outerjoin(
                attach_handles, attach_handles.c.deployable_id == deployables.c.id
            )
        )
        .group_by(table.c.id, deployables.c.id, *part)
    )
    return connection.execute(query).mappings()


def _row(row: Mapping[str, Any], offered: list[Row]) -> dict[str, Any]:
    whole = {**row, "functions": offered}
    return {**whole, "backends": [whole]}
