# SPDX-License-Identifier: Apache-2.0
"""Which resource providers Placement must be told of, and who is telling it.

``mark`` stands in the transaction that changes what is wanted. A publisher takes stale rows by a
lease, reads what is wanted after that, and says how it went: only what it saw counts as published,
so a change in between leaves the row stale.

A row that is only to be compared is ``audited``: its revision stands, so that it counts as
published, and what differs is somebody else's doing. Any change here ends that.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.db.schema import deployables, devices, providers
from cyborg.db.store import bulk


def mark(tx: sa.Connection, host: str, changed: Mapping[str, str], now: datetime) -> None:
    """Say that Placement must be told of these providers of a host: names by uuid."""
    known: set[str] = set()
    for some in bulk.chunks(sorted(changed)):
        # The UPDATE comes first: it keeps a publisher from deleting a row that is about to count.
        if _stale(tx, providers.c.uuid.in_(some), now) == len(some):
            known |= set(some)
            continue
        known |= set(tx.scalars(sa.select(providers.c.uuid).where(providers.c.uuid.in_(some))))
    bulk.insert(
        tx,
        providers,
        [
            {"uuid": uuid, "name": name, "host": host, "stale_since": now}
            for uuid, name in changed.items()
            if uuid not in known
        ],
    )


def mark_known(tx: sa.Connection, uuids: Collection[str], now: datetime) -> int:
    """Say that Placement must be told of those of some that have a row; return how many do."""
    return _stale(tx, providers.c.uuid.in_(sorted(uuids)), now)


def mark_device(tx: sa.Connection, device_uuid: str, now: datetime) -> int:
    """Say that Placement must be told of every provider of a device; return how many there are."""
    mine = (
        sa.select(deployables.c.rp_uuid)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(devices.c.uuid == device_uuid)
    )
    return _stale(tx, providers.c.uuid.in_(mine), now)


def audit_host(tx: sa.Connection, host: str, now: datetime) -> int:
    """Have every provider of a host compared with Placement; return how many there are."""
    return _audit(tx, providers.c.host == host, now)


def mark_hosts(tx: sa.Connection, hosts: Collection[str], now: datetime) -> int:
    """Say that what these hosts offer may be another now; return how many providers they have."""
    return sum(_stale(tx, providers.c.host.in_(some), now) for some in bulk.chunks(hosts))


def mark_old(tx: sa.Connection, before: datetime, now: datetime, limit: int) -> int:
    """Have providers compared that nobody has touched since ``before``; return how many."""
    old = (
        sa.select(providers.c.id)
        .where(providers.c.stale_since.is_(None), providers.c.updated_at < before)
        .order_by(providers.c.updated_at)
        .limit(limit)
    )
    ids = tx.scalars(old).all()
    still = sa.and_(providers.c.id.in_(ids), providers.c.stale_since.is_(None))
    return _audit(tx, still, now) if ids else 0


def _stale(tx: sa.Connection, which: sa.ColumnElement[bool], now: datetime) -> int:
    return tx.execute(
        sa.update(providers)
        .where(which)
        .values(
            revision=providers.c.revision + 1,
            stale_since=sa.func.coalesce(providers.c.stale_since, now),
            attempts=0,
            next_try_at=None,
            audited=False,
        )
    ).rowcount


def _audit(tx: sa.Connection, which: sa.ColumnElement[bool], now: datetime) -> int:
    stale = providers.c.stale_since
    return tx.execute(
        sa.update(providers)
        .where(which)
        # In this order, for MySQL assigns one after another. What is stale already is no audit.
        .ordered_values(
            (providers.c.audited, sa.case((stale.is_(None), sa.true()), else_=providers.c.audited)),
            (stale, sa.func.coalesce(stale, now)),
            (providers.c.attempts, 0),
            (providers.c.next_try_at, None),
        )
    ).rowcount


def lease(
    tx: sa.Connection, *, owner: str, now: datetime, until: datetime, limit: int
) -> Sequence[sa.RowMapping]:
    """Take up to ``limit`` stale providers that are due, the longest stale first.

    What another owner leases is left alone until the lease ends. ``owner`` must be new at each
    call: it is how the rows are told from those of an earlier lease of the same conductor.
    Keys: id, uuid, name, host, revision, published (0 for one that Placement was never told of),
    audited, attempts.
    """
    due = sa.and_(
        providers.c.stale_since.is_not(None),
        sa.or_(providers.c.next_try_at.is_(None), providers.c.next_try_at <= now),
        sa.or_(providers.c.lease_until.is_(None), providers.c.lease_until < now),
    )
    columns = (
        providers.c.id,
        providers.c.uuid,
        providers.c.name,
        providers.c.host,
        providers.c.revision,
        providers.c.published,
        providers.c.audited,
        providers.c.attempts,
    )
    query = sa.select(*columns).where(due).order_by(providers.c.stale_since, providers.c.id)
    locked = query.limit(limit).with_for_update(skip_locked=True)
    found = tx.execute(locked).mappings().all()
    if not found:
        return []
    chosen = providers.c.id.in_(sorted(row["id"] for row in found))
    taken = sa.update(providers).where(chosen, due).values(owner=owner, lease_until=until)
    if tx.execute(taken).rowcount == len(found):
        # Nobody else can have changed them: they are locked, or only one writer is let in.
        return sorted(found, key=lambda row: int(row["id"]))
    mine = sa.select(*columns).where(providers.c.owner == owner, chosen)
    return tx.execute(mine.order_by(providers.c.id)).mappings().all()


def published(tx: sa.Connection, owner: str, seen: Mapping[str, int]) -> None:
    """Record what Placement was brought to: the revision seen, by uuid."""
    if not seen:
        return
    tx.execute(
        sa.update(providers)
        .where(providers.c.uuid == sa.bindparam("which"), providers.c.owner == owner)
        .values(
            published=sa.bindparam("seen"),
            stale_since=sa.case(
                (providers.c.revision == sa.bindparam("seen"), None),
                else_=providers.c.stale_since,
            ),
            audited=False,
            error=None,
            attempts=0,
            next_try_at=None,
            owner=None,
            lease_until=None,
        ),
        [{"which": uuid, "seen": revision} for uuid, revision in sorted(seen.items())],
    )


def gone(tx: sa.Connection, owner: str, seen: Mapping[str, int]) -> None:
    """Forget providers that Placement has no longer, unless they are wanted anew meanwhile."""
    if not seen:
        return
    tx.execute(
        sa.delete(providers).where(
            providers.c.owner == owner,
            providers.c.uuid == sa.bindparam("which"),
            providers.c.revision == sa.bindparam("seen"),
        ),
        [{"which": uuid, "seen": revision} for uuid, revision in sorted(seen.items())],
    )
    give_back(tx, owner, seen)


def failed(tx: sa.Connection, owner: str, errors: Iterable[tuple[str, str, datetime]]) -> None:
    """Record failures: the uuid, what went wrong, and when to try again."""
    rows = [{"which": u, "text": text, "again": at} for u, text, at in sorted(errors)]
    if not rows:
        return
    values: dict[str, Any] = {
        "error": sa.bindparam("text"),
        "next_try_at": sa.bindparam("again"),
        "attempts": providers.c.attempts + 1,
        "owner": None,
        "lease_until": None,
    }
    tx.execute(
        sa.update(providers)
        .where(providers.c.uuid == sa.bindparam("which"), providers.c.owner == owner)
        .values(**values),
        rows,
    )


def unanswered(tx: sa.Connection, told: Iterable[tuple[str, str, str]]) -> None:
    """End leases, of owner and uuid, for want of an answer, and keep what was said instead of one.

    These rows are due at once and none of it counts as an attempt: a long absence of Placement must
    not make anything late after its return.
    """
    rows = [{"who": owner, "which": uuid, "text": text} for owner, uuid, text in sorted(told)]
    if rows:
        tx.execute(
            sa.update(providers)
            .where(
                providers.c.uuid == sa.bindparam("which"), providers.c.owner == sa.bindparam("who")
            )
            .values(error=sa.bindparam("text"), owner=None, lease_until=None),
            rows,
        )


def give_back(tx: sa.Connection, owner: str, uuids: Collection[str]) -> None:
    """End a lease early: what it covers is anyone's at once."""
    tx.execute(
        sa.update(providers)
        .where(providers.c.owner == owner, providers.c.uuid.in_(sorted(uuids)))
        .values(owner=None, lease_until=None)
    )
