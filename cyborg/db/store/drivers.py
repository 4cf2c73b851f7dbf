# SPDX-License-Identifier: Apache-2.0
"""Writing what drivers are installed on each host, and reading where one of them is to be had."""

from collections.abc import Sequence

import sqlalchemy as sa

from cyborg.core.catalogue import Entry, fingerprint
from cyborg.db.schema import backends, drivers, services, wanted_backends
from cyborg.db.store import bulk
from cyborg.db.store.services import AGENT


def replace(tx: sa.Connection, service_id: int, entries: Sequence[Entry]) -> None:
    """Bring what is installed on an agent's host to this. The caller holds the agent's row."""
    tx.execute(sa.delete(drivers).where(drivers.c.service_id == service_id))
    bulk.insert(tx, drivers, [{"service_id": service_id, **entry.to_dict()} for entry in entries])
    tx.execute(
        sa.update(services)
        .where(services.c.id == service_id)
        .values(catalogue=fingerprint(entries))
    )


def names(tx: sa.Connection) -> list[str]:
    """Return the names of all drivers that are installed, used or wanted anywhere."""
    columns = (drivers.c.name, backends.c.driver, wanted_backends.c.driver)
    return sorted({name for column in columns for name in tx.scalars(sa.select(column).distinct())})


def agents(tx: sa.Connection) -> Sequence[sa.RowMapping]:
    """Return every agent: id, host, down_since, in the order of the hosts."""
    columns = (services.c.id, services.c.host, services.c.down_since)
    query = sa.select(*columns).where(services.c.binary == AGENT).order_by(services.c.host)
    return tx.execute(query).mappings().all()


def installed(tx: sa.Connection, name: str) -> dict[int, sa.RowMapping]:
    """Return where a driver is installed, by the agent's row id: options and error."""
    query = sa.select(drivers.c.service_id, drivers.c.options, drivers.c.error).where(
        drivers.c.name == name
    )
    return {row["service_id"]: row for row in tx.execute(query).mappings()}


def running(
    tx: sa.Connection, driver: str | None = None, backend: str | None = None
) -> dict[tuple[int, str], str]:
    """Return which backends agents tell of: by the agent's row id and the name, the driver.

    All those of a driver, or all of a name.
    """
    query = sa.select(backends.c.service_id, backends.c.name, backends.c.driver)
    if driver is not None:
        query = query.where(backends.c.driver == driver)
    if backend is not None:
        query = query.where(backends.c.name == backend)
    return {(row.service_id, row.name): row.driver for row in tx.execute(query)}
