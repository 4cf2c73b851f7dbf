# SPDX-License-Identifier: Apache-2.0
"""Write the owners of attach handles: claim and release.

A claim is one UPDATE with the guard that the handle has no owner; a release is one UPDATE guarded
by the owner. The column is UNIQUE, so a handle has at most one owner and an owner at most one
handle, whatever the callers do. The order of the steps of a bind:

::

    providers        read the deployables of the chosen providers, and their devices
    lock_unclaimed   lock free handles of them, one statement for each deployable
    claim            assign them, if the devices are still schedulable; all or none
    release          the reverse: clean handles at once, dirty ones after a job

The handles of a device set are claimed by ``db.device_sets.write.claim``, one UPDATE with the same
guard. Two other functions write owners, and neither gives a free handle to an ARQ.
``db.attachments.successors.exchange_handles`` exchanges the handles of ARQs that own some, under
the locks of the ARQs, so that it needs no guard of free handles. ``db.reference.writer`` inserts
handles with the owners of an imported database, before any conductor runs.

A handle is free if it has no owner, is not draining and does not need cleaning. ``needs_cleaning``
is set on handles that the host prepares, and on handles that it must sanitise after use. Such a
handle without an owner is dirty: a job must clean it before its next claim.

The statements of each boot are built once: SQLAlchemy needs more time to build such a statement
than a database to run it.
"""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.db import joins
from cyborg.db.deployables import facts
from cyborg.db.deployables.facts import DeviceFactsColumns
from cyborg.db.providers import write as publishing
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import arqs, deployables, devices, jobs, services, set_members
from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import providers as published_providers


class ClaimedProviderRow(DeviceFactsColumns):
    """Data that decide whether handles of a provider may be claimed.

    ``provider`` is the uuid of the provider, ``device`` the address of its device. ``set_size`` is
    the number of members of a device set, None for other deployables. ``has_members`` is whether
    handles of the deployable are members of sets: these are not claimed alone.
    """

    deployable_id: int
    provider: str
    address: str
    device: str
    device_uuid: str
    backend: str
    abilities: list[str]
    resource_class: str
    traits: list[str]
    host: str
    cordoned_since: datetime | None
    numa_node: int | None
    set_size: int | None
    has_members: bool


class FreeHandleRow(TypedDict):
    """A handle that can be claimed."""

    id: int
    uuid: str
    address: str
    info: dict[str, str]


class HandleStateRow(TypedDict):
    """A handle, with the reasons why it cannot be claimed.

    ``is_member`` is whether it is a member of device sets, and cannot be claimed alone.
    """

    id: int
    uuid: str
    deployable_id: int
    info: dict[str, str]
    taken: bool
    dirty: bool
    draining: bool
    is_member: bool


class DirtyHandleRow(TypedDict):
    """A handle to clean, with the addresses of its deployable and its device.

    ``set_id`` is the row id of the device set through which it was claimed, None for none.
    """

    id: int
    address: str
    deployable: str
    device: str
    backend: str
    host: str
    set_id: int | None


DIRTY_COLUMNS = row_columns(DirtyHandleRow, handles, devices, **joins.ADDRESSES)


class ReleasedHandleRow(DirtyHandleRow):
    """A handle that was released, with its last owner.

    ``is_member`` is whether it is a member of a device set now.
    """

    owner_id: int
    needs_cleaning: bool
    draining: bool
    rp_uuid: str
    is_member: bool


