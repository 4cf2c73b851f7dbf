# SPDX-License-Identifier: Apache-2.0
"""Writing the daemons: who has said hello, in which life, with which report recorded.

A host's row is also the lock of its inventory: a report begins by raising the row's generation, so
two reports of one host follow each other.
"""

from collections.abc import Mapping
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
) -> bool:
    """Note that a daemon is alive, if it is the one we know and has nothing new to report.

    ``said`` holds the columns that a hello carries besides.
    """
    return bool(
        tx.execute(
            sa.update(services)
            .where(
                services.c.binary == binary,
                services.c.host == host,
                services.c.epoch == epoch,
                services.c.digest == digest,
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
    """Note that a daemon is alive, known or not; return id, digest and generation of its row.

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
    found = sa.select(services.c.id, services.c.digest, services.c.generation).where(mine)
    return tx.execute(found).mappings().one()


def accept(
    tx: sa.Connection, host: str, epoch: str, generation: int, digest: str, now: datetime
) -> int | None:
    """Take a report of an agent: return the id of its row, now locked, or None to refuse.

    Refused is what another life of the agent sent, and what is not newer than the last one taken.
    """
    mine = sa.and_(services.c.binary == AGENT, services.c.host == host, services.c.epoch == epoch)
    taken = tx.execute(
        sa.update(services)
        .where(mine, services.c.generation < generation)
        .values(generation=generation, digest=digest, last_seen_at=now)
    )
    if not taken.rowcount:
        return None
    return int(tx.execute(sa.select(services.c.id).where(mine)).scalar_one())


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
        # A backend that cannot see removes nothing, however often its host reports.
        .join(
            backends,
            sa.and_(
                backends.c.service_id == services.c.id,
                backends.c.name == devices.c.backend,
                backends.c.status == str(BackendStatus.READY),
            ),
        )
        .where(
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
