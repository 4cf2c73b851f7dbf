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
from typing import NamedTuple, TypedDict

import sqlalchemy as sa

from cyborg.db import bulk
from cyborg.db.providers.assignments import Assignments, stale_values, verify_values
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import deployables, devices, providers

UUID_INDEX = "uq_providers_uuid"


class LeasedProviderRow(TypedDict):
    """A stale provider to publish.

    ``published_revision`` is 0 if the provider was never published. ``error`` is the error of the
    last attempt, None if there was none. If ``evict`` is True, the provider is deleted together
    with what consumers have allocated of it.
    """

    id: int
    uuid: str
    name: str
    host: str
    revision: int
    published_revision: int
    verify_only: bool
    evict: bool
    attempts: int
    error: str | None


class VerifiedProviderRow(TypedDict):
    """A provider that is not stale, with its state in Placement at the last comparison."""

    id: int
    uuid: str
    name: str
    host: str
    verified_at: datetime
    placement_generation: int | None
    placement_parent: str | None
    compared_at: datetime | None


class PlacementState(NamedTuple):
    """Generation and parent of a provider in Placement when it had the desired state."""

    generation: int | None
    parent: str | None


class Published(NamedTuple):
    """Result of publishing: the published revision and the state in Placement after it."""

    revision: int
    state: PlacementState


def mark_stale(tx: sa.Connection, host: str, changed: Mapping[str, str], now: datetime) -> None:
    """Mark providers of a host stale; insert a row for a provider that has none.

    ``changed`` maps the uuids of the providers to their names.
    """
    stored: set[str] = set()
    for chunk in bulk.chunks(sorted(changed)):
        # The UPDATE comes first, so that a publisher cannot delete a row that is marked here.
        if _update_in_order(tx, chunk, stale_values(now)) == len(chunk):
            # All have a row, as usual: no SELECT is needed.
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


def find_uuids(tx: sa.Connection, names: Collection[str]) -> dict[str, str]:
    """Return the uuids of existing providers by name.

    The uuid of a provider that was imported is not ``naming.provider_uuid``.
    """
    uuids: dict[str, str] = {}
    for chunk in bulk.chunks(sorted(names)):
        query = sa.select(providers.c.name, providers.c.uuid).where(providers.c.name.in_(chunk))
        uuids |= {str(row.name): str(row.uuid) for row in tx.execute(query)}
    return uuids


def mark_stale_existing(tx: sa.Connection, uuids: Collection[str], now: datetime) -> int:
    """Mark providers stale, without inserting missing rows; return the number of marked rows."""
    return _update_in_order(tx, uuids, stale_values(now))


def mark_stale_of_devices(tx: sa.Connection, device_uuids: Collection[str], now: datetime) -> int:
    """Mark every provider of these devices stale; return their number."""
    # MariaDB before 11.1 would run a subquery of an UPDATE once for each row of the table.
    query = (
        sa.select(deployables.c.rp_uuid)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(devices.c.uuid.in_(sorted(device_uuids)))
    )
    return mark_stale_existing(tx, tx.scalars(query).all(), now)


def schedule_verification_of_hosts(tx: sa.Connection, hosts: Collection[str], now: datetime) -> int:
    """Schedule the verification of every provider of these hosts; return their number."""
    return _update_in_order(tx, _uuids_of_hosts(tx, hosts), verify_values(now))


def schedule_verification_of_settled(
    tx: sa.Connection, hosts: Collection[str], now: datetime
) -> int:
    """Schedule the verification of providers of hosts, except the providers that are stale.

    Return the number of scheduled providers.
    """
    settled = providers.c.stale_since.is_(None)
    uuids = _uuids_of_hosts(tx, hosts, settled)
    return _update_in_order(tx, uuids, verify_values(now), settled)


def hosts(tx: sa.Connection) -> Sequence[str]:
    """Return every host that has providers, sorted."""
    return tx.scalars(sa.select(providers.c.host).distinct().order_by(providers.c.host)).all()


def mark_stale_of_hosts(tx: sa.Connection, hosts: Collection[str], now: datetime) -> int:
    """Mark every provider of these hosts stale; return their number."""
    return mark_stale_existing(tx, _uuids_of_hosts(tx, hosts), now)