_IS_MEMBER = sa.exists(sa.select(set_members.c.id).where(set_members.c.handle_id == handles.c.id))
_RELEASED_COLUMNS = row_columns(
    ReleasedHandleRow,
    *(handles, devices, deployables),
    **joins.ADDRESSES,
    owner_id=handles.c.arq_id,
    is_member=_IS_MEMBER,
)
UNCLAIMED = (
    handles.c.arq_id.is_(None),
    sa.not_(handles.c.needs_cleaning),
    sa.not_(handles.c.draining),
)
_DEVICE_OF_HANDLE = (
    sa.select(deployables.c.id)
    .join(devices, devices.c.id == deployables.c.device_id)
    .where(
        deployables.c.id == handles.c.deployable_id,
        *map(sa.not_, facts.conditions("status", "cordoned", "restore_failed")),
    )
)
# The device is cordoned, and could be used otherwise.
USABLE = sa.exists(_DEVICE_OF_HANDLE.where(devices.c.cordoned_since.is_not(None)))
# The device is schedulable: the guard of a claim, equal to ``core.inventory.device_state``.
# The guard omits ``restore_failed``: if the restore fails after the candidates were read, the new
# bind has to prepare its own handle, and fails too. MariaDB would lock the jobs that it reads here.
SCHEDULABLE = sa.exists(
    _DEVICE_OF_HANDLE.where(*(sa.not_(facts.CONDITIONS[n]) for n in ("status", "cordoned")))
)
# The set through which a handle was claimed can be used. Its offer does not count: Placement has
# allocated it already, or has it reserved because it is allocated.
_SET_SCHEDULABLE = sa.or_(
    handles.c.set_id.is_(None),
    sa.exists(
        sa.select(deployables.c.id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(
            deployables.c.id == handles.c.set_id,
            *map(sa.not_, facts.conditions("restore_failed", "withheld")),
        )
    ),
)
_PUBLISHED = sa.exists(
    sa.select(published_providers.c.id).where(
        published_providers.c.uuid == deployables.c.rp_uuid,
        # A revision of 0: no publisher has written it to Placement yet.
        published_providers.c.published_revision > 0,
    )
)
_PUBLISHED_HANDLE = sa.exists(
    sa.select(deployables.c.id).where(deployables.c.id == handles.c.deployable_id, _PUBLISHED)
)
_HAS_MEMBERS = sa.exists(
    sa.select(set_members.c.id)
    .join(handles, handles.c.id == set_members.c.handle_id)
    .where(handles.c.deployable_id == deployables.c.id)
)


# SELECT d.id, d.rp_uuid, ..., dev.status, dev.health, ...
#   FROM deployables d JOIN devices dev ON dev.id = d.device_id
#  WHERE d.rp_uuid IN (:uuids) ORDER BY d.id
_PROVIDERS = (
    sa.select(
        deployables.c.id.label("deployable_id"),
        deployables.c.rp_uuid.label("provider"),
        deployables.c.address,
        devices.c.address.label("device"),
        devices.c.uuid.label("device_uuid"),
        devices.c.backend,
        devices.c.abilities,
        deployables.c.resource_class,
        deployables.c.traits,
        *facts.columns(),
        devices.c.host,
        devices.c.cordoned_since,
        devices.c.numa_node,
        deployables.c.set_size,
        _HAS_MEMBERS.label("has_members"),
    )
    .join(devices, devices.c.id == deployables.c.device_id)
    .where(deployables.c.rp_uuid.in_(sa.bindparam("uuids", expanding=True)))
    .order_by(deployables.c.id)
)


def providers(tx: sa.Connection, uuids: Collection[str]) -> list[ClaimedProviderRow]:
    """Return the data that decide whether handles may be claimed, one row for each provider."""
    return fetch_all(ClaimedProviderRow, tx.execute(_PROVIDERS, {"uuids": sorted(uuids)}))


# SELECT id, uuid, address, info FROM attach_handles FORCE INDEX (...)    -- the hint on MariaDB
#  WHERE deployable_id = :deployable_id
#    AND arq_id IS NULL AND NOT needs_cleaning AND NOT draining
#  LIMIT :max_handles FOR UPDATE SKIP LOCKED
_CLAIM_INDEX = "ix_attach_handles_deployable_id_arq_id_needs_cleaning_draining"
_CHOOSE_UNCLAIMED = (
    sa.select(*row_columns(FreeHandleRow, handles))
    # Otherwise MariaDB scans the free handles of the whole cloud and filters by deployable: a scan
    # that grows with the cloud and locks handles that concurrent claims then skip.
    .with_hint(handles, f"FORCE INDEX ({_CLAIM_INDEX})", "mysql")
    .where(
        handles.c.deployable_id == sa.bindparam("deployable_id", type_=sa.BigInteger), *UNCLAIMED
    )
    .limit(sa.bindparam("max_handles", type_=sa.Integer))
)
_LOCK_UNCLAIMED = _CHOOSE_UNCLAIMED.with_for_update(skip_locked=True)
# Only a waiting query can deadlock, so only it needs an order, which costs a worse plan.
_LOCK_UNCLAIMED_WAITING = _CHOOSE_UNCLAIMED.order_by(handles.c.id).with_for_update()


def lock_unclaimed(
    tx: sa.Connection,
    deployable_id: int,
    limit: int,
    *,
    wait: bool,
    handle: str | None = None,
    has_members: bool = False,
) -> list[FreeHandleRow]:
    """Return up to ``limit`` free handles, locked; ``handle`` is the uuid of the only one to lock.

    With ``has_members``, leave out the members of device sets.

    Without ``wait``, skip handles that another transaction has locked, so that concurrent claims
    lock different handles and do not wait for each other. A skipped handle becomes free again if
    that transaction fails, so only with ``wait`` a lack of handles is certain. SQLite allows one
    writer at a time and has no row locks.
    """
    query = _LOCK_UNCLAIMED_WAITING if wait else _LOCK_UNCLAIMED
    if handle is not None:
        # Not built once: seldom does a caller ask for one accelerator.
        query = query.where(handles.c.uuid == handle)
    if has_members:
        query = query.where(sa.not_(_IS_MEMBER))
    values = {"deployable_id": deployable_id, "max_handles": limit}
    return fetch_all(FreeHandleRow, tx.execute(query, values))


# UPDATE attach_handles SET arq_id = :new_arq_id, needs_cleaning = :new_dirty
#  WHERE id = :old_id
#    AND arq_id IS NULL AND NOT needs_cleaning AND NOT draining
#    AND EXISTS (SELECT ... its deployable and its device, schedulable)
#    AND NOT EXISTS (SELECT ... a set of which it is a member)
# One handle, as in most calls: a CASE for each of several handles is another text each time.
_CLAIM_ONE = (
    sa.update(handles)
    .where(
        handles.c.id == sa.bindparam("old_id", type_=sa.BigInteger),
        *UNCLAIMED,
        SCHEDULABLE,
        sa.not_(_IS_MEMBER),
    )
    .values(
        arq_id=sa.bindparam("new_arq_id", type_=sa.BigInteger),
        # The guard: it is False before.
        needs_cleaning=sa.bindparam("new_dirty", type_=sa.Boolean),
    )
)


def claim(
    tx: sa.Connection,
    owners: Mapping[int, int],
    *,
    needs_cleaning: Collection[int] = (),
    published: bool = False,
    honoured: Collection[int] = (),
) -> int:
    """Assign each handle to its ARQ in ``owners``, by row id; return how many were assigned.

    Set ``needs_cleaning`` of these handles: whatever the result of the host work, they are cleaned
    before their next claim. The guard checks the device again: if the device was cordoned after the
    candidates were read, its handle is not assigned, nor one that has become a member of device
    sets. With ``published``, nor is one of a provider that Placement does not have. For the
    deployables ``honoured``, given by row ids, the cordon of a device that can be used does not
    count.
    """
    if len(owners) == 1 and not published and not honoured:
        ((handle_id, arq_id),) = owners.items()
        dirty = handle_id in needs_cleaning
        parameters = {"old_id": handle_id, "new_arq_id": arq_id, "new_dirty": dirty}
        return tx.execute(_CLAIM_ONE, parameters).rowcount
    schedulable: sa.ColumnElement[bool] = SCHEDULABLE
    if honoured:
        is_honoured = handles.c.deployable_id.in_(sorted(honoured))
        schedulable = sa.or_(SCHEDULABLE, sa.and_(is_honoured, USABLE))
    guard = [handles.c.id.in_(sorted(owners)), *UNCLAIMED, schedulable, sa.not_(_IS_MEMBER)]
    if published:
        guard.append(_PUBLISHED_HANDLE)
    values: dict[str, Any] = {"arq_id": sa.case(owners, value=handles.c.id)}
    if needs_cleaning:
        values["needs_cleaning"] = handles.c.id.in_(sorted(needs_cleaning))
    return tx.execute(sa.update(handles).where(*guard).values(**values)).rowcount


def lock_schedulable(tx: sa.Connection, arq_ids: Collection[int]) -> int:
    """Lock the handles of ARQs that could be claimed if they had no owner; return their number.

    The guard is the same as in ``claim``, except that the handles are owned and prepared. Those of
    a device set count only if the source of the set can be used, too.
    """
    owned = handles.c.arq_id.in_(sorted(arq_ids))
    # An update that changes nothing, instead of a read: it sees what concurrent transactions have
    # committed. Its row count also has rows that get the values that they have.
    guard = (sa.not_(handles.c.draining), SCHEDULABLE, _SET_SCHEDULABLE)
    query = sa.update(handles).where(owned, *guard)
    return tx.execute(query.values(arq_id=handles.c.arq_id)).rowcount


# UPDATE attach_handles SET arq_id = NULL
#  WHERE arq_id IN (:arq_ids) AND NOT needs_cleaning AND NOT draining AND set_id IS NULL
#    AND NOT EXISTS (SELECT ... a set of which it is a member)
_RELEASE_CLEAN = (
    sa.update(handles)
    .where(
        handles.c.arq_id.in_(sa.bindparam("arq_ids", expanding=True)),
        sa.not_(handles.c.needs_cleaning),
        sa.not_(handles.c.draining),
        handles.c.set_id.is_(None),
        sa.not_(_IS_MEMBER),
    )
    .values(arq_id=None)
)


def release(tx: sa.Connection, arq_ids: Collection[int], now: datetime) -> list[ReleasedHandleRow]:
    """Release the handles of ARQs, which the caller must have locked.

    Return the handles that leave work to do: the dirty ones and, dirty or not, those that were
    claimed through a device set or are members of one.

    A draining handle remains, without an owner, until the next report deletes it
    (``services.write.request_stale_reports`` requests it); its provider is marked stale. So is that
    of a handle that was claimed alone before it became a member of device sets.
    """
    freed = tx.execute(_RELEASE_CLEAN, {"arq_ids": sorted(arq_ids)}).rowcount
    # All were clean, as for most servers: no further statement.
    if freed == len(arq_ids):
        return []
    owned = handles.c.arq_id.in_(arq_ids)
    query = (
        sa.select(*_RELEASED_COLUMNS).select_from(joins.HANDLES).where(owned).order_by(handles.c.id)
    )
    rows = fetch_all(ReleasedHandleRow, tx.execute(query))
    # The ARQs that are left own no handle.
    if not rows:
        return []
    tx.execute(
        sa.update(handles)
        .where(handles.c.id.in_([row["id"] for row in rows]), owned)
        # The set stays until the handle is clean: the cleaning includes the work of the set.
        .values(arq_id=None, set_id=sa.case((handles.c.needs_cleaning, handles.c.set_id)))
    )
    stale_providers = {
        row["rp_uuid"]
        for row in rows
        if row["draining"] or (row["is_member"] and row["set_id"] is None)
    }
    if stale_providers:
        publishing.mark_stale_existing(tx, stale_providers, now)
    return [
        row
        for row in rows
        if row["needs_cleaning"] or row["set_id"] is not None or row["is_member"]
    ]


def any_cleaning(tx: sa.Connection, uuids: Collection[str], now: datetime) -> bool:
    """Return whether a caller has to wait for the cleaning of one of these handles.

    A job does not count after its deadline: it may end much later, when its host has returned.
    """
    query = (
        sa.select(handles.c.id)
        .join(jobs, jobs.c.id == handles.c.job_id)
        .where(
            handles.c.uuid.in_(sorted(uuids)),
            handles.c.arq_id.is_(None),
            handles.c.needs_cleaning,
            sa.or_(jobs.c.deadline.is_(None), jobs.c.deadline > now),
        )
    )
    return tx.scalar(query.limit(1)) is not None


def find_cleaning(tx: sa.Connection, ids: Collection[int], now: datetime) -> set[int]:
    """Return which of these handles, by row id, are dirty and have a job that may clean them soon.

    That is a job that has not failed, before its deadline, on a host whose agent is not down.
    """
    query = (
        sa.select(handles.c.id)
        .join(jobs, jobs.c.id == handles.c.job_id)
        .join(deployables, deployables.c.id == handles.c.deployable_id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(services, joins.AGENT_OF_DEVICE)
        .where(
            handles.c.id.in_(sorted(ids)),
            handles.c.arq_id.is_(None),
            handles.c.needs_cleaning,
            jobs.c.error.is_(None),
            sa.or_(jobs.c.deadline.is_(None), jobs.c.deadline > now),
            services.c.down_since.is_(None),
        )
    )
    return set(tx.scalars(query))


def all_handles(tx: sa.Connection, deployable_ids: Collection[int]) -> list[HandleStateRow]:
    """Return every handle of the deployables with the reasons why it cannot be claimed, if any."""
    owned = handles.c.arq_id.is_not(None)
    dirty = sa.and_(handles.c.needs_cleaning, sa.not_(owned))
    others = {"taken": owned, "dirty": dirty, "is_member": _IS_MEMBER}
    query = sa.select(*row_columns(HandleStateRow, handles, **others))
    query = query.where(handles.c.deployable_id.in_(deployable_ids)).order_by(handles.c.id)
    return fetch_all(HandleStateRow, tx.execute(query))


def any_unavailable(tx: sa.Connection, uuids: Collection[str]) -> bool:
    """Return whether the agent of a provider's host is down, or Placement lacks a provider."""
    query = (
        sa.select(deployables.c.id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(services, joins.AGENT_OF_DEVICE)
        .where(
            deployables.c.rp_uuid.in_(sorted(uuids)),
            sa.or_(services.c.down_since.is_not(None), sa.not_(_PUBLISHED)),
        )
    )
    return tx.scalar(query.limit(1)) is not None


def count_owned(
    tx: sa.Connection, deployable_ids: Collection[int], instance: str
) -> dict[int, int]:
    """Return how many handles of each deployable an instance owns, by the deployable's row id.

    Those that were claimed through a device set count for the set.
    """
    claimed_id = sa.func.coalesce(handles.c.set_id, handles.c.deployable_id)
    query = (
        sa.select(claimed_id.label("claimed_id"), sa.func.count().label("number"))
        .join(arqs, arqs.c.id == handles.c.arq_id)
        .where(claimed_id.in_(sorted(deployable_ids)), arqs.c.instance_uuid == instance)
        .group_by(claimed_id)
    )
    return {row.claimed_id: row.number for row in tx.execute(query)}
