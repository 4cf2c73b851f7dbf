# SPDX-License-Identifier: Apache-2.0
"""Writing the daemons: who has said hello, in which life, with which report recorded.

A host's row is also the lock of its inventory: a report begins by raising the row's generation, so
two reports of one host follow each other.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.report import BackendStatus
from cyborg.db.schema import attach_handles, backends, deployables, devices, services

AGENT = "cyborg-agent"


def unchanged(
    tx: sa.Connection,
    binary: str,
    host: str,
    epoch: str,
    digest: str,
    now: datetime,
    said: Mapping[str, Any],
    wanted: int | None = None,
) -> bool:
    """Note that a daemon is alive, if it is the one we know and has nothing new to report.

    ``said`` holds the columns that a hello carries besides. One that is held for down has news
    enough: it is back. So has one that is not as ``wanted``, unless it does not tell (None).
    """
    return bool(
        tx.execute(
            sa.update(services)
            .where(
                services.c.binary == binary,
                services.c.host == host,
                services.c.epoch == epoch,
                services.c.digest == digest,
                services.c.down_since.is_(None),
                sa.true() if wanted is None else services.c.wanted == wanted,
            )
            .values(last_seen_at=now, **said)
        ).rowcount
    )


def other_life(tx: sa.Connection, binary: str, host: str, epoch: str) -> sa.RowMapping | None:
    """Return endpoint and last_seen_at of a daemon that this epoch would take over from."""
    query = sa.select(services.c.endpoint, services.c.last_seen_at).where(
        services.c.binary == binary, services.c.host == host, services.c.epoch != epoch
    )
    return tx.execute(query).mappings().first()


def alive(
    tx: sa.Connection, binary: str, host: str, epoch: str, now: datetime, said: Mapping[str, Any]
) -> sa.RowMapping:
    """Note that a daemon is alive, known or not; return its row, which is locked then.

    Keys: id, uuid, binary, host, digest, generation, down_since, wanted.

    A new epoch is a new life: its reports count from the start, but what has been recorded of the
    host stays true until a report says otherwise, so the digest is kept. Raises oslo.db's
    DBDuplicateEntry when another transaction enters the same daemon first; try again then.
    """
    mine = sa.and_(services.c.binary == binary, services.c.host == host)
    values = {"last_seen_at": now, **said}
    same = sa.update(services).where(mine, services.c.epoch == epoch).values(**values)
    if not tx.execute(same).rowcount:
        values |= {"epoch": epoch, "generation": 0, "started_at": now}
        if not tx.execute(sa.update(services).where(mine).values(**values)).rowcount:
            values |= {"uuid": str(uuid4()), "binary": binary, "host": host}
            tx.execute(sa.insert(services).values(**values))
    columns = ("id", "uuid", "binary", "host", "digest", "generation", "down_since", "wanted")
    found = sa.select(*(services.c[name] for name in columns)).where(mine)
    return tx.execute(found).mappings().one()


def fall(tx: sa.Connection, limit: datetime, now: datetime, most: int) -> Sequence[sa.RowMapping]:
    """Hold for down, up to a number, the agents that last spoke at ``limit`` or before.

    Returns those that no other conductor held for down already and that did not speak meanwhile.
    Keys: id, uuid, binary, host, last_seen_at, down_since.
    """
    silent = sa.and_(
        services.c.binary == AGENT,
        services.c.down_since.is_(None),
        services.c.last_seen_at <= limit,
    )
    # Read first: an UPDATE that finds nothing would still lock what it looks at, on MariaDB.
    ids = tx.scalars(
        sa.select(services.c.id).where(silent).order_by(services.c.last_seen_at).limit(most)
    ).all()
    if not ids:
        return []
    mine = services.c.id.in_(sorted(ids))
    if not tx.execute(sa.update(services).where(mine, silent).values(down_since=now)).rowcount:
        return []
    columns = ("id", "uuid", "binary", "host", "last_seen_at", "down_since")
    found = sa.select(*(services.c[name] for name in columns)).where(
        mine, services.c.down_since == now
    )
    return tx.execute(found.order_by(services.c.host)).mappings().all()


def rise(tx: sa.Connection, id_: int) -> None:
    """Let an agent that was held for down count again. The caller holds its row."""
    tx.execute(sa.update(services).where(services.c.id == id_).values(down_since=None))


def accept(
    tx: sa.Connection, host: str, epoch: str, generation: int, digest: str, now: datetime
) -> bool:
    """Take a report of an agent, whose row is locked then; tell whether it is to be recorded.

    Refused is what another life of the agent sent, what is not newer than the last one taken, and
    what comes from one that is held for down: its hello brings it back.
    """
    mine = sa.and_(services.c.binary == AGENT, services.c.host == host, services.c.epoch == epoch)
    taken = tx.execute(
        sa.update(services)
        .where(mine, services.c.generation < generation, services.c.down_since.is_(None))
        .values(generation=generation, digest=digest, last_seen_at=now)
    )
    return bool(taken.rowcount)


def identify(tx: sa.Connection, host: str, identity: Mapping[str, Any]) -> None:
    """Write what a host's agent knows of its compute node. The caller holds the agent's row."""
    mine = sa.and_(services.c.binary == AGENT, services.c.host == host)
    tx.execute(sa.update(services).where(mine).values(identity=dict(identity)))


def identities(tx: sa.Connection, hosts: Collection[str]) -> dict[str, Any]:
    """Return what the agents of these hosts know of their compute nodes, by host."""
    query = sa.select(services.c.host, services.c.identity).where(
        services.c.binary == AGENT, services.c.host.in_(sorted(hosts))
    )
    return {row.host: row.identity for row in tx.execute(query)}


def hosts_among(tx: sa.Connection, names: Collection[str]) -> set[str]:
    """Return those of some names that agents give as their hosts'."""
    query = sa.select(services.c.host).where(
        services.c.binary == AGENT, services.c.host.in_(sorted(names))
    )
    return set(tx.scalars(query))


