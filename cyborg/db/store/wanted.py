# SPDX-License-Identifier: Apache-2.0
"""Writing which backends operators want on each host, and what its agent made of it.

The revision stands in the agent's row: raising it is what makes the agent ask, and holds the row,
so that two who change one host follow each other.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from cyborg.core.wanted import Applied, Wanted, WantedHost, Wish
from cyborg.db.schema import devices, services
from cyborg.db.schema import wanted_backends as table
from cyborg.db.store import bulk
from cyborg.db.store.services import AGENT


def lock(tx: sa.Connection, host: str, epoch: str) -> sa.RowMapping | None:
    """Return id and wanted of a host's agent in this life, locked until the end, or None."""
    query = (
        sa.select(services.c.id, services.c.wanted)
        .where(services.c.binary == AGENT, services.c.host == host, services.c.epoch == epoch)
        .with_for_update()
    )
    return tx.execute(query).mappings().first()


def of_host(tx: sa.Connection, host: str, epoch: str) -> WantedHost | None:
    """Return what is wanted of a host, None when its agent is in another life."""
    mine = sa.and_(services.c.binary == AGENT, services.c.host == host, services.c.epoch == epoch)
    # One statement, so that the revision is that of what is returned with it.
    query = (
        sa.select(services.c.wanted, *_COLUMNS)
        .outerjoin(table, table.c.service_id == services.c.id)
        .where(mine)
        .order_by(table.c.backend)
    )
    rows = tx.execute(query).mappings().all()
    if not rows:
        return None
    found = tuple(_value(row) for row in rows if row["backend"] is not None)
    return WantedHost(rows[0]["wanted"], found)


def find(
    tx: sa.Connection, driver: str | None = None, backend: str | None = None
) -> dict[tuple[int, str], Wanted]:
    """Return what is wanted of a driver's backends, or of all of a name.

    By the agent's row id and the backend's name.
    """
    query = sa.select(table.c.service_id, *_COLUMNS)
    if driver is not None:
        query = query.where(table.c.driver == driver)
    if backend is not None:
        query = query.where(table.c.backend == backend)
    return {(r["service_id"], r["backend"]): _value(r) for r in tx.execute(query).mappings()}


def close(
    tx: sa.Connection, driver: str, known: Mapping[tuple[int, str], Wanted], which: Collection[Any]
) -> None:
    """Have nothing more given out of backends, by agent and name, without asking their agents.

    ``known`` is what is wanted of them so far.
    """
    if old := [{"agent": a, "name": b} for a, b in which if (a, b) in known]:
        mine = sa.and_(
            table.c.service_id == sa.bindparam("agent"), table.c.backend == sa.bindparam("name")
        )
        tx.execute(sa.update(table).where(mine).values(wish=str(Wish.DISABLED)), old)
    values = {"driver": driver, "wish": Wish.DISABLED, "config": {}, "revision": 0}
    bulk.insert(
        tx,
        table,
        [{"service_id": a, "backend": b, **values} for a, b in which if (a, b) not in known],
    )


def raise_(tx: sa.Connection, service_id: int) -> int:
    """Raise the revision of what is wanted of a host, whose row is locked then; return it."""
    mine = services.c.id == service_id
    tx.execute(sa.update(services).where(mine).values(wanted=services.c.wanted + 1))
    return int(tx.execute(sa.select(services.c.wanted).where(mine)).scalar_one())


def write(tx: sa.Connection, service_id: int, wanted: Wanted) -> None:
    """Write what is wanted of one backend. The caller holds the agent's row."""
    mine = sa.and_(table.c.service_id == service_id, table.c.backend == wanted.backend)
    values = {
        "driver": wanted.driver,
        "wish": str(wanted.wish),
        "config": dict(wanted.config),
        "revision": wanted.revision,
        "applied": False,
        "error": None,
    }
    if not tx.execute(sa.update(table).where(mine).values(**values)).rowcount:
        tx.execute(sa.insert(table).values(service_id=service_id, backend=wanted.backend, **values))


def forget(tx: sa.Connection, service_id: int, backend: str) -> None:
    """Want nothing of one backend: its host's configuration file decides."""
    mine = sa.and_(table.c.service_id == service_id, table.c.backend == backend)
    tx.execute(sa.delete(table).where(mine))


def restore(
    tx: sa.Connection, before: Collection[tuple[int | None, str, Mapping[str, Any] | None]]
) -> None:
    """Take back what ``close`` did: by agent, backend and what was wanted, as plain values."""
    for agent, backend, values in before:
        mine = sa.and_(table.c.service_id == agent, table.c.backend == backend)
        if values is None:
            tx.execute(sa.delete(table).where(mine))
        else:
            tx.execute(sa.update(table).where(mine).values(wish=values["wish"]))


def applied(tx: sa.Connection, service_id: int, outcomes: Sequence[Applied]) -> None:
    """Write what an agent made of what was wanted, unless something else is by now."""
    for outcome in outcomes:
        tx.execute(
            sa.update(table)
            .where(
                table.c.service_id == service_id,
                table.c.backend == outcome.backend,
                table.c.revision == outcome.revision,
            )
            .values(applied=outcome.error is None, error=outcome.error)
        )


def withdraw(tx: sa.Connection, hosts: Collection[str]) -> int:
    """Close the devices of hosts whose backend is not wanted enabled, and open the others.

    Returns how many that changes: their providers look different then.
    """
    unwanted = sa.exists().where(
        table.c.service_id == services.c.id,
        services.c.binary == AGENT,
        services.c.host == devices.c.host,
        table.c.backend == devices.c.backend,
        table.c.wish != str(Wish.ENABLED),
    )
    changed = 0
    for some in bulk.chunks(sorted(hosts)):
        mine = devices.c.host.in_(some)
        closed = sa.update(devices).where(mine, sa.not_(devices.c.withdrawn), unwanted)
        opened = sa.update(devices).where(mine, devices.c.withdrawn, sa.not_(unwanted))
        changed += tx.execute(closed.values(withdrawn=True)).rowcount
        changed += tx.execute(opened.values(withdrawn=False)).rowcount
    return changed


_COLUMNS = tuple(table.c[name] for name in ("backend", "driver", "wish", "revision", "config"))


def _value(row: sa.RowMapping) -> Wanted:
    return Wanted(row["backend"], row["driver"], Wish(row["wish"]), row["revision"], row["config"])
