# SPDX-License-Identifier: Apache-2.0
"""Writing which backends operators want on each host, and what its agent made of it.

The revision stands in the agent's row: raising it is what makes the agent ask, and holds the row,
so that two who change one host follow each other.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from cyborg.core.wanted import Applied, Wanted, WantedHost, Wish
from cyborg.db.schema import devices, services
from cyborg.db.schema import wanted_backends as table
from cyborg.db.store import bulk
from cyborg.db.store.services import AGENT


@dataclass(frozen=True, slots=True)
class Known:
    """What is wanted of a backend, and whether its agent has said that it is so."""

    wanted: Wanted
    applied: bool


def lock(tx: sa.Connection, host: str, epoch: str) -> sa.RowMapping | None:
    """Return id and wanted of a host's agent in this life, locked until the end, or None."""
    query = (
        sa.select(services.c.id, services.c.wanted)
        .where(services.c.binary == AGENT, services.c.host == host, services.c.epoch == epoch)
        .with_for_update()
    )
    return tx.execute(query).mappings().first()


def lock_host(tx: sa.Connection, host: str) -> None:
    """Lock a host's agent, in whichever life, until the end."""
    mine = sa.and_(services.c.binary == AGENT, services.c.host == host)
    tx.execute(sa.select(services.c.id).where(mine).with_for_update()).first()


def lock_all(tx: sa.Connection, agents: Collection[int]) -> dict[int, sa.RowMapping]:
    """Lock agents, by row id and in that order, until the end; return id, wanted and down_since.

    Who changes what is wanted, or closes devices by it, holds them: a report that is being recorded
    is waited for, and the next one sees what was changed.
    """
    found: dict[int, sa.RowMapping] = {}
    for some in bulk.chunks(sorted(set(agents))):
        query = (
            sa.select(services.c.id, services.c.wanted, services.c.down_since)
            .where(services.c.id.in_(some))
            .order_by(services.c.id)
            .with_for_update()
        )
        found |= {row["id"]: row for row in tx.execute(query).mappings()}
    return found


def of_host(tx: sa.Connection, host: str, epoch: str) -> WantedHost | None:
    """Return what is wanted of a host, None when its agent is in another life."""
    mine = sa.and_(services.c.binary == AGENT, services.c.host == host, services.c.epoch == epoch)
    # One statement, so that the revision is that of what is returned with it.
    query = (
        sa.select(services.c.wanted, *_COLUMNS)
        # What is only closed, without a revision, no agent was asked for.
        .outerjoin(table, sa.and_(table.c.service_id == services.c.id, table.c.revision > 0))
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
) -> dict[tuple[int, str], Known]:
    """Return what is wanted of a driver's backends, or of all of a name.

    By the agent's row id and the backend's name.
    """
    query = sa.select(table.c.service_id, table.c.applied, *_COLUMNS)
    if driver is not None:
        query = query.where(table.c.driver == driver)
    if backend is not None:
        query = query.where(table.c.backend == backend)
    return {
        (r["service_id"], r["backend"]): Known(_value(r), bool(r["applied"]))
        for r in tx.execute(query).mappings()
    }


def full(tx: sa.Connection, agents: Collection[int], most: int) -> set[int]:
    """Return those of some agents, by row id, of whom ``most`` backends or more are remembered."""
    found: set[int] = set()
    for some in bulk.chunks(agents):
        query = (
            sa.select(table.c.service_id)
            .where(table.c.service_id.in_(some))
            .group_by(table.c.service_id)
            .having(sa.func.count() >= most)
        )
        found |= set(tx.scalars(query))
    return found


def absent(tx: sa.Connection, host: str, backends: Collection[str]) -> set[str]:
    """Return those of some backends of a host that are to be given up, or have been."""
    query = (
        sa.select(table.c.backend)
        .join(services, services.c.id == table.c.service_id)
        .where(
            services.c.binary == AGENT,
            services.c.host == host,
            table.c.backend.in_(sorted(backends)),
            table.c.wish == str(Wish.ABSENT),
        )
    )
    return set(tx.scalars(query))


