# SPDX-License-Identifier: Apache-2.0
"""Write device sets: which handles are members, and who owns all members of a set.

A handle has one owner (``attach_handles.arq_id``), whatever set it is claimed through, so that two
overlapping sets never have owners at the same time. ``attach_handles.set_id`` is the set of the
claim. It is kept until the handle is clean: the work of the set on its host, such as the end of a
fabric partition, is part of the cleaning.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import sqlalchemy as sa

from cyborg.core.errors import InUse
from cyborg.core.inventory.device import Ability
from cyborg.core.inventory.device_set import DeviceSet, SetMember
from cyborg.core.jobs.job import WorkItem
from cyborg.db import bulk, joins
from cyborg.db.binding.claims import (
    SCHEDULABLE,
    UNCLAIMED,
    USABLE,
    FreeHandleRow,
    HandleStateRow,
)
from cyborg.db.deployables import facts
from cyborg.db.deployables.facts import DeviceFactsColumns
from cyborg.db.providers import write as publishing
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import arqs, deployables, devices, set_members
from cyborg.db.schema import attach_handles as handles


class MemberRow(FreeHandleRow, DeviceFactsColumns):
    """A free member of a set: its handle, its addresses, and the facts of its device."""

    deployable: str
    device: str
    device_uuid: str
    backend: str
    abilities: list[str]


class MemberDeviceRow(NamedTuple):
    """The device of a member: what its backend can do, and since when it is cordoned."""

    abilities: list[str]
    status: str
    cordoned: bool
    cordoned_since: datetime | None


class _Membership(NamedTuple):
    """The row ids of a set and of a handle that is its member."""

    deployable_id: int
    handle_id: int


_MEMBERSHIP = sa.select(set_members.c.id).where(set_members.c.handle_id == handles.c.id)
_ADDRESSES = [column.label(name) for name, column in joins.ADDRESSES.items()]
_MEMBERS = (
    set_members.join(handles, handles.c.id == set_members.c.handle_id)
    .join(deployables, deployables.c.id == handles.c.deployable_id)
    .join(devices, devices.c.id == deployables.c.device_id)
)
_MEMBER_COLUMNS = row_columns(
    MemberRow,
    *(handles, devices),
    **joins.ADDRESSES,
    **facts.COLUMNS,
    device_uuid=devices.c.uuid,
)


def sync_members(tx: sa.Connection, host: str) -> set[str]:
    """Make the members of the sets of a host equal to the reported ones.

    Return the uuids of the providers whose inventory this may change: those of the sets and those
    of the handles. Execute two statements if nothing differs, and two more at most.
    """
    set_rows = tx.execute(
        sa.select(deployables.c.id, deployables.c.rp_uuid, deployables.c.device_set).where(
            deployables.c.host == host, deployables.c.set_size.is_not(None)
        )
    ).all()
    # A handle without sets has one row, any other handle a row for each of its sets.
    handle_rows = tx.execute(
        sa.select(
            *(handles.c.id, handles.c.address, deployables.c.rp_uuid, *_ADDRESSES),
            set_members.c.id.label("membership"),
            set_members.c.deployable_id.label("set_id"),
        )
        .select_from(joins.HANDLES.outerjoin(set_members, set_members.c.handle_id == handles.c.id))
        .where(devices.c.host == host)
    ).all()
    handle_ids = {SetMember(row.device, row.deployable, row.address): row.id for row in handle_rows}
    membership_ids = {
        _Membership(row.set_id, row.id): row.membership
        for row in handle_rows
        if row.set_id is not None
    }
    stored = set(membership_ids)
    reported = {
        _Membership(row.id, handle_ids[member])
        for row in set_rows
        for member in DeviceSet.from_dict(row.device_set).members
        # A reported member may not be present on the host.
        if member in handle_ids
    }
    bulk.delete(tx, set_members, sorted(membership_ids[key] for key in stored - reported))
    bulk.insert(tx, set_members, [key._asdict() for key in sorted(reported - stored)])
    changed = stored ^ reported
    changed_sets = {key.deployable_id for key in changed}
    changed_handles = {key.handle_id for key in changed}
    return {row.rp_uuid for row in set_rows if row.id in changed_sets} | {
        row.rp_uuid for row in handle_rows if row.id in changed_handles
    }


def providers_of_members(tx: sa.Connection, set_ids: Collection[int]) -> set[str]:
    """Return the uuids of the providers of the handles that are members of these sets."""
    m = set_members.c
    query = sa.select(deployables.c.rp_uuid).select_from(_MEMBERS).distinct()
    return set(tx.scalars(query.where(m.deployable_id.in_(sorted(set_ids)))))


def member_devices(tx: sa.Connection, set_ids: Collection[int]) -> dict[int, list[MemberDeviceRow]]:
    """Return the devices of all members, by the row id of the set."""
    query = (
        sa.select(set_members.c.deployable_id, *row_columns(MemberDeviceRow, devices))
        .select_from(_MEMBERS)
        .where(set_members.c.deployable_id.in_(sorted(set_ids)))
    )
    devices_by_set = defaultdict[int, list[MemberDeviceRow]](list)
    for set_id, *fields in tx.execute(query):
        devices_by_set[set_id].append(MemberDeviceRow(*fields))
    return dict(devices_by_set)


def lock_unclaimed(tx: sa.Connection, set_id: int, *, wait: bool) -> list[MemberRow]:
    """Return the free members of a set, locked, in the order of their row ids.

    Without ``wait``, skip members that another transaction has locked.
    """
    members = sa.select(set_members.c.handle_id).where(set_members.c.deployable_id == set_id)
    # Only the handles: FOR UPDATE of a join locks the rows of devices, too, on MariaDB.
    query = sa.select(handles.c.id).where(handles.c.id.in_(members), *UNCLAIMED)
    query = query.order_by(handles.c.id).with_for_update(skip_locked=not wait)
    locked = tx.scalars(query).all()
    rows = sa.select(*_MEMBER_COLUMNS).select_from(joins.HANDLES).where(handles.c.id.in_(locked))
    return fetch_all(MemberRow, tx.execute(rows.order_by(handles.c.id)))


def claim(
    tx: sa.Connection,
    set_id: int,
    owners: Mapping[int, int],
    *,
    needs_cleaning: Collection[int],
    is_honoured: bool,
) -> int:
    """Assign each member of a set to its ARQ in ``owners``, by row id; return their number.

    The guard checks the device of each member and that of the set again, and that each is still a
    member. If ``is_honoured``, the cordons of devices that can be used do not count. The caller
    compares the number with the size of the set: all or none. Raise oslo.db's DBReferenceError if
    the set is deleted concurrently.
    """
    # UPDATE attach_handles SET arq_id = CASE id ..., set_id = :set_id, needs_cleaning = ...
    #  WHERE id IN (:ids) AND arq_id IS NULL AND NOT needs_cleaning AND NOT draining
    #    AND EXISTS (its deployable and device, schedulable)
    #    AND EXISTS (the set and its device, schedulable) AND id IN (the members of the set)
    # Of the set itself: its source is a device, too. As in the guard of its members, a failed
    # restore does not count; its offer does not, because Placement has allocated the set.
    is_open = sa.and_(*(sa.not_(facts.CONDITIONS[name]) for name in ("status", "cordoned")))
    if is_honoured:
        is_open = sa.or_(is_open, devices.c.cordoned_since.is_not(None))
    set_is_usable = (
        sa.select(deployables.c.id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(
            deployables.c.id == set_id,
            is_open,
            *map(sa.not_, facts.conditions("status", "cordoned", "restore_failed", "withheld")),
        )
    )
    schedulable = sa.or_(SCHEDULABLE, USABLE) if is_honoured else SCHEDULABLE
    return tx.execute(
        sa.update(handles)
        .where(
            handles.c.id.in_(sorted(owners)),
            *UNCLAIMED,
            schedulable,
            sa.exists(set_is_usable),
            sa.exists(_MEMBERSHIP.where(set_members.c.deployable_id == set_id)),
        )
        .values(
            arq_id=sa.case(owners, value=handles.c.id),
            set_id=set_id,
            needs_cleaning=handles.c.id.in_(sorted(needs_cleaning)),
        )
    ).rowcount


def find_members(tx: sa.Connection, set_ids: Collection[int]) -> set[int]:
    """Return the row ids of the handles that are members of sets."""
    query = sa.select(set_members.c.handle_id).where(set_members.c.deployable_id.in_(set_ids))
    return set(tx.scalars(query))


class MemberStateRow(HandleStateRow, DeviceFactsColumns):
    """A member of a set, with the reasons why it cannot be claimed; ``deployable_id`` is the set.

    ``draining`` is that of the handle, its deployable or its device.
    """

    device: str


def all_members(tx: sa.Connection, set_ids: Collection[int]) -> list[MemberStateRow]:
    """Return the members of sets that are present, in the order of their row ids."""
    owned = handles.c.arq_id.is_not(None)
    others = {
        **facts.COLUMNS,
        "id": handles.c.id,
        "uuid": handles.c.uuid,
        "device": devices.c.address,
        "taken": owned,
        "dirty": sa.and_(handles.c.needs_cleaning, sa.not_(owned)),
        "draining": sa.or_(handles.c.draining, facts.CONDITIONS["draining"]),
        "is_member": sa.true(),
    }
    query = sa.select(*row_columns(MemberStateRow, set_members, handles, **others))
    query = query.select_from(_MEMBERS).where(set_members.c.deployable_id.in_(sorted(set_ids)))
    return fetch_all(MemberStateRow, tx.execute(query.order_by(handles.c.id)))


def work_items(tx: sa.Connection, set_ids: Iterable[int | None]) -> dict[int, WorkItem]:
    """Return the work on the host of each of these sets whose source prepares, by row id."""
    ids = sorted({set_id for set_id in set_ids if set_id is not None})
    if not ids:
        return {}
    query = sa.select(
        deployables.c.id,
        deployables.c.address,
        devices.c.address.label("device"),
        devices.c.backend,
        devices.c.abilities,
    ).join(devices, devices.c.id == deployables.c.device_id)
    rows = tx.execute(query.where(deployables.c.id.in_(ids)).order_by(deployables.c.id))
    return {
        row.id: WorkItem(backend=row.backend, device=row.device, deployable=row.address)
        for row in rows
        if Ability.PREPARES in row.abilities
    }


def mark_stale(tx: sa.Connection, set_ids: Iterable[int | None], now: datetime) -> int:
    """Mark the providers of sets stale, so that the offers of their hosts are planned again.

    Return the number of providers.
    """
    ids = sorted({set_id for set_id in set_ids if set_id is not None})
    if not ids:
        return 0
    query = sa.select(deployables.c.rp_uuid).where(deployables.c.id.in_(ids))
    return publishing.mark_stale_existing(tx, tx.scalars(query).all(), now)


def find_ids(tx: sa.Connection, providers: Collection[str]) -> Sequence[int]:
    """Return the row ids of the sets with these uuids of providers, in order."""
    query = sa.select(deployables.c.id).order_by(deployables.c.id)
    return tx.scalars(query.where(deployables.c.rp_uuid.in_(sorted(providers)))).all()


def make_dirty(tx: sa.Connection, set_id: int, now: datetime) -> Sequence[int]:
    """Make all members of a free set dirty, as after a claim through the set.

    Return the row ids of the members. Raise InUse if one has an owner, is dirty, is missing, or has
    a job that changes its device.
    """
    query = sa.select(set_members.c.handle_id).where(set_members.c.deployable_id == set_id)
    ids = tx.scalars(query.order_by(set_members.c.handle_id)).all()
    query = sa.select(deployables.c.set_size).where(deployables.c.id == set_id)
    size = tx.scalar(query) or 0  # a set that was removed has no members either
    if len(ids) != size:
        raise InUse(
            f"the host does not report {size - len(ids)} of {size} devices of the set: bring them "
            "back, or deactivate its partition with fmpm -d while no guest has its devices"
        )
    changing = sa.select(deployables.c.id).where(
        deployables.c.id == handles.c.deployable_id, deployables.c.job_id.is_not(None)
    )
    free = (
        handles.c.id.in_(ids),
        handles.c.arq_id.is_(None),
        sa.not_(handles.c.needs_cleaning),
        ~sa.exists(changing),
    )
    dirty = sa.update(handles).where(*free).values(needs_cleaning=True, set_id=set_id)
    if tx.execute(dirty).rowcount != size:
        raise InUse("a device of the set is in use or being cleaned: audit the host again")
    mark_stale(tx, [set_id], now)
    return ids


class SetOwner(NamedTuple):
    """An ARQ that owns a member of a set, and the name of the set's provider."""

    uuid: str
    name: str


def find_owners(tx: sa.Connection, set_ids: Collection[int]) -> list[SetOwner]:
    """Return the ARQs that own members of sets, in the order of their row ids."""
    query = (
        sa.select(arqs.c.uuid, deployables.c.name)
        .select_from(handles)
        .join(arqs, arqs.c.id == handles.c.arq_id)
        .join(deployables, deployables.c.id == handles.c.set_id)
        .where(handles.c.set_id.in_(sorted(set_ids)))
        .order_by(arqs.c.id)
    )
    return [SetOwner(*row) for row in tx.execute(query)]