def mark_others_stale(tx: sa.Connection, host: str, now: datetime) -> int:
    """Mark the providers of a host stale that are not stale since ``now``; return their number.

    The others are new, or the transaction of the caller has marked them already.
    """
    is_other = sa.or_(providers.c.stale_since.is_(None), providers.c.stale_since != now)
    return mark_stale_existing(tx, _uuids_of_hosts(tx, [host], is_other), now)


def mark_removed(tx: sa.Connection, host: str, now: datetime, *, evict: bool) -> int:
    """Mark every provider of a removed host stale; return their number.

    With ``evict``, the publisher also deletes what consumers have allocated of them. A later report
    of the host cancels that.
    """
    return _update_in_order(tx, _uuids_of_hosts(tx, [host]), stale_values(now, evict=evict))


def may_evict(tx: sa.Connection, uuid: str) -> bool:
    """Return whether a publisher may delete what consumers have allocated of a provider."""
    return bool(tx.scalar(sa.select(providers.c.evict).where(providers.c.uuid == uuid)))


def count_verified(tx: sa.Connection) -> int:
    """Return the number of providers that are not stale."""
    verified = sa.select(sa.func.count()).where(providers.c.verified_at.is_not(None))
    return tx.scalar(verified) or 0


def lease_for_verification(
    tx: sa.Connection, *, owner: str, before: datetime, now: datetime, until: datetime, limit: int
) -> list[VerifiedProviderRow]:
    """Lease the providers of the hosts that were verified longest ago, and at or before ``before``.

    All providers of a host that are not stale are leased together, since one call to Placement
    lists them all. So there may be more than ``limit`` rows, or fewer.
    """
    p = providers.c
    free = sa.or_(p.lease_until.is_(None), p.lease_until < now)
    oldest = (
        sa.select(p.host)
        .where(p.verified_at <= before, free)
        .order_by(p.verified_at, p.id)
        .limit(limit)
    )
    due_hosts = sorted(set(tx.scalars(oldest)))
    if not due_hosts:
        return []
    columns = row_columns(VerifiedProviderRow, providers)
    leasable = sa.and_(p.verified_at.is_not(None), free)
    query = sa.select(*columns).where(p.host.in_(due_hosts), leasable).order_by(p.id)
    query = query.with_for_update(skip_locked=True)
    rows = fetch_all(VerifiedProviderRow, tx.execute(query))
    lease_rows = sa.update(providers).where(p.id.in_([row["id"] for row in rows]), leasable)
    leased = tx.execute(lease_rows.values(owner=owner, lease_until=until)).rowcount
    # The rows are locked. If any was taken nevertheless, the lease ends unused.
    return rows if leased == len(rows) else []


def record_unchanged(tx: sa.Connection, owner: str, ids: Collection[int], now: datetime) -> None:
    """Record that leased providers have the generation of their last comparison."""
    values = {"verified_at": now, "owner": None, "lease_until": None}
    bulk.update_where(tx, providers.c.id, sorted(ids), providers.c.owner == owner, **values)


def record_compared(
    tx: sa.Connection, owner: str, states: Mapping[int, PlacementState], now: datetime
) -> None:
    """Record that leased providers, by row id, have the desired contents in Placement."""
    p = providers.c
    columns = {"id": p.id, "generation": p.placement_generation, "parent": p.placement_parent}
    rows = [{"id": row_id, **state._asdict()} for row_id, state in sorted(states.items())]
    for compared in bulk.make_tables(tx, columns, rows):
        tx.execute(
            sa.update(providers)
            .where(p.id == compared.c.id, p.owner == owner)
            .values(
                placement_generation=compared.c.generation,
                placement_parent=compared.c.parent,
                compared_at=now,
                verified_at=now,
                owner=None,
                lease_until=None,
            )
        )


def schedule_verification_of_leased(
    tx: sa.Connection, owner: str, ids: Collection[int], now: datetime
) -> int:
    """Schedule the verification of leased providers by a publisher; return their number."""
    owned = providers.c.owner == owner
    query = sa.update(providers).where(owned).ordered_values(*verify_values(now))
    return sum(
        tx.execute(query.where(providers.c.id.in_(chunk))).rowcount
        for chunk in bulk.chunks(sorted(ids))
    )


