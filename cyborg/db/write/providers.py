# SPDX-License-Identifier: Apache-2.0
"""Write which resource providers are stale in Placement, and which publisher leases them.

``mark_stale`` runs in the transaction that changes the desired state. A publisher leases stale
rows, then reads the desired state, and records the result with the revision that it published. A
change in between raises the revision, so the row remains stale.

``verify_only`` marks a row that is only due for verification: its revision does not change, so it
counts as published, and a difference in Placement is drift. Any change of the desired state clears
this mark.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.db import bulk
from cyborg.db.rows import fetch_all
from cyborg.db.schema import deployables, devices, providers


class LeasedProviderRow(TypedDict):
    """A stale provider to publish.

    ``published_revision`` is 0 if the provider was never published. ``error`` is the error of the
    last attempt, None if there was none.
    """

    id: int
    uuid: str
    name: str
    host: str
    revision: int
    published_revision: int
    verify_only: bool
    attempts: int
    error: str | None


def mark_stale(tx: sa.Connection, host: str, changed: Mapping[str, str], now: datetime) -> None:
    """Mark providers of a host stale; insert a row for a provider that has none.

    ``changed`` maps the uuids of the providers to their names.
    """
    stored: set[str] = set()
    for chunk in bulk.chunks(sorted(changed)):
        # The UPDATE comes first, so that a publisher cannot delete a row that is marked here.
        if _update_stale(tx, providers.c.uuid.in_(chunk), now) == len(chunk):
            stored |= set(chunk)
            continue
        stored |= set(tx.scalars(sa.select(providers.c.uuid).where(providers.c.uuid.in_(chunk))))
    bulk.insert(
        tx,
        providers,
        [
            {"uuid": uuid, "name": name, "host": host, "stale_since": now}
            for uuid, name in changed.items()
            if uuid not in stored
        ],
    )


def mark_stale_existing(tx: sa.Connection, uuids: Collection[str], now: datetime) -> int:
    """Mark providers stale, without inserting missing rows; return the number of marked rows."""
    found = bulk.chunks(sorted(uuids))
    return sum(_update_stale(tx, providers.c.uuid.in_(chunk), now) for chunk in found)


def mark_stale_of_device(tx: sa.Connection, device_uuid: str, now: datetime) -> int:
    """Mark every provider of a device stale; return their number."""
    return mark_stale_of_devices(tx, [device_uuid], now)


def mark_stale_of_devices(tx: sa.Connection, device_uuids: Collection[str], now: datetime) -> int:
    """Mark every provider of these devices stale; return their number."""
    # MariaDB before 11.1 would run a subquery of an UPDATE once for each row of the table.
    query = (
        sa.select(deployables.c.rp_uuid)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(devices.c.uuid.in_(sorted(device_uuids)))
    )
    return mark_stale_existing(tx, tx.scalars(query).all(), now)


def schedule_verification_of_host(tx: sa.Connection, host: str, now: datetime) -> int:
    """Schedule the verification of every provider of a host; return their number."""
    return _update_verify(tx, providers.c.host == host, now)


def schedule_verification_of_hosts(tx: sa.Connection, hosts: Collection[str], now: datetime) -> int:
    """Schedule the verification of every provider of these hosts; return their number."""
    return sum(_update_verify(tx, providers.c.host.in_(chunk), now) for chunk in bulk.chunks(hosts))


def schedule_verification_of_settled(
    tx: sa.Connection, hosts: Collection[str], now: datetime
) -> int:
    """Schedule the verification of providers of hosts, except the providers that are stale.

    Return the number of scheduled providers.
    """
    settled = providers.c.stale_since.is_(None)
    return sum(
        _update_verify(tx, sa.and_(providers.c.host.in_(chunk), settled), now)
        for chunk in bulk.chunks(hosts)
    )


def hosts(tx: sa.Connection) -> Sequence[str]:
    """Return every host that has providers, sorted."""
    return tx.scalars(sa.select(providers.c.host).distinct().order_by(providers.c.host)).all()


def mark_stale_of_hosts(tx: sa.Connection, hosts: Collection[str], now: datetime) -> int:
    """Mark every provider of these hosts stale; return their number."""
    return sum(_update_stale(tx, providers.c.host.in_(chunk), now) for chunk in bulk.chunks(hosts))


def schedule_verification_of_old(
    tx: sa.Connection, cutoff: datetime, now: datetime, limit: int
) -> int:
    """Schedule the verification of up to ``limit`` providers unchanged since ``cutoff``.

    Return the number of these providers.
    """
    old = (
        sa.select(providers.c.id)
        .where(providers.c.stale_since.is_(None), providers.c.updated_at < cutoff)
        .order_by(providers.c.updated_at)
        .limit(limit)
    )
    ids = tx.scalars(old).all()
    settled = sa.and_(providers.c.id.in_(ids), providers.c.stale_since.is_(None))
    return _update_verify(tx, settled, now) if ids else 0


def _update_stale(tx: sa.Connection, condition: sa.ColumnElement[bool], now: datetime) -> int:
    return tx.execute(
        sa.update(providers)
        .where(condition)
        .values(
            revision=providers.c.revision + 1,
            stale_since=sa.func.coalesce(providers.c.stale_since, now),
            attempts=0,
            next_try_at=None,
            verify_only=False,
        )
    ).rowcount


def _update_verify(tx: sa.Connection, condition: sa.ColumnElement[bool], now: datetime) -> int:
    stale = providers.c.stale_since
    return tx.execute(
        sa.update(providers)
        .where(condition)
        # In this order, because MySQL assigns from left to right. A stale row is not only verified.
        .ordered_values(
            (
                providers.c.verify_only,
                sa.case((stale.is_(None), sa.true()), else_=providers.c.verify_only),
            ),
            (stale, sa.func.coalesce(stale, now)),
            (providers.c.attempts, 0),
            (providers.c.next_try_at, None),
        )
    ).rowcount


def lease(
    tx: sa.Connection, *, owner: str, now: datetime, until: datetime, limit: int
) -> list[LeasedProviderRow]:
    """Lease up to ``limit`` due stale providers, the longest stale first.

    Skip providers that another owner has leased. ``owner`` must be unique to each call, to
    distinguish the rows from those of an earlier lease of the same conductor.
    """
    due = sa.and_(
        providers.c.stale_since.is_not(None),
        sa.or_(providers.c.next_try_at.is_(None), providers.c.next_try_at <= now),
        sa.or_(providers.c.lease_until.is_(None), providers.c.lease_until < now),
    )
    columns = [providers.c[name] for name in LeasedProviderRow.__annotations__]
    select = sa.select(*columns).where(due).order_by(providers.c.stale_since, providers.c.id)
    select = select.limit(limit).with_for_update(skip_locked=True)
    found = fetch_all(LeasedProviderRow, tx.execute(select))
    if not found:
        return []
    chosen = providers.c.id.in_(sorted(row["id"] for row in found))
    query = sa.update(providers).where(chosen, due).values(owner=owner, lease_until=until)
    if tx.execute(query).rowcount == len(found):
        # The rows are unchanged: they are locked, or SQLite allows only this writer.
        return sorted(found, key=lambda row: row["id"])
    leased = sa.select(*columns).where(providers.c.owner == owner, chosen)
    return fetch_all(LeasedProviderRow, tx.execute(leased.order_by(providers.c.id)))


def record_published(
    tx: sa.Connection, owner: str, revisions: Mapping[str, int], now: datetime
) -> None:
    """Record the revisions that were published to Placement, by uuid.

    If a provider was changed during the publishing, it remains stale, but since ``now``: with the
    earlier time it would be published before all others, and look as if it was never published.
    """
    if not revisions:
        return
    tx.execute(
        sa.update(providers)
        .where(providers.c.uuid == sa.bindparam("provider"), providers.c.owner == owner)
        .values(
            published_revision=sa.bindparam("new_revision"),
            stale_since=sa.case(
                (providers.c.revision == sa.bindparam("new_revision"), None),
                else_=sa.literal(now, providers.c.stale_since.type),
            ),
            verify_only=False,
            error=None,
            attempts=0,
            next_try_at=None,
            owner=None,
            lease_until=None,
        ),
        [
            {"provider": uuid, "new_revision": revision}
            for uuid, revision in sorted(revisions.items())
        ],
    )


def delete_published(tx: sa.Connection, owner: str, revisions: Mapping[str, int]) -> None:
    """Delete providers that were deleted in Placement, unless their revision changed since."""
    if not revisions:
        return
    tx.execute(
        sa.delete(providers).where(
            providers.c.owner == owner,
            providers.c.uuid == sa.bindparam("provider"),
            providers.c.revision == sa.bindparam("deleted_revision"),
        ),
        [
            {"provider": uuid, "deleted_revision": revision}
            for uuid, revision in sorted(revisions.items())
        ],
    )
    release(tx, owner, revisions)


def record_failures(
    tx: sa.Connection, owner: str, errors: Iterable[tuple[str, str, datetime]]
) -> None:
    """Record failures, each (uuid, error, time of the next try)."""
    rows = [
        {"provider": uuid, "new_error": error, "new_next_try_at": next_try_at}
        for uuid, error, next_try_at in sorted(errors)
    ]
    if not rows:
        return
    values: dict[str, Any] = {
        "error": sa.bindparam("new_error"),
        "next_try_at": sa.bindparam("new_next_try_at"),
        "attempts": providers.c.attempts + 1,
        "owner": None,
        "lease_until": None,
    }
    tx.execute(
        sa.update(providers)
        .where(providers.c.uuid == sa.bindparam("provider"), providers.c.owner == owner)
        .values(**values),
        rows,
    )


def release_unanswered(tx: sa.Connection, failures: Iterable[tuple[str, str, str]]) -> None:
    """End leases of providers without an answer of Placement, and record their errors.

    A failure is (owner, provider uuid, error). The rows are due immediately, and the attempt is not
    counted, so that an outage of Placement causes no delay after its end.
    """
    rows = [
        {"leased_by": owner, "provider": uuid, "new_error": error}
        for owner, uuid, error in sorted(failures)
    ]
    if rows:
        tx.execute(
            sa.update(providers)
            .where(
                providers.c.uuid == sa.bindparam("provider"),
                providers.c.owner == sa.bindparam("leased_by"),
            )
            .values(error=sa.bindparam("new_error"), owner=None, lease_until=None),
            rows,
        )


def release(tx: sa.Connection, owner: str, uuids: Collection[str]) -> None:
    """End the lease of providers early, so that any conductor can lease them."""
    tx.execute(
        sa.update(providers)
        .where(providers.c.owner == owner, providers.c.uuid.in_(sorted(uuids)))
        .values(owner=None, lease_until=None)
    )
