# SPDX-License-Identifier: Apache-2.0
"""Lock the device sets of hosts for a plan of their offers, and write the offers.

``conductor.placement.offers`` plans them; a publisher then writes the inventories to Placement.
"""

from collections.abc import Collection, Mapping
from datetime import datetime

import sqlalchemy as sa

from cyborg.core.device_sets import offers as core
from cyborg.db import bulk
from cyborg.db.device_sets.read import SetRow, find_sets
from cyborg.db.providers import write as publishing
from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import deployables, providers


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
    return find_sets(tx, deployables.c.id.in_(locked))


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