def _uuids_of_hosts(
    tx: sa.Connection, hosts: Collection[str], *conditions: sa.ColumnElement[bool]
) -> list[str]:
    """Return the uuids of the providers of hosts that meet the conditions."""
    query = sa.select(providers.c.uuid).where(*conditions)
    parts = (query.where(providers.c.host.in_(chunk)) for chunk in bulk.chunks(hosts))
    return [uuid for part in parts for uuid in tx.scalars(part)]


def _update_in_order(
    tx: sa.Connection,
    uuids: Collection[str],
    assignments: Assignments,
    *conditions: sa.ColumnElement[bool],
) -> int:
    """Update the providers with these uuids that meet the conditions; return their number.

    The rows are locked in the order of the uuids, as by ``device_sets.offers.lock_current``. In
    another order, such as that of an UPDATE by host, each of two transactions could wait for a row
    that the other one has locked.
    """
    p = providers.c
    query = sa.update(providers).ordered_values(*assignments)
    # MariaDB locks the rows in the order of the index that it reads: not that of the row ids.
    query = query.with_hint(f"FORCE INDEX ({UUID_INDEX})", dialect_name="mysql")
    count = 0
    for chunk in bulk.chunks(sorted(uuids)):
        chosen = sa.and_(p.uuid.in_(chunk), *conditions)
        if tx.dialect.name == "postgresql":
            # An UPDATE alone would lock the rows of a small table in the order of their place.
            locked = sa.select(p.id).where(chosen).order_by(p.uuid)
            chosen = p.id == locked.with_for_update(key_share=True).subquery("locked").c.id
        count += tx.execute(query.where(chosen)).rowcount
    return count


def lease(
    tx: sa.Connection,
    *,
    owner: str,
    now: datetime,
    until: datetime,
    limit: int,
    excluded: Collection[int] = (),
) -> list[LeasedProviderRow]:
    """Lease up to ``limit`` due stale providers, the longest stale first.

    Skip the rows with ``excluded`` ids, and providers that another owner has leased. ``owner`` must
    be unique to each call, to distinguish the rows from those of an earlier lease of the same
    conductor.
    """
    due = sa.and_(
        providers.c.stale_since.is_not(None),
        sa.or_(providers.c.next_try_at.is_(None), providers.c.next_try_at <= now),
        sa.or_(providers.c.lease_until.is_(None), providers.c.lease_until < now),
    )
    # SELECT ... FROM providers WHERE stale_since IS NOT NULL AND (next_try_at IS NULL OR <= :now)
    #    AND (lease_until IS NULL OR < :now) ORDER BY stale_since, id LIMIT :limit
    #    FOR UPDATE SKIP LOCKED           -- publishers share the stale providers without waiting
    columns = row_columns(LeasedProviderRow, providers)
    select = sa.select(*columns).where(due).order_by(providers.c.stale_since, providers.c.id)
    if excluded:
        select = select.where(providers.c.id.not_in(sorted(excluded)))
    select = select.limit(limit).with_for_update(skip_locked=True)
    rows = fetch_all(LeasedProviderRow, tx.execute(select))
    if not rows:
        return []
    chosen = providers.c.id.in_(sorted(row["id"] for row in rows))
    query = sa.update(providers).where(chosen, due).values(owner=owner, lease_until=until)
    if tx.execute(query).rowcount == len(rows):
        # The rows are unchanged: they are locked, or SQLite allows only this writer.
        return sorted(rows, key=lambda row: row["id"])
    # Another publisher has taken some: only the rows with the owner of this call are leased.
    leased = sa.select(*columns).where(providers.c.owner == owner, chosen)
    return fetch_all(LeasedProviderRow, tx.execute(leased.order_by(providers.c.id)))


def read_leased(tx: sa.Connection, owner: str, ids: Collection[int]) -> list[LeasedProviderRow]:
    """Return the rows, of these row ids, that the owner still leases, as they are now."""
    leased = sa.and_(providers.c.id.in_(sorted(ids)), providers.c.owner == owner)
    query = sa.select(*row_columns(LeasedProviderRow, providers)).where(leased)
    return fetch_all(LeasedProviderRow, tx.execute(query.order_by(providers.c.id)))


