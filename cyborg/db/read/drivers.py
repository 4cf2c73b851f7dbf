# SPDX-License-Identifier: Apache-2.0
"""Reading drivers: what is installed on the hosts, and the backends that use or shall use it.

Rows: name, uuid (by the name alone), version, type, support, abilities and hosts: a list of {host,
backend, status, error, version, last_seen_at, wish, applied} in the order of host and backend.
``backend`` is None where a driver is installed and nothing uses it. ``wish`` and ``applied`` are
None where the configuration file alone names a backend.

What a driver says of itself is the word of its newest version; ``version`` is None when hosts
differ. A driver that is neither installed nor used nor wanted anywhere has no row.
"""

from collections.abc import Collection, Iterable
from typing import Any

import sqlalchemy as sa

from cyborg.core.catalogue import Support
from cyborg.core.driver import common, driver_uuid, newest, version_of
from cyborg.core.wanted import Wish
from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import backends, services, wanted_backends
from cyborg.db.schema import drivers as table

SORTABLE = ("name", "uuid")
INSTALLED = "INSTALLED"  # nothing uses it
UNIMPORTABLE = "UNIMPORTABLE"  # nothing can use it
AWAITED = "AWAITED"  # its agent has not told of the backend yet

_PRESENT = wanted_backends.c.wish != Wish.ABSENT


def names(connection: sa.Connection) -> list[str]:
    """Return the names of all drivers in their order, in one statement."""
    return _names(connection, None, None)


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    host: str | None = None,
    type: str | None = None,
) -> list[Row]:
    """Return drivers, in four statements: one for the names and three for what the page shows.

    ``host`` leaves alone what is on that host. A driver's uuid is no column, so that the few names
    are all read and cut here.
    """
    every: list[Row] = [
        {"uuid": driver_uuid(name), "name": name} for name in _names(connection, host, type)
    ]
    chosen = [row["name"] for row in paging.pick(every, page, SORTABLE)]
    return _rows(connection, chosen, host) if chosen else []


def get(connection: sa.Connection, key: str) -> Row | None:
    """Return one driver by its name or its uuid, or None; a name comes before a uuid.

    The row has ``options`` besides: a list of {name, kind, default, help}.
    """
    known = names(connection)
    # A driver may be named as the uuid of another is written: its name counts.
    by_uuid = (name for name in known if driver_uuid(name) == key.lower())
    wanted = key if key in known else next(by_uuid, None)
    if wanted is None:
        return None
    (row,) = _rows(connection, [wanted], None)
    return {**row, "options": _options(connection, wanted)}


def _names(connection: sa.Connection, host: str | None, type_: str | None) -> list[str]:
    installed = sa.select(table.c.name, table.c.service_id)
    if type_ is not None:
        installed = installed.where(table.c.type == type_)
    used = sa.select(backends.c.driver, backends.c.service_id)
    wanted = sa.select(wanted_backends.c.driver, wanted_backends.c.service_id).where(_PRESENT)
    # What is not installed has told nobody its type.
    parts = (installed, used, wanted) if type_ is None else (installed,)
    found = sa.union_all(*parts).subquery()
    query = sa.select(found.c.name).distinct()
    if host is not None:
        query = query.join(services, services.c.id == found.c.service_id)
        query = query.where(services.c.host == host)
    return sorted(connection.scalars(query))


def _rows(connection: sa.Connection, drivers: Collection[str], host: str | None) -> list[Row]:
    told = {name: list[Row]() for name in drivers}
    places: dict[str, dict[tuple[str, str], dict[str, Any]]] = {name: {} for name in drivers}
    for row in _installed(connection, drivers, host):
        told[row["driver"]].append(row)
    for row in _used(connection, drivers, host):
        version = version_of(row["driver"], row["versions"])
        place = _place(row, row["backend"], row["status"], row["error"], version)
        places[row["driver"]][row["host"], row["backend"]] = place
    for row in _wanted(connection, drivers, host):
        held, key = places[row["driver"]], (row["host"], row["backend"])
        if key not in held and row["wish"] == Wish.ABSENT:
            continue
        place = held.setdefault(key, _place(row, row["backend"], AWAITED, None, None))
        place |= {"wish": row["wish"], "applied": bool(row["applied"])}
        place["error"] = place["error"] or row["error"]
    return [_row(name, told[name], places[name]) for name in drivers]


def _row(
    name: str, told: Collection[Row], places: dict[tuple[str, str], dict[str, Any]]
) -> dict[str, Any]:
    versions = {row["host"]: row["version"] for row in told}
    using = {host for host, _ in places}
    for (host, _), place in places.items():
        place["version"] = place["version"] or versions.get(host)
    for row in told:
        if row["host"] not in using:
            status = UNIMPORTABLE if row["error"] else INSTALLED
            place = _place(row, None, status, row["error"], row["version"])
            places[row["host"], ""] = place
    usable = [row for row in told if not row["error"]]
    best: Row = newest(usable) or {"type": None, "support": Support.UNKNOWN, "abilities": []}
    shown = [places[key] for key in sorted(places)]
    return {
        "uuid": driver_uuid(name),
        "name": name,
        **{fact: best[fact] for fact in ("type", "support", "abilities")},
        "version": common(p["version"] for p in shown if p["status"] != UNIMPORTABLE),
        "hosts": shown,
    }


def _place(
    row: Row, backend: str | None, status: str, error: str | None, version: str | None
) -> dict[str, Any]:
    return {
        "host": row["host"],
        "backend": backend,
        "status": status,
        "error": error,
        "version": version,
        "last_seen_at": row["last_seen_at"],
        "wish": None,
        "applied": None,
    }


def _installed(
    connection: sa.Connection, drivers: Collection[str], host: str | None
) -> Iterable[Row]:
    facts = ("version", "type", "support", "abilities", "error")
    columns = [table.c.name.label("driver"), *(table.c[fact] for fact in facts)]
    return _read(connection, table, table.c.name, columns, drivers, host)


def _used(connection: sa.Connection, drivers: Collection[str], host: str | None) -> Iterable[Row]:
    columns = [
        *(backends.c[fact] for fact in ("driver", "status", "error")),
        backends.c.name.label("backend"),
        services.c.versions,
    ]
    return _read(connection, backends, backends.c.driver, columns, drivers, host)


def _wanted(connection: sa.Connection, drivers: Collection[str], host: str | None) -> Iterable[Row]:
    its = wanted_backends.c
    columns = [its[fact] for fact in ("driver", "backend", "wish", "applied", "error")]
    return _read(connection, wanted_backends, its.driver, columns, drivers, host)


def _read(
    connection: sa.Connection,
    source: sa.Table,
    name: sa.ColumnElement[str],
    columns: Collection[sa.ColumnElement[Any]],
    drivers: Collection[str],
    host: str | None,
) -> Iterable[Row]:
    query = (
        sa.select(services.c.host, services.c.last_seen_at, *columns)
        .select_from(source)
        .join(services, services.c.id == source.c.service_id)
        .where(name.in_(drivers))
        .order_by(services.c.host)
    )
    if host is not None:
        query = query.where(services.c.host == host)
    return [dict(row) for row in connection.execute(query).mappings()]


def _options(connection: sa.Connection, driver: str) -> list[Row]:
    usable = (table.c.name == driver, table.c.error.is_(None))
    query = sa.select(table.c.id, table.c.version).where(*usable).order_by(table.c.id)
    best = newest([dict(row) for row in connection.execute(query).mappings()])
    if best is None:
        return []
    options = connection.scalar(sa.select(table.c.options).where(table.c.id == best["id"]))
    return list(options or [])
