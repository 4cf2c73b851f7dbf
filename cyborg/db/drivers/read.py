# SPDX-License-Identifier: Apache-2.0
"""Read drivers: their properties, and the numbers of their hosts and entries.

The database counts the entries (``hosts``), of which a cloud has one or more for each host.

A driver's newest version supplies its type, support and abilities; ``version`` is None if the hosts
have different versions. A driver that no host has installed, uses or desires has no row.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, TypedDict

import sqlalchemy as sa

from cyborg.core.drivers import registry
from cyborg.db import paging
from cyborg.db.drivers import entries
from cyborg.db.paging import Page, Row
from cyborg.db.rows import equal
from cyborg.db.schema import backends, desired_backends, services
from cyborg.db.schema import drivers as table


class _SummaryRow(TypedDict):
    uuid: str
    name: str
    type: str | None
    support: str
    abilities: list[str]
    version: str | None
    num_hosts: int
    statuses: dict[str, int]


class DriverRow(_SummaryRow):
    """A driver with the number of its hosts and of its entries by status.

    ``statuses`` counts entries of hosts whose agent is down as UNKNOWN. ``hosts`` are the entries
    of one host, None for a driver on all hosts. The uuid is derived from the name of the driver.
    """

    hosts: list[entries.HostDriverRow] | None


class DriverDetailsRow(_SummaryRow):
    """A driver with its options; an option is {name, kind, default, help, ...}."""

    options: list[dict[str, Any]]


@dataclass(slots=True)
class _Counts:
    """The number of entries of a driver by status, and the versions of its hosts.

    ``unused`` is the number of hosts with the driver and without a backend of it.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    versions: set[str | None] = field(default_factory=set)
    unused: int = 0


# The hosts whose entries count; None is all hosts.
Hosts = Sequence[entries.HostRow] | None

SORTABLE = ("name", "uuid")


def names(connection: sa.Connection) -> list[str]:
    """Return the names of all drivers, sorted, in one statement."""
    return _names(connection, hosts=None, type_=None)


def find(
    connection: sa.Connection,
    *,
    now: datetime,
    page: Page | None = None,
    host: str | None = None,
    type: str | None = None,
) -> list[DriverRow]:
    """Return drivers, in five statements, or nine with ``host``.

    ``host`` selects the drivers and entries of this host. A driver's uuid is not a column, so this
    function reads all names, which are few, and paginates them in memory.
    """
    hosts = None if host is None else entries.hosts_named(connection, host)
    all_names = _names(connection, hosts, type)
    drivers = [{"uuid": registry.driver_uuid(name), "name": name} for name in all_names]
    chosen = [row["name"] for row in paging.paginate_rows(drivers, page, SORTABLE)]
    if not chosen:
        return []
    summaries = _summaries(connection, chosen, hosts, now)
    if hosts is None:
        return [{**summary, "hosts": None} for summary in summaries]
    by_driver = entries.entries_by_driver(connection, chosen, hosts)
    return [{**summary, "hosts": by_driver[summary["name"]]} for summary in summaries]


def get(
    connection: sa.Connection, key: str, host: str | None = None, *, now: datetime
) -> DriverDetailsRow | None:
    """Return one driver by its name or its uuid, or None; a name takes precedence over a uuid.

    ``host`` limits the numbers and the versions to this host.
    """
    all_names = names(connection)
    # A driver's name may look like the uuid of another driver: the name takes precedence.
    by_uuid = (name for name in all_names if registry.driver_uuid(name) == key.lower())
    driver = key if key in all_names else next(by_uuid, None)
    if driver is None:
        return None
    hosts = None if host is None else entries.hosts_named(connection, host)
    (summary,) = _summaries(connection, [driver], hosts, now)
    return {**summary, "options": _options(connection, driver)}


def _names(connection: sa.Connection, hosts: Hosts, type_: str | None) -> list[str]:
    installed = sa.select(table.c.name).where(*_on(table, hosts))
    installed = installed.where(*equal({table.c.type: type_}))
    used = sa.select(backends.c.driver).where(*_on(backends, hosts))
    desired = sa.select(desired_backends.c.driver).where(
        entries.PRESENT, *_on(desired_backends, hosts)
    )
    # Only an installed driver has a known type.
    sources = (installed, used, desired) if type_ is None else (installed,)
    # Distinct in each: the rows of all hosts are then not copied to a temporary table.
    return sorted(connection.scalars(sa.union(*(source.distinct() for source in sources))))


def _on(source: sa.Table, hosts: Hosts) -> list[sa.ColumnElement[bool]]:
    """Return the condition that rows are those of hosts, or nothing for all hosts."""
    if hosts is None:
        return []
    return [paging.id_in(source.c.service_id, [row["id"] for row in hosts])]


def _summaries(
    connection: sa.Connection, drivers: Collection[str], hosts: Hosts, now: datetime
) -> list[_SummaryRow]:
    """Return drivers without their entries, in four statements."""
    counts = _counts(connection, drivers, hosts, now)
    used = _num_used(connection, drivers, hosts)
    newest = _newest(connection, drivers, hosts)
    rows: list[_SummaryRow] = []
    for name in drivers:
        facts = newest.get(name)
        rows.append(
            {
                "uuid": registry.driver_uuid(name),
                "name": name,
                "type": facts["type"] if facts else None,
                "support": facts["support"] if facts else registry.Support.UNKNOWN,
                "abilities": facts["abilities"] if facts else [],
                "version": registry.common_version(counts[name].versions),
                "num_hosts": used.get(name, 0) + counts[name].unused,
                "statuses": dict(sorted(counts[name].statuses.items())),
            }
        )
    return rows


