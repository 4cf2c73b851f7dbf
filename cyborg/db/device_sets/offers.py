# SPDX-License-Identifier: Apache-2.0
"""Read what decides the offers of device sets, and write the offers.

``conductor.placement.offers`` plans them; a publisher then writes the inventories to Placement.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.device_sets import offers as core
from cyborg.core.device_sets.groups import SizeSummary
from cyborg.core.inventory.device_set import OfferState
from cyborg.db import bulk, joins
from cyborg.db.deployables import facts
from cyborg.db.deployables.facts import DeviceFactsColumns
from cyborg.db.providers import write as publishing
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import deployables, devices, providers, set_members


class SetRow(DeviceFactsColumns):
    """A device set of a host, with the facts of its source, which is a device.

    ``source`` is the address of this device. ``is_published`` is whether Placement has, or had, the
    provider.
    """

    id: int
    rp_uuid: str
    address: str
    source: str
    set_group: str | None
    device_set: dict[str, Any]
    offer: str | None
    offer_reason: str | None
    health_reason: str | None
    is_published: bool


class UnitRow(DeviceFactsColumns):
    """A member of a set, with the facts of its device; ``set_id`` is the set of its claim."""

    member_of: int
    address: str
    deployable: str
    device: str
    set_id: int | None
    is_owned: bool
    needs_cleaning: bool
    handle_draining: bool
    health_reason: str | None
    undeliverable_reason: str | None


class _GroupRow(TypedDict):
    host: str
    set_size: int
    offered: int
    inside: int
    split: int


def hosts_with_sets(tx: sa.Connection, hosts: Collection[str]) -> list[str]:
    """Return those of these hosts that have device sets, in order."""
    query = sa.select(deployables.c.host).distinct().order_by(deployables.c.host)
    found = query.where(deployables.c.host.in_(sorted(hosts)), deployables.c.set_size.is_not(None))
    return list(tx.scalars(found))


def first_hosts(tx: sa.Connection) -> list[str]:
    """Return one host of each group, in order."""
    d = deployables.c
    found = sa.select(sa.func.min(d.host)).where(d.set_group.is_not(None)).group_by(d.set_group)
    return sorted(set(tx.scalars(found)))


def lock_groups(tx: sa.Connection, host: str) -> None:
    """Lock the groups of the sets of a host, in order, against other plans.

    That is a lock of the first set of each group.
    """
    d = deployables.c
    groups = sa.select(d.set_group).distinct().where(d.host == host, d.set_group.is_not(None))
    names = tx.scalars(groups).all()
    # Three statements: MariaDB would lock each set of the group to find the first one.
    firsts = sa.select(sa.func.min(d.id)).where(d.set_group.in_(names)).group_by(d.set_group)
    while names and (ids := sorted(tx.scalars(firsts))):
        query = sa.select(d.id).where(d.id.in_(ids)).order_by(d.id)
        # Not against claims, which refer to the rows: see ``lock_sets``.
        locked = tx.scalars(query.with_for_update(key_share=True)).all()
        if len(locked) == len(ids):
            return
        # A first set was deleted meanwhile: other plans lock the next one.


def lock_sets(tx: sa.Connection, host: str) -> list[SetRow]:
    """Return the sets of a host in the order of their row ids, locked against other plans."""
    ids = sa.select(deployables.c.id).order_by(deployables.c.id)
    ids = ids.where(deployables.c.host == host, deployables.c.set_size.is_not(None))
    # Only these rows, and first: the facts are read after the lock. ``key_share`` is FOR NO KEY
    # UPDATE on PostgreSQL, which does not block claims: their foreign keys refer to the rows.
    locked = tx.scalars(ids.with_for_update(key_share=True)).all()
    is_published = sa.func.coalesce(providers.c.published_revision, 0) > 0
    columns = {**facts.COLUMNS, "is_published": is_published, "source": devices.c.address}
    query = sa.select(*row_columns(SetRow, deployables, devices, **columns))
    query = query.join(devices, devices.c.id == deployables.c.device_id)
    query = query.outerjoin(providers, providers.c.uuid == deployables.c.rp_uuid)
    query = query.where(deployables.c.id.in_(locked)).order_by(deployables.c.id)
    return fetch_all(SetRow, tx.execute(query))


def units_of_host(tx: sa.Connection, host: str) -> list[UnitRow]:
    """Return the members of all sets of a host, once for each set."""
    others = {
        **facts.COLUMNS,
        **joins.ADDRESSES,
        "member_of": set_members.c.deployable_id,
        "is_owned": handles.c.arq_id.is_not(None),
        "handle_draining": handles.c.draining,
    }
    query = (
        sa.select(*row_columns(UnitRow, handles, devices, **others))
        .select_from(joins.HANDLES)
        .join(set_members, set_members.c.handle_id == handles.c.id)
        .where(devices.c.host == host)
        .order_by(set_members.c.deployable_id, handles.c.id)
    )
    return fetch_all(UnitRow, tx.execute(query))


def summarize_group(tx: sa.Connection, group: str) -> list[SizeSummary]:
    """Return the numbers of free sets of each size on each host of a group.

    The free units of a host are those of its offered sets. The cost grows with the sets of the
    group: hence groups, and not the whole cloud.
    """
    d = deployables.c
    # The reason of a set that is not offered begins with a constant text: see ``SizeSummary``.
    reason = sa.func.coalesce(d.offer_reason, "")
    # A set that waits will be offered: it counts already, as in ``SizeSummary``.
    offered = sa.or_(d.offer == OfferState.OFFERED, reason.startswith(core.WAITS))

    def count(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
        return sa.func.sum(sa.case((condition, 1), else_=0))

    query = (
        sa.select(
            d.host,
            d.set_size,
            count(offered).label("offered"),
            count(reason.startswith(core.OVERLAPS)).label("inside"),
            count(reason.startswith(core.SPLIT)).label("split"),
        )
        .where(d.set_group == group)
        .group_by(d.host, d.set_size)
        .order_by(d.host, d.set_size)
    )
    rows = fetch_all(_GroupRow, tx.execute(query))
    free_units = Counter[str]()
    for row in rows:
        free_units[row["host"]] += row["set_size"] * int(row["offered"])
    return [
        SizeSummary(
            host=row["host"],
            size=row["set_size"],
            offered=int(row["offered"]),
            inside=int(row["inside"]),
            split=int(row["split"]),
            free_units=free_units[row["host"]],
        )
        for row in rows
    ]


def write_offers(
    tx: sa.Connection, changed: Mapping[int, core.Offer], stale: Collection[str], now: datetime
) -> None:
    """Write the offers of sets, by row id, and mark the providers with these uuids stale."""
    rows = [
        {"id": id_, "offer": str(offer.state), "offer_reason": offer.reason}
        for id_, offer in sorted(changed.items())
    ]
    bulk.update(tx, deployables, rows)
    publishing.mark_stale_existing(tx, stale, now)


def is_owned(tx: sa.Connection, provider: str) -> bool:
    """Return whether an ARQ owns a member of a set that was claimed through it."""
    query = sa.select(handles.c.id).join(deployables, deployables.c.id == handles.c.set_id)
    owned = query.where(deployables.c.rp_uuid == provider, handles.c.arq_id.is_not(None))
    return tx.scalar(owned.limit(1)) is not None


def lock_current(
    tx: sa.Connection, revisions: Mapping[str, int], others: Collection[str] = ()
) -> frozenset[str]:
    """Lock providers against claims; return the uuids of those that have the given revision.

    ``others`` are the providers of all sets of the host. The caller has locked these sets. A claim
    raises the revision: this call waits for a claim that is not committed yet. All providers are
    locked, and in the order of ``mark_stale_existing``: the plan marks others of them stale later,
    and could wait then for a transaction that waits for the first ones.
    """
    if not revisions:
        return frozenset()
    p = providers.c
    uuids = sorted(revisions.keys() | set(others))
    query = sa.select(p.uuid, p.revision).where(p.uuid.in_(uuids)).order_by(p.uuid)
    # By the index of the later update: MariaDB locks its entries, too.
    query = query.with_hint(providers, f"FORCE INDEX ({publishing.UUID_INDEX})", "mysql")
    rows = tx.execute(query.with_for_update(key_share=True)).all()
    return frozenset(row.uuid for row in rows if row.revision == revisions.get(row.uuid))