def last_seen(tx: sa.Connection, host: str) -> datetime | None:
    """Return when the agent of a host spoke last, None when it never did."""
    mine = sa.and_(services.c.binary == AGENT, services.c.host == host)
    seen: datetime | None = tx.execute(sa.select(services.c.last_seen_at).where(mine)).scalar()
    return seen


def ask(tx: sa.Connection, host: str) -> None:
    """Have a host report again, whatever it has."""
    tx.execute(
        sa.update(services)
        .where(services.c.binary == AGENT, services.c.host == host)
        .values(digest=None)
    )


def ask_again(tx: sa.Connection) -> int:
    """Have the hosts report again that still keep drained handles which nobody owns any longer.

    A report removes what it does not hold; an unchanged host would never send one by itself.
    Returns how many hosts that are.
    """
    left_over = (
        sa.select(services.c.id)
        .distinct()
        .join(devices, devices.c.host == services.c.host)
        .join(deployables, deployables.c.device_id == devices.c.id)
        .join(attach_handles, attach_handles.c.deployable_id == deployables.c.id)
        .outerjoin(
            backends,
            sa.and_(backends.c.service_id == services.c.id, backends.c.name == devices.c.backend),
        )
        .where(
            # One that cannot see removes nothing, however often its host reports. Without a row it
            # was given up: then the report does.
            sa.or_(backends.c.id.is_(None), backends.c.status == str(BackendStatus.READY)),
            services.c.binary == AGENT,
            services.c.digest.is_not(None),
            attach_handles.c.draining,
            attach_handles.c.request_id.is_(None),
            sa.not_(attach_handles.c.prepared),
        )
    )
    ids = tx.scalars(left_over).all()
    if not ids:
        return 0
    return tx.execute(
        sa.update(services).where(services.c.id.in_(ids)).values(digest=None)
    ).rowcount
