# SPDX-License-Identifier: Apache-2.0
"""Read drivers: their installations on the hosts, and the backends that use or should use them.

A driver's newest version supplies its type, support and abilities; ``version`` is None if the hosts
have different versions. A driver that no host has installed, uses or desires has no row.
"""

from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any, TypedDict, TypeVar

import sqlalchemy as sa

from cyborg.core.drivers.desired_state import DesiredStatus
from cyborg.core.drivers.driver import common_version, driver_uuid, newest_row, version_of
from cyborg.core.drivers.registry import Support
from cyborg.db import paging
from cyborg.db.paging import Page
from cyborg.db.rows import fetch_all
from cyborg.db.schema import backends, desired_backends, services
from cyborg.db.schema import drivers as table

R = TypeVar("R")


class HostDriverRow(TypedDict):
    """A driver on one host.

    ``backend`` is None for an installed driver without a backend. ``desired_status`` and
    ``applied`` are None for a backend that only the configuration file names.
    """

    host: str
    backend: str | None
    status: str
    error: str | None
    remarks: list[str]
    version: str | None
    last_seen_at: datetime
    desired_status: str | None
    applied: bool | None


class DriverRow(TypedDict):
    """A driver with its rows per host, ordered by host and backend.

    The uuid is derived from the name of the driver.
    """

    uuid: str
    name: str
    type: str | None
    support: str
    abilities: list[str]
    version: str | None
    hosts: list[HostDriverRow]


class EffectiveOptionsRow(TypedDict):
    """The options that an agent reported for a backend; an option is {name, value, source}."""

    host: str
    backend: str
    options: list[dict[str, Any]]


class DriverDetailsRow(DriverRow):
    """A driver with its options; an option is {name, kind, default, help, ...}."""

    options: list[dict[str, Any]]
    effective_options: list[EffectiveOptionsRow]


class _HostRow(TypedDict):
    host: str
    last_seen_at: datetime


class _InstalledRow(_HostRow):
    driver: str
    version: str | None
    type: str | None
    support: str
    abilities: list[str]
    error: str | None


class _UsedRow(_HostRow):
    driver: str
    backend: str
    status: str
    error: str | None
    remarks: list[str] | None
    versions: dict[str, Any]


class _DesiredRow(_HostRow):
    driver: str
    backend: str
    applied: bool
    error: str | None
    desired_status: str


class _SettingsRow(_HostRow):
    backend: str
    settings: list[dict[str, Any]] | None


class _VersionRow(TypedDict):
    id: int
    version: str | None


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
) -> list[DriverRow]:
    """Return drivers, in four statements: one for the names and three for the page.

    ``host`` selects the drivers and backends of this host. A driver's uuid is not a column, so this
    function reads all names, which are few, and paginates them in memory.
    """
    drivers = [{"uuid": driver_uuid(name), "name": name} for name in _names(connection, host, type)]
    chosen = [row["name"] for row in paging.paginate_rows(drivers, page, SORTABLE)]
    return _rows(connection, chosen, host) if chosen else []


