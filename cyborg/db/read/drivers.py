# SPDX-License-Identifier: Apache-2.0
"""Read drivers: their installations on the hosts, and the backends that use or should use them.

Rows: name, uuid (derived from the name), version, type, support, abilities and hosts: a list of
{host, backend, status, error, remarks, version, last_seen_at, desired_status, applied} ordered by
host and backend. ``backend`` is None for an installed driver without a backend. ``desired_status``
and ``applied`` are None for a backend that only the configuration file names.

A driver's newest version supplies its type, support and abilities; ``version`` is None if the hosts
have different versions. A driver that no host has installed, uses or desires has no row.
"""

from collections.abc import Collection, Iterable
from typing import Any

import sqlalchemy as sa

from cyborg.core.drivers.desired_state import DesiredStatus
from cyborg.core.drivers.driver import common_version, driver_uuid, newest_row, version_of
from cyborg.core.drivers.registry import Support
from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import backends, desired_backends, services
from cyborg.db.schema import drivers as table

SORTABLE = ("name", "uuid")
INSTALLED = "INSTALLED"  # no backend uses it
IMPORT_FAILED = "IMPORT_FAILED"  # its import failed
NOT_REPORTED = "NOT_REPORTED"  # its agent has not reported the backend yet

_PRESENT = desired_backends.c.status != DesiredStatus.ABSENT


def names(connection: sa.Connection) -> list[str]:
    """Return the names of all drivers, sorted, in one statement."""
    return _names(connection, None, None)


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    host: str | None = None,
    type: str | None = None,
) -> list[Row]:
    """Return drivers, in four statements: one for the names and three for the page.

    ``host`` selects what is on this host. A driver's uuid is no column, so this function reads all
    names, which are few, and paginates them in memory.
    """
    drivers: list[Row] = [
        {"uuid": driver_uuid(name), "name": name} for name in _names(connection, host, type)
    ]
    chosen = [row["name"] for row in paging.paginate_rows(drivers, page, SORTABLE)]
    return _rows(connection, chosen, host) if chosen else []


def get(connection: sa.Connection, key: str, host: str | None = None) -> Row | None:
    """Return one driver by its name or its uuid, or None; a name takes precedence over a uuid.

    The row also has ``options``: a list of {name, kind, default, help, ...}; and
    ``effective_options``: the options that agents reported for its backends, a list of {host,
    backend, options}, each option {name, value, source}. ``host`` selects what is on this host.
    """
    all_names = names(connection)
    # A driver's name may look like the uuid of another driver: the name takes precedence.
    by_uuid = (name for name in all_names if driver_uuid(name) == key.lower())
    driver = key if key in all_names else next(by_uuid, None)
    if driver is None:
        return None
    (row,) = _rows(connection, [driver], host)
    effective = _settings(connection, driver, host)
    return {**row, "options": _options(connection, driver), "effective_options": effective}


def _names(connection: sa.Connection, host: str | None, type_: str | None) -> list[str]:
    installed = sa.select(table.c.name, table.c.service_id)
    if type_ is not None:
        installed = installed.where(table.c.type == type_)
    used = sa.select(backends.c.driver, backends.c.service_id)
    desired = sa.select(desired_backends.c.driver, desired_backends.c.service_id).where(_PRESENT)
    # Only an installed driver has a known type.
    sources = (installed, used, desired) if type_ is None else (installed,)
    found = sa.union_all(*sources).subquery()
    query = sa.select(found.c.name).distinct()
    if host is not None:
        query = query.join(services, services.c.id == found.c.service_id)
        query = query.where(services.c.host == host)
    return sorted(connection.scalars(query))


def _rows(connection: sa.Connection, drivers: Collection[str], host: str | None) -> list[Row]:
    installations = {name: list[Row]() for name in drivers}
    entries: dict[str, dict[tuple[str, str], dict[str, Any]]] = {name: {} for name in drivers}
    for row in _installed(connection, drivers, host):
        installations[row["driver"]].append(row)
    for row in _used(connection, drivers, host):
        version = version_of(row["driver"], row["versions"])
        entry = _entry(row, row["backend"], row["status"], row["error"], version)
        entry["remarks"] = list(row["remarks"] or ())
        entries[row["driver"]][row["host"], row["backend"]] = entry
    for row in _desired(connection, drivers, host):
        by_backend, key = entries[row["driver"]], (row["host"], row["backend"])
        if key not in by_backend and row["desired_status"] == DesiredStatus.ABSENT:
            continue
        entry = by_backend.setdefault(key, _entry(row, row["backend"], NOT_REPORTED, None, None))
        entry |= {"desired_status": row["desired_status"], "applied": bool(row["applied"])}
        entry["error"] = entry["error"] or row["error"]
    return [_row(name, installations[name], entries[name]) for name in drivers]


def _row(
    name: str, installations: Collection[Row], entries: dict[tuple[str, str], dict[str, Any]]
) -> dict[str, Any]:
    versions = {row["host"]: row["version"] for row in installations}
    hosts_with_backends = {host for host, _ in entries}
    for (host, _), entry in entries.items():
        entry["version"] = entry["version"] or versions.get(host)
    for row in installations:
        if row["host"] not in hosts_with_backends:
            status = IMPORT_FAILED if row["error"] else INSTALLED
            entry = _entry(row, None, status, row["error"], row["version"])
            entries[row["host"], ""] = entry
    usable = [row for row in installations if not row["error"]]
    best: Row = newest_row(usable) or {"type": None, "support": Support.UNKNOWN, "abilities": []}
    hosts = [entries[key] for key in sorted(entries)]
    return {
        "uuid": driver_uuid(name),
        "name": name,
        **{fact: best[fact] for fact in ("type", "support", "abilities")},
        "version": common_version(e["version"] for e in hosts if e["status"] != IMPORT_FAILED),
        "hosts": hosts,
    }


def _entry(
    row: Row, backend: str | None, status: str, error: str | None, version: str | None
) -> dict[str, Any]:
    return {
        "host": row["host"],
        "backend": backend,
        "status": status,
        "error": error,
        "remarks": [],
        "version": version,
        "last_seen_at": row["last_seen_at"],
        "desired_status": None,
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
        *(backends.c[fact] for fact in ("driver", "status", "error", "remarks")),
        backends.c.name.label("backend"),
        services.c.versions,
    ]
    return _read(connection, backends, backends.c.driver, columns, drivers, host)


def _desired(
    connection: sa.Connection, drivers: Collection[str], host: str | None
) -> Iterable[Row]:
    w = desired_backends.c
    columns = [
        *(w[fact] for fact in ("driver", "backend", "applied", "error")),
        w.status.label("desired_status"),
    ]
    return _read(connection, desired_backends, w.driver, columns, drivers, host)


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


def _settings(connection: sa.Connection, driver: str, host: str | None) -> list[Row]:
    columns = [backends.c.name.label("backend"), backends.c.settings]
    rows = _read(connection, backends, backends.c.driver, columns, [driver], host)
    return [
        {"host": row["host"], "backend": row["backend"], "options": row["settings"]}
        for row in sorted(rows, key=lambda row: (row["host"], row["backend"]))
        if row["settings"] is not None
    ]


def _options(connection: sa.Connection, driver: str) -> list[Row]:
    usable = (table.c.name == driver, table.c.error.is_(None))
    query = sa.select(table.c.id, table.c.version).where(*usable).order_by(table.c.id)
    best = newest_row([dict(row) for row in connection.execute(query).mappings()])
    if best is None:
        return []
    options = connection.scalar(sa.select(table.c.options).where(table.c.id == best["id"]))
    return list(options or [])