class _Source(NamedTuple):
    """A table with entries of drivers, and the expressions for the columns of an entry."""

    table: sa.Table
    driver: sa.ColumnElement[str]
    status: sa.ColumnElement[str]
    versions: sa.ColumnElement[Any] = sa.null()
    conditions: Sequence[sa.ColumnElement[bool]] = ()


_SOURCES = (
    # As text: PostgreSQL cannot compare JSON.
    _Source(
        backends,
        backends.c.driver,
        backends.c.status,
        versions=sa.cast(services.c.versions, sa.Text),
    ),
    _Source(
        desired_backends,
        desired_backends.c.driver,
        entries.MISSING_STATUS,
        conditions=[entries.MISSING],
    ),
    _Source(table, table.c.name, entries.UNUSED_STATUS, conditions=[entries.UNUSED]),
)


def _count_entries(
    source: _Source, drivers: Collection[str], hosts: Hosts, now: datetime
) -> sa.Select[Any]:
    """Return the query of the numbers of entries of a table.

    They are grouped by driver, status, whether the agent is down, and the two versions: those that
    the agent reported, and that of the installed driver.
    """
    rows = sa.join(source.table, services, services.c.id == source.table.c.service_id)
    is_unused = source.table is table
    # The table of installed drivers has the version; to the others it is joined.
    if not is_unused:
        same_host = table.c.service_id == source.table.c.service_id
        rows = rows.outerjoin(table, sa.and_(same_host, table.c.name == source.driver))
    return (
        sa.select(
            source.driver.label("driver"),
            source.status.label("entry_status"),
            sa.case((services.c.down_at <= now, 1), else_=0).label("down"),
            source.versions.label("reported"),
            table.c.version,
            sa.literal_column("1" if is_unused else "0").label("unused"),
            sa.func.count().label("entries"),
        )
        .select_from(rows)
        .where(source.driver.in_(drivers), *source.conditions, *_on(source.table, hosts))
        .group_by(source.driver, "entry_status", "down", "reported", table.c.version)
    )


def _counts(
    connection: sa.Connection, drivers: Collection[str], hosts: Hosts, now: datetime
) -> dict[str, _Counts]:
    """Return the numbers of entries by driver, in one statement."""
    # Each is grouped: the rows of all hosts are then not copied to a temporary table.
    queries = [_count_entries(source, drivers, hosts, now) for source in _SOURCES]
    counts_by_driver = {name: _Counts() for name in drivers}
    for row in connection.execute(sa.union_all(*queries)):
        counts = counts_by_driver[row.driver]
        counts.statuses[entries.UNKNOWN if row.down else row.entry_status] += row.entries
        counts.unused += row.entries if row.unused else 0
        # A driver that cannot be imported has no version that a host runs.
        if row.entry_status != entries.IMPORT_FAILED:
            reported_versions = json.loads(row.reported) if row.reported else None
            counts.versions.add(registry.version_of(row.driver, reported_versions) or row.version)
    return counts_by_driver


def _num_used(connection: sa.Connection, drivers: Collection[str], hosts: Hosts) -> dict[str, int]:
    """Return the number of hosts that use or should use each driver."""
    b, d = backends.c, desired_backends.c
    used = sa.union_all(
        sa.select(b.driver, b.service_id).where(b.driver.in_(drivers), *_on(backends, hosts)),
        sa.select(d.driver, d.service_id).where(
            d.driver.in_(drivers), entries.PRESENT, *_on(desired_backends, hosts)
        ),
    ).subquery("used")
    count = sa.func.count(used.c.service_id.distinct()).label("hosts")
    query = sa.select(used.c.driver, count).group_by(used.c.driver)
    return {row.driver: row.hosts for row in connection.execute(query)}


def _newest(connection: sa.Connection, drivers: Collection[str], hosts: Hosts) -> dict[str, Row]:
    """Return the facts of the newest version of each driver that a host can import."""
    # One row of each version first: hosts with one version have the same facts.
    query = sa.select(
        table.c.name.label("driver"), sa.func.min(table.c.id).label("id"), table.c.version
    ).where(table.c.name.in_(drivers), table.c.error.is_(None), *_on(table, hosts))
    query = query.group_by(table.c.name, table.c.version).order_by(sa.func.min(table.c.id))
    rows_by_driver = defaultdict[str, list[Row]](list)
    for row in connection.execute(query).mappings():
        rows_by_driver[row["driver"]].append({**row})
    newest = {name: registry.newest_row(rows) for name, rows in rows_by_driver.items()}
    ids = {name: row["id"] for name, row in newest.items() if row is not None}
    columns = (table.c[name] for name in ("id", "type", "support", "abilities"))
    facts = sa.select(*columns).where(paging.id_in(table.c.id, ids.values()))
    by_id: dict[int, Row] = {row["id"]: {**row} for row in connection.execute(facts).mappings()}
    # A report may have replaced the row since then.
    return {name: by_id[id_] for name, id_ in ids.items() if id_ in by_id}


def _options(connection: sa.Connection, driver: str) -> list[dict[str, Any]]:
    facts = _newest(connection, [driver], hosts=None).get(driver)
    if facts is None:
        return []
    options = connection.scalar(sa.select(table.c.options).where(table.c.id == facts["id"]))
    return list(options or [])
