# SPDX-License-Identifier: Apache-2.0
"""Audits that somebody asked for: begun by one conductor, carried on by another if that one goes.

Every write of a conductor is guarded by its lease: whoever has lost it changes nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core.audit import OPEN, Side, State
from cyborg.db.schema import audits, devices, providers, services

AGENT = "cyborg-agent"

# A host is one whose agent has spoken, or of which something is left.
_HOSTS = sa.union(
    sa.select(services.c.host).where(services.c.binary == AGENT),
    sa.select(devices.c.host),
    sa.select(providers.c.host),
).subquery("hosts")


def hosts(tx: sa.Connection, after: str, limit: int) -> Sequence[str]:
    """Return the names of the next hosts behind one, in the order of the database."""
    query = sa.select(_HOSTS.c.host).where(_HOSTS.c.host > after)
    return tx.scalars(query.order_by(_HOSTS.c.host).limit(limit)).all()


def is_host(tx: sa.Connection, host: str) -> bool:
    """Tell whether anything is known of a host."""
    query = sa.select(_HOSTS.c.host).where(_HOSTS.c.host == host)
    return tx.execute(query).first() is not None


def count_hosts(tx: sa.Connection) -> int:
    """Return how many hosts there are."""
    return int(tx.scalar(sa.select(sa.func.count()).select_from(_HOSTS)) or 0)


def count_open(tx: sa.Connection) -> int:
    """Return how many audits have not ended."""
    query = sa.select(sa.func.count()).select_from(audits).where(audits.c.state.in_(OPEN))
    return int(tx.scalar(query) or 0)


def add(tx: sa.Connection, host: str | None, repair: bool, sides: Collection[Side]) -> str:
    """Promise an audit and return its uuid."""
    uuid = str(uuid4())
    tx.execute(
        sa.insert(audits).values(
            uuid=uuid,
            host=host,
            repair=repair,
            state=State.PENDING,
            sides=[str(side) for side in sides],
            total=1 if host is not None else count_hosts(tx),
        )
    )
    return uuid


def lease(tx: sa.Connection, *, owner: str, now: datetime, until: datetime) -> Any | None:
    """Take the oldest audit that nobody works on; return its row as it was, None without one.

    ``owner`` must be new at each call.
    """
    due = sa.and_(
        audits.c.state.in_(OPEN),
        sa.or_(audits.c.lease_until.is_(None), audits.c.lease_until < now),
    )
    row = tx.execute(sa.select(audits).where(due).order_by(audits.c.id).limit(1)).mappings().first()
    if row is None:
        return None
    taken = sa.update(audits).where(audits.c.id == row["id"], due)
    values = {"state": State.RUNNING, "owner": owner, "lease_until": until}
    return row if tx.execute(taken.values(**values)).rowcount else None


def renew(tx: sa.Connection, uuid: str, owner: str, until: datetime) -> bool:
    """Keep a lease for longer; tell whether it was still ours."""
    return _write(tx, uuid, owner, {"lease_until": until})


def progress(
    tx: sa.Connection,
    uuid: str,
    owner: str,
    *,
    host: str,
    done: int,
    found: int,
    findings: Sequence[Mapping[str, Any]] | None,
    until: datetime,
) -> bool:
    """Record that a host was looked at, and keep the lease; tell whether it was still ours.

    ``findings`` are all so far, None when none was added.
    """
    values = {"last_host": host, "done": done, "found": found, "lease_until": until}
    if findings is not None:
        values["findings"] = list(findings)
    return _write(tx, uuid, owner, values)


def end(tx: sa.Connection, uuid: str, owner: str, state: State, error: str | None = None) -> bool:
    """Record how an audit ended; tell whether its lease was still ours."""
    values = {"state": state, "error": error, "owner": None, "lease_until": None}
    return _write(tx, uuid, owner, values)


def give_back(tx: sa.Connection, uuid: str, owner: str) -> bool:
    """End a lease early: whoever comes next carries on."""
    return _write(tx, uuid, owner, {"owner": None, "lease_until": None})


def _write(tx: sa.Connection, uuid: str, owner: str, values: Mapping[str, Any]) -> bool:
    mine = sa.and_(audits.c.uuid == uuid, audits.c.owner == owner)
    return bool(tx.execute(sa.update(audits).where(mine).values(**values)).rowcount)


def purge(tx: sa.Connection, before: datetime, limit: int) -> int:
    """Forget audits that ended before ``before``; return how many."""
    old = sa.and_(audits.c.state.not_in(OPEN), audits.c.updated_at < before)
    ids = tx.scalars(sa.select(audits.c.id).where(old).limit(limit)).all()
    if not ids:
        return 0
    return tx.execute(sa.delete(audits).where(audits.c.id.in_(ids))).rowcount
