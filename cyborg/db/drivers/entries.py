# SPDX-License-Identifier: Apache-2.0
"""Read the entries of drivers on hosts.

An entry of a driver is a backend that uses or should use it, or a host that has the driver
installed without such a backend. A cloud has one or more entries for each host: only those of one
host or of a page of hosts are read.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypedDict

import sqlalchemy as sa

from cyborg.core.drivers.desired_state import DesiredStatus
from cyborg.core.drivers.registry import version_of
from cyborg.db import joins, paging
from cyborg.db.paging import Page, Row
from cyborg.db.rows import fetch_all
from cyborg.db.schema import backends, desired_backends, services
from cyborg.db.schema import drivers as table


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
    late_at: datetime
    down_at: datetime
    desired_status: str | None
    applied: bool | None


class HostRow(TypedDict):
    """A host of a driver: the row id of its agent, and as ``uuid`` its name, for ``paging``."""

    id: int
    uuid: str


class EffectiveOptionsRow(TypedDict):
    """The options that an agent reported for a backend; an option is {name, value, source}."""

    host: str
    backend: str
    options: list[dict[str, Any]]


_HOST = [services.c[name] for name in ("host", "last_seen_at", "late_at", "down_at")]
HOST_SORTABLE = {"host": services.c.host}
INSTALLED = "INSTALLED"  # no backend uses it
IMPORT_FAILED = "IMPORT_FAILED"  # its import failed
NOT_REPORTED = "NOT_REPORTED"  # its agent has not reported the backend yet
UNKNOWN = "UNKNOWN"  # its agent is down

PRESENT = desired_backends.c.status != DesiredStatus.ABSENT
_USED, _DESIRED = backends.c, desired_backends.c
# The columns of the entries of each table; all have those of the host as well.
_INSTALLED = [table.c.name.label("driver"), table.c.version, table.c.error]
_REPORTED = [
    *(_USED[name] for name in ("driver", "status", "error", "remarks")),
    _USED.name.label("backend"),
    services.c.versions,
]
_STATE = [
    *(_DESIRED[name] for name in ("driver", "backend", "applied", "error")),
    _DESIRED.status.label("desired_status"),
]
# The rules of ``entries_by_driver`` in SQL: a desired backend that is not reported, and a driver
# that is installed without a backend on its host.
MISSING = sa.and_(
    PRESENT,
    ~sa.exists().where(
        _USED.service_id == _DESIRED.service_id,
        _USED.name == _DESIRED.backend,
        _USED.driver == _DESIRED.driver,
    ),
)
UNUSED = sa.and_(
    ~sa.exists().where(_USED.service_id == table.c.service_id, _USED.driver == table.c.name),
    ~sa.exists().where(
        _DESIRED.service_id == table.c.service_id, _DESIRED.driver == table.c.name, PRESENT
    ),
)
# Literals: a database cannot know the type of a parameter here.
MISSING_STATUS = sa.literal_column(f"'{NOT_REPORTED}'", sa.String)
UNUSED_STATUS = sa.case(
    (table.c.error.is_(None), sa.literal_column(f"'{INSTALLED}'", sa.String)),
    else_=sa.literal_column(f"'{IMPORT_FAILED}'", sa.String),
)


def find_hosts(
    connection: sa.Connection,
    driver: str,
    *,
    now: datetime,
    page: Page | None = None,
    host: str | None = None,
    status: str | None = None,
) -> list[HostRow]:
    """Return the hosts that have entries of a driver, ordered by name, in one or two statements.

    ``host`` selects one host, with the second statement. ``status`` selects hosts with an entry of
    this status. The marker is any text, as of ``paging.start_after_name``.
    """
    page = page or Page()
    # ``paging`` knows a row by its column ``uuid``: here the name of the host.
    query: sa.Select[Any] = sa.select(services.c.id, services.c.host.label("uuid"))
    if host is not None:
        query = query.where(services.c.id.in_([row["id"] for row in hosts_named(connection, host)]))
    # UNKNOWN is stored nowhere: all entries of a host whose agent is down have this status.
    if status is not None:
        is_down = services.c.down_at <= now
        query = query.where(is_down if status == UNKNOWN else ~is_down)
    query = query.where(_has_entry(driver, None if status == UNKNOWN else status))
    query, page = paging.start_after_name(query, services.c.host, page)
    query = paging.paginate(
        connection, query, services, page, HOST_SORTABLE, identity=services.c.host
    )
    return fetch_all(HostRow, connection.execute(query))


def find_entries(
    connection: sa.Connection,
    driver: str,
    hosts: Sequence[HostRow],
    *,
    now: datetime,
    status: str | None = None,
) -> list[HostDriverRow]:
    """Return the entries of a driver on a page of hosts, in three statements.

    They are in the order of ``hosts``, and on each host ordered by backend. ``status`` selects
    entries.
    """
    if not hosts:
        return []
    entries = entries_by_driver(connection, [driver], hosts)[driver]
    return [entry for entry in entries if status is None or _status(entry, now) == status]


def find_effective_options(
    connection: sa.Connection, driver: str, hosts: Sequence[HostRow]
) -> list[EffectiveOptionsRow]:
    """Return the options of the backends of a driver on a page of hosts, in their order."""
    if not hosts:
        return []
    columns = [_USED.name.label("backend"), _USED.settings]
    rows = _read(connection, _USED.driver, columns, [driver], hosts)
    return [
        {"host": row["host"], "backend": row["backend"], "options": row["settings"]}
        for row in paging.sort_by_page(rows, hosts, lambda row: (row["host"], row["backend"]))
        if row["settings"] is not None
    ]


def hosts_named(connection: sa.Connection, host: str) -> list[HostRow]:
    """Return the host of this name, or nothing if it has no agent."""
    query = sa.select(services.c.id, services.c.host.label("uuid"))
    return fetch_all(HostRow, connection.execute(query.where(joins.agent_of(host))))


def entries_by_driver(
    connection: sa.Connection, drivers: Collection[str], hosts: Sequence[HostRow]
) -> dict[str, list[HostDriverRow]]:
    """Return the entries of each driver on hosts, in their order, in three statements."""
    installations = {name: list[Row]() for name in drivers}
    entries: dict[str, _Entries] = {name: {} for name in drivers}
    for row in _read(connection, table.c.name, _INSTALLED, drivers, hosts):
        installations[row["driver"]].append(row)
    for row in _read(connection, _USED.driver, _REPORTED, drivers, hosts):
        _add_reported(entries[row["driver"]], row)
    # After the reported ones, which it completes.
    for row in _read(connection, _DESIRED.driver, _STATE, drivers, hosts):
        _add_desired(entries[row["driver"]], row)
    return {name: _merge(installations[name], entries[name], hosts) for name in drivers}


class _Key(NamedTuple):
    host: str
    backend: str  # empty for an entry without a backend


_Entries = dict[_Key, HostDriverRow]


def _add_reported(entries: _Entries, row: Row) -> None:
    """Add the entry of a backend that an agent has reported."""
    version = version_of(row["driver"], row["versions"])
    entry = _entry(
        row, backend=row["backend"], status=row["status"], error=row["error"], version=version
    )
    entry["remarks"] = list(row["remarks"] or ())
    entries[_Key(row["host"], row["backend"])] = entry


def _add_desired(entries: _Entries, row: Row) -> None:
    """Add the desired state of a backend to its entry; without one, add the entry."""
    key = _Key(row["host"], row["backend"])
    if key not in entries:
        # The backend was removed, and its agent does not report it any more: no entry is left.
        if row["desired_status"] == DesiredStatus.ABSENT:
            return
        entries[key] = _entry(
            row, backend=row["backend"], status=NOT_REPORTED, error=None, version=None
        )
    entry = entries[key]
    entry["desired_status"] = row["desired_status"]
    entry["applied"] = bool(row["applied"])
    entry["error"] = entry["error"] or row["error"]


def _has_entry(driver: str, status: str | None) -> sa.ColumnElement[bool]:
    """Return the condition that a service has an entry of a driver with a status, None is any."""
    used = sa.select(_USED.service_id, _USED.status).where(_USED.driver == driver)
    missing = sa.select(_DESIRED.service_id, MISSING_STATUS).where(
        _DESIRED.driver == driver, MISSING
    )
    unused = sa.select(table.c.service_id, UNUSED_STATUS).where(table.c.name == driver, UNUSED)
    entries = sa.union_all(used, missing, unused).subquery("entries")
    matching = sa.select(entries.c.service_id)
    if status is not None:
        matching = matching.where(entries.c.status == status)
    return services.c.id.in_(matching)


def _status(entry: HostDriverRow, now: datetime) -> str:
    return UNKNOWN if entry["down_at"] <= now else entry["status"]


def _merge(
    installations: Collection[Row], entries: _Entries, hosts: Sequence[HostRow]
) -> list[HostDriverRow]:
    """Return the entries of a driver, with those of hosts that have no backend of it.

    They are in the order of ``hosts``.
    """
    versions = {row["host"]: row["version"] for row in installations}
    hosts_with_backends = {key.host for key in entries}
    # The version that the agent runs, else that of the installed driver.
    for key, entry in entries.items():
        entry["version"] = entry["version"] or versions.get(key.host)
    for row in installations:
        # A driver that is installed and used has only the entries of its backends.
        if row["host"] not in hosts_with_backends:
            status = INSTALLED if row["error"] is None else IMPORT_FAILED
            entry = _entry(
                row, backend=None, status=status, error=row["error"], version=row["version"]
            )
            entries[_Key(row["host"], "")] = entry
    return paging.sort_by_page(
        list(entries.values()), hosts, lambda entry: (entry["host"], entry["backend"] or "")
    )


def _entry(
    row: Row, *, backend: str | None, status: str, error: str | None, version: str | None
) -> HostDriverRow:
    return {
        "host": row["host"],
        "backend": backend,
        "status": status,
        "error": error,
        "remarks": [],
        "version": version,
        "last_seen_at": row["last_seen_at"],
        "late_at": row["late_at"],
        "down_at": row["down_at"],
        "desired_status": None,
        "applied": None,
    }


def _read(
    connection: sa.Connection,
    driver: sa.Column[str],
    columns: Sequence[sa.ColumnElement[Any]],
    drivers: Collection[str],
    hosts: Sequence[HostRow],
) -> list[Row]:
    """Return ``columns`` of the rows of drivers on hosts.

    ``driver`` is the column of their table that has the name of the driver.
    """
    service = driver.table.c.service_id
    query = (
        sa.select(*_HOST, *columns)
        .select_from(driver.table)
        .join(services, services.c.id == service)
        .where(driver.in_(drivers), paging.id_in(service, [row["id"] for row in hosts]))
    )
    return [dict(row) for row in connection.execute(query).mappings()]