def close(
    tx: sa.Connection,
    driver: str,
    known: Collection[tuple[int, str]],
    which: Collection[tuple[int, str]],
) -> None:
    """Have nothing more given out of backends, by agent and name, without asking their agents.

    ``known`` are those of which something is wanted so far. The caller holds the agents' rows.
    """
    old = [(agent, name, str(Wish.DISABLED)) for agent, name in which if (agent, name) in known]
    for mine, wish in _groups(old):
        tx.execute(sa.update(table).where(mine).values(wish=wish))
    values = {"driver": driver, "wish": Wish.DISABLED, "config": {}, "revision": 0}
    bulk.insert(
        tx,
        table,
        [{"service_id": a, "backend": b, **values} for a, b in which if (a, b) not in known],
    )


def raise_(tx: sa.Connection, agents: Collection[int]) -> None:
    """Raise the revision of what is wanted of hosts, by their agents' row ids."""
    for some in bulk.chunks(sorted(set(agents))):
        tx.execute(
            sa.update(services).where(services.c.id.in_(some)).values(wanted=services.c.wanted + 1)
        )


def write(tx: sa.Connection, service_id: int, wanted: Wanted) -> bool:
    """Write what is wanted of one backend; tell whether it could be.

    It cannot while the backend is another driver's. The caller holds the agent's row.
    """
    mine = sa.and_(table.c.service_id == service_id, table.c.backend == wanted.backend)
    ours = sa.or_(table.c.driver == wanted.driver, table.c.wish == str(Wish.ABSENT))
    values = {
        "driver": wanted.driver,
        "wish": str(wanted.wish),
        "config": dict(wanted.config),
        "revision": wanted.revision,
        "applied": False,
        "error": None,
    }
    if tx.execute(sa.update(table).where(mine, ours).values(**values)).rowcount:
        return True
    if tx.execute(sa.select(table.c.id).where(mine)).first():
        return False
    tx.execute(sa.insert(table).values(service_id=service_id, backend=wanted.backend, **values))
    return True


def take_back(
    tx: sa.Connection, service_id: int, backend: str, asked: int, before: Wanted | None
) -> None:
    """Want of a backend what was wanted before, if it is still as it was ``asked``, a revision.

    None is nothing: its host's configuration file decides. The caller holds the agent's row.
    """
    mine = sa.and_(
        table.c.service_id == service_id, table.c.backend == backend, table.c.revision == asked
    )
    if before is None:
        tx.execute(sa.delete(table).where(mine))
        return
    tx.execute(
        sa.update(table)
        .where(mine)
        .values(
            driver=before.driver,
            wish=str(before.wish),
            config=dict(before.config),
            revision=before.revision,
            applied=False,
            error=None,
        )
    )


def restore(
    tx: sa.Connection, before: Collection[tuple[int | None, str, Mapping[str, Any] | None]]
) -> None:
    """Take back what ``close`` did: by agent, backend and what was wanted, as plain values.

    The caller holds the agents' rows.
    """
    known = [
        (agent, backend, None if values is None else str(values["wish"]))
        for agent, backend, values in before
        if agent is not None
    ]
    for mine, wish in _groups(known):
        if wish is None:
            tx.execute(sa.delete(table).where(mine))
        else:
            tx.execute(sa.update(table).where(mine).values(wish=wish))


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


def _groups(
    which: Iterable[tuple[int, str, str | None]],
) -> list[tuple[sa.ColumnElement[bool], str | None]]:
    """Return guards for rows by agent and backend that are treated alike: few, for many hosts."""
    agents: dict[tuple[str, str | None], list[int]] = {}
    for agent, backend, value in which:
        agents.setdefault((backend, value), []).append(agent)
    return [
        (sa.and_(table.c.backend == backend, table.c.service_id.in_(some)), value)
        for (backend, value), ids in sorted(agents.items(), key=str)
        for some in bulk.chunks(ids)
    ]


def _value(row: sa.RowMapping) -> Wanted:
    return Wanted(row["backend"], row["driver"], Wish(row["wish"]), row["revision"], row["config"])
