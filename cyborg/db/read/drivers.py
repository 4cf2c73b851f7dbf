# SPDX-License-Identifier: Apache-2.0
"""Reading drivers: the backends of all agents, brought together by the driver they use.

Rows: name, uuid (by the name alone) and hosts: a list of {host, backend, status, error, version,
last_seen_at} in the order of host and backend. A driver that no backend of any agent uses has no
row.
"""

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from cyborg.core.driver import driver_uuid, version_of
from cyborg.db.read import paging
from cyborg.db.read.paging import Page, Row
from cyborg.db.schema import backends as table
from cyborg.db.schema import services

SORTABLE = ("name", "uuid")


def names(connection: sa.Connection) -> list[str]:
    """Return the names of all drivers in their order, in one statement."""
    query = sa.select(table.c.driver).distinct()
    return sorted(connection.scalars(query))


def find(
    connection: sa.Connection, *, page: Page | None = None, host: str | None = None
) -> list[Row]:
    """Return drivers, in two statements: one for the names and one for the backends of the page.

    ``host`` leaves alone what is on that host. A driver's uuid is no column, so that the few names
    are all read and cut here.
    """
    query = sa.select(table.c.driver).distinct()
    if host is not None:
        query = query.join(services, services.c.id == table.c.service_id)
        query = query.where(services.c.host == host)
    every: list[Row] = [
        {"uuid": driver_uuid(name), "name": name} for name in sorted(connection.scalars(query))
    ]
    chosen = paging.pick(every, page, SORTABLE)
    held = _hosts(connection, [row["name"] for row in chosen], host) if chosen else {}
    return [{**row, "hosts": held.get(row["name"], [])} for row in chosen]


def get(connection: sa.Connection, key: str) -> Row | None:
    """Return one driver by its name or its uuid, or None; a name comes before a uuid."""
    known = names(connection)
    # A driver may be named as the uuid of another is written: its name counts.
    by_uuid = (name for name in known if driver_uuid(name) == key.lower())
    wanted = key if key in known else next(by_uuid, None)
    if wanted is None:
        return None
    hosts = _hosts(connection, [wanted], None).get(wanted, [])
    return {"uuid": driver_uuid(wanted), "name": wanted, "hosts": hosts}


def _hosts(
    connection: sa.Connection, drivers: Collection[str], host: str | None
) -> dict[str, list[Row]]:
    query = (
        sa.select(
            services.c.host,
            table.c.name.label("backend"),
            table.c.driver,
            table.c.status,
            table.c.error,
            services.c.versions,
            services.c.last_seen_at,
        )
        .join(services, services.c.id == table.c.service_id)
        .where(table.c.driver.in_(drivers))
        .order_by(services.c.host, table.c.name)
    )
    if host is not None:
        query = query.where(services.c.host == host)
    held: dict[str, list[Row]] = {}
    for row in connection.execute(query).mappings():
        values: dict[str, Any] = dict(row)
        driver = values.pop("driver")
        values["version"] = version_of(driver, values.pop("versions"))
        held.setdefault(driver, []).append(values)
    return held
