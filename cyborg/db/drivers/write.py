# SPDX-License-Identifier: Apache-2.0
"""Write the drivers installed on each host, and read where a driver is installed."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.drivers.registry import DriverEntry, fingerprint
from cyborg.core.hosts import AGENT
from cyborg.db import bulk
from cyborg.db.backends.desired import AGENT_COLUMNS, AgentRow, BackendKey
from cyborg.db.rows import equal, fetch_all, row_columns
from cyborg.db.schema import backends, desired_backends, devices, drivers, services


class InstallationRow(TypedDict):
    """A driver on the host of an agent, whose row id is ``service_id``."""

    service_id: int
    options: list[dict[str, Any]]
    error: str | None
    installable: bool


def replace(tx: sa.Connection, service_id: int, entries: Sequence[DriverEntry]) -> None:
    """Replace the installed drivers of a host. The caller must hold a lock on the agent's row."""
    # All of them: they are few, and sent only if their fingerprint has changed.
    tx.execute(sa.delete(drivers).where(drivers.c.service_id == service_id))
    bulk.insert(tx, drivers, [{"service_id": service_id, **entry.to_dict()} for entry in entries])
    tx.execute(
        sa.update(services)
        .where(services.c.id == service_id)
        # Of the rows as written: an agent that reports the same changes nothing.
        .values(drivers_digest=fingerprint(entries))
    )


def add(tx: sa.Connection, entries: Mapping[int, DriverEntry]) -> None:
    """Add a driver that was found on hosts, by the row ids of their agents.

    This function locks the agents. It does not change a driver that an agent has already reported.
    The next report of each agent replaces all drivers of its host.
    """
    ids = sorted(entries)
    for chunk in bulk.chunks(ids):
        # In the order of the ids, as all that lock several agents: no deadlock.
        agents = sa.select(services.c.id).where(services.c.id.in_(chunk)).order_by(services.c.id)
        tx.execute(agents.with_for_update()).all()
    stored: set[tuple[int, str]] = set()
    for chunk in bulk.chunks(ids):
        query = sa.select(drivers.c.service_id, drivers.c.name)
        rows = tx.execute(query.where(drivers.c.service_id.in_(chunk)))
        stored |= {(row.service_id, row.name) for row in rows}
    new = {id_: entry for id_, entry in entries.items() if (id_, entry.name) not in stored}
    bulk.insert(tx, drivers, [{"service_id": id_, **entry.to_dict()} for id_, entry in new.items()])
    # Without a fingerprint to compare, the next report replaces the drivers of these hosts.
    bulk.update_where(tx, services.c.id, new, drivers_digest=None)


def names(tx: sa.Connection) -> list[str]:
    """Return the names of all drivers that are installed, used or desired on any host."""
    columns = (drivers.c.name, backends.c.driver, desired_backends.c.driver)
    return sorted({name for column in columns for name in tx.scalars(sa.select(column).distinct())})


def agents(tx: sa.Connection) -> list[AgentRow]:
    """Return every agent, ordered by host."""
    query = sa.select(*AGENT_COLUMNS).where(services.c.binary == AGENT).order_by(services.c.host)
    return fetch_all(AgentRow, tx.execute(query))


def installations(tx: sa.Connection, name: str) -> dict[int, InstallationRow]:
    """Return the installations of a driver, by the row id of the agent that reported it."""
    query = sa.select(*row_columns(InstallationRow, drivers)).where(drivers.c.name == name)
    return {row["service_id"]: row for row in fetch_all(InstallationRow, tx.execute(query))}


def reported_backends(
    tx: sa.Connection, driver: str | None = None, backend: str | None = None
) -> dict[BackendKey, str]:
    """Return the drivers of reported backends.

    ``driver`` and ``backend`` limit the result to this driver and to backends of this name.
    """
    query = sa.select(backends.c.service_id, backends.c.name, backends.c.driver)
    query = query.where(*equal({backends.c.driver: driver, backends.c.name: backend}))
    return {BackendKey(row.service_id, row.name): row.driver for row in tx.execute(query)}


def agents_with_leftovers(tx: sa.Connection, backend: str, hosts: Collection[str]) -> set[int]:
    """Return the agents, by row id, on whose hosts only devices of a backend remain.

    The agent does not report the backend, and the backend has no desired state. Only ``hosts`` are
    considered.
    """
    reported_or_desired = [
        sa.exists().where(table.c.service_id == services.c.id, name == backend)
        for table, name in (
            (backends, backends.c.name),
            (desired_backends, desired_backends.c.backend),
        )
    ]
    remains = sa.exists().where(devices.c.host == services.c.host, devices.c.backend == backend)
    agent_ids: set[int] = set()
    for chunk in bulk.chunks(sorted(hosts)):
        query = sa.select(services.c.id).where(
            services.c.binary == AGENT,
            services.c.host.in_(chunk),
            remains,
            *(sa.not_(condition) for condition in reported_or_desired),
        )
        agent_ids |= set(tx.scalars(query))
    return agent_ids