def record_published(
    tx: sa.Connection, owner: str, results: Mapping[str, Published], now: datetime
) -> None:
    """Record what was published to Placement, by uuid.

    If a provider was changed during the publishing, it remains stale, but since ``now``: with the
    earlier time it would be published before all others, and look as if it was never published.
    """
    p = providers.c
    rows = [
        {"uuid": uuid, "revision": result.revision, **result.state._asdict()}
        for uuid, result in sorted(results.items())
    ]
    columns = {
        "uuid": p.uuid,
        "revision": p.revision,
        "generation": p.placement_generation,
        "parent": p.placement_parent,
    }
    # With a type: PostgreSQL cannot know that of a parameter in CASE.
    time = sa.literal(now, p.stale_since.type)
    for published in bulk.make_tables(tx, columns, rows):
        is_current = p.revision == published.c.revision
        tx.execute(
            sa.update(providers)
            .where(p.uuid == published.c.uuid, p.owner == owner)
            .values(
                published_revision=published.c.revision,
                stale_since=sa.case((is_current, None), else_=time),
                verified_at=sa.case((is_current, time), else_=None),
                placement_generation=published.c.generation,
                placement_parent=published.c.parent,
                compared_at=now,
                verify_only=False,
                error=None,
                attempts=0,
                next_try_at=None,
                owner=None,
                lease_until=None,
            )
        )


def delete_published(tx: sa.Connection, owner: str, revisions: Mapping[str, int]) -> None:
    """Delete providers that were deleted in Placement, unless their revision changed since."""
    if not revisions:
        return
    p = providers.c
    unchanged = sa.tuple_(p.uuid, p.revision).in_(sorted(revisions.items()))
    # The first condition has an index on every database.
    tx.execute(
        sa.delete(providers).where(p.uuid.in_(sorted(revisions)), p.owner == owner, unchanged)
    )
    # The rows that have changed meanwhile remain, and are due at once.
    release(tx, owner, revisions)


class Failure(NamedTuple):
    """Why the provider with a uuid was not published, and the time of the next try.

    ``revision`` and ``attempts`` are those of the lease.
    """

    uuid: str
    revision: int
    attempts: int
    error: str
    next_try_at: datetime


def record_failures(tx: sa.Connection, owner: str, failures: Iterable[Failure]) -> None:
    """Record failures, and end the leases of their providers.

    A provider that was changed since is due at once, and so is one whose verification was scheduled
    since, which has set its attempts to 0.
    """
    p = providers.c
    columns = {name: p[name] for name in Failure._fields}
    rows = [failure._asdict() for failure in sorted(failures)]
    for failed in bulk.make_tables(tx, columns, rows):
        is_unchanged = sa.and_(p.revision == failed.c.revision, p.attempts == failed.c.attempts)
        tx.execute(
            sa.update(providers)
            .where(p.uuid == failed.c.uuid, p.owner == owner)
            # MySQL assigns from left to right: the time must be the first.
            .ordered_values(
                (p.next_try_at, sa.case((is_unchanged, failed.c.next_try_at))),
                (p.error, failed.c.error),
                (p.attempts, p.attempts + 1),
                (p.owner, None),
                (p.lease_until, None),
            )
        )


class Unanswered(NamedTuple):
    """A provider that ``owner`` has leased, and for which Placement gave no answer."""

    owner: str
    uuid: str
    error: str


def release_unanswered(tx: sa.Connection, failures: Iterable[Unanswered]) -> None:
    """End leases of providers without an answer of Placement, and record their errors.

    The rows are due immediately, and the attempt is not counted, so that an outage of Placement
    causes no delay after its end.
    """
    p = providers.c
    columns = {name: p[name] for name in Unanswered._fields}
    rows = [failure._asdict() for failure in sorted(failures)]
    for failed in bulk.make_tables(tx, columns, rows):
        tx.execute(
            sa.update(providers)
            .where(p.uuid == failed.c.uuid, p.owner == failed.c.owner)
            .values(error=failed.c.error, owner=None, lease_until=None)
        )


def release(tx: sa.Connection, owner: str, uuids: Collection[str]) -> None:
    """End the lease of providers early, so that any conductor can lease them."""
    tx.execute(
        sa.update(providers)
        .where(providers.c.owner == owner, providers.c.uuid.in_(sorted(uuids)))
        .values(owner=None, lease_until=None)
    )