def get(connection: sa.Connection, key: str, host: str | None = None) -> DriverDetailsRow | None:
    """Return one driver by its name or its uuid, or None; a name takes precedence over a uuid.

    ``host`` limits the result to the drivers and backends of this host.
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


def _rows(connection: sa.Connection, drivers: Collection[str], host: str | None) -> list[DriverRow]:
    installations = {name: list[_InstalledRow]() for name in drivers}
    entries: dict[str, dict[tuple[str, str], HostDriverRow]] = {name: {} for name in drivers}
    for installed in _installed(connection, drivers, host):
        installations[installed["driver"]].append(installed)
    for row in _used(connection, drivers, host):
        version = version_of(row["driver"], row["versions"])
        entry = _entry(row, row["backend"], row["status"], row["error"], version)
        entry["remarks"] = list(row["remarks"] or ())
        entries[row["driver"]][row["host"], row["backend"]] = entry
    for desired in _desired(connection, drivers, host):
        by_backend, key = entries[desired["driver"]], (desired["host"], desired["backend"])
        if key not in by_backend and desired["desired_status"] == DesiredStatus.ABSENT:
            continue
        missing = _entry(desired, desired["backend"], NOT_REPORTED, None, None)
        entry = by_backend.setdefault(key, missing)
        entry["desired_status"] = desired["desired_status"]
        entry["applied"] = bool(desired["applied"])
        entry["error"] = entry["error"] or desired["error"]
    return [_row(name, installations[name], entries[name]) for name in drivers]


def _row(
    name: str,
    installations: Collection[_InstalledRow],
    entries: dict[tuple[str, str], HostDriverRow],
) -> DriverRow:
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
    best = newest_row(usable)
    hosts = [entries[key] for key in sorted(entries)]
    return {
        "uuid": driver_uuid(name),
        "name": name,
        "type": best["type"] if best else None,
        "support": best["support"] if best else Support.UNKNOWN,
        "abilities": best["abilities"] if best else [],
        "version": common_version(e["version"] for e in hosts if e["status"] != IMPORT_FAILED),
        "hosts": hosts,
    }


def _entry(
    row: _HostRow, backend: str | None, status: str, error: str | None, version: str | None
) -> HostDriverRow:
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
) -> list[_InstalledRow]:
    facts = ("version", "type", "support", "abilities", "error")
    columns = [table.c.name.label("driver"), *(table.c[fact] for fact in facts)]
    return _read(_InstalledRow, connection, table, table.c.name, columns, drivers, host)


def _used(connection: sa.Connection, drivers: Collection[str], host: str | None) -> list[_UsedRow]:
    columns = [
        *(backends.c[fact] for fact in ("driver", "status", "error", "remarks")),
        backends.c.name.label("backend"),
        services.c.versions,
    ]
    return _read(_UsedRow, connection, backends, backends.c.driver, columns, drivers, host)


def _desired(
    connection: sa.Connection, drivers: Collection[str], host: str | None
) -> list[_DesiredRow]:
    w = desired_backends.c
    columns = [
        *(w[fact] for fact in ("driver", "backend", "applied", "error")),
        w.status.label("desired_status"),
    ]
    return _read(_DesiredRow, connection, desired_backends, w.driver, columns, drivers, host)


def _read(
    kind: Callable[..., R],
    connection: sa.Connection,
    source: sa.Table,
    name: sa.ColumnElement[str],
    columns: Collection[sa.ColumnElement[Any]],
    drivers: Collection[str],
    host: str | None,
) -> list[R]:
    query = (
        sa.select(services.c.host, services.c.last_seen_at, *columns)
        .select_from(source)
        .join(services, services.c.id == source.c.service_id)
        .where(name.in_(drivers))
        .order_by(services.c.host)
    )
    if host is not None:
        query = query.where(services.c.host == host)
    return fetch_all(kind, connection.execute(query))


def _settings(
    connection: sa.Connection, driver: str, host: str | None
) -> list[EffectiveOptionsRow]:
    columns = [backends.c.name.label("backend"), backends.c.settings]
    rows = _read(_SettingsRow, connection, backends, backends.c.driver, columns, [driver], host)
    return [
        {"host": row["host"], "backend": row["backend"], "options": row["settings"]}
        for row in sorted(rows, key=lambda row: (row["host"], row["backend"]))
        if row["settings"] is not None
    ]


def _options(connection: sa.Connection, driver: str) -> list[dict[str, Any]]:
    usable = (table.c.name == driver, table.c.error.is_(None))
    query = sa.select(table.c.id, table.c.version).where(*usable).order_by(table.c.id)
    best = newest_row(fetch_all(_VersionRow, connection.execute(query)))
    if best is None:
        return []
    options = connection.scalar(sa.select(table.c.options).where(table.c.id == best["id"]))
    return list(options or [])
