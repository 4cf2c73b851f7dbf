# SPDX-License-Identifier: Apache-2.0
"""Read which device sets of a host are in use, for their active partitions."""

from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

import sqlalchemy as sa

from cyborg.core.inventory.activations import HandleUse, PartitionUse, find_use
from cyborg.core.inventory.device import Ability
from cyborg.db import joins
from cyborg.db.schema import attach_handles as handles
from cyborg.db.schema import deployables, devices, set_members


class SetUse(NamedTuple):
    """The uuid of the provider of a set, and the use of its partition."""

    provider: str
    use: PartitionUse


def read(tx: sa.Connection, host: str, addresses: Collection[str]) -> dict[str, SetUse]:
    """Return the partitions of a host with these addresses of their deployables, by address.

    Execute three statements. Sets that no report had, and those of no fabric, are left out.
    """
    d, h, m = deployables.c, handles.c, set_members.c
    sets = (
        sa.select(d.id, d.address, d.rp_uuid, d.set_size, devices.c.abilities)
        .join(devices, devices.c.id == d.device_id)
        .where(d.host == host, d.address.in_(sorted(addresses)), d.set_size.is_not(None))
    )
    # Only a fabric prepares its sets; the handles of other sets are free at any time.
    rows = [row for row in tx.execute(sets) if Ability.PREPARES in row.abilities]
    members = defaultdict[int, set[int]](set)
    query = sa.select(m.deployable_id, m.handle_id)
    for set_id, handle_id in tx.execute(query.where(m.deployable_id.in_([r.id for r in rows]))):
        members[set_id].add(handle_id)
    claimed = deployables.alias("claimed")
    query = (
        sa.select(h.id, claimed.c.rp_uuid)
        .select_from(joins.HANDLES.outerjoin(claimed, claimed.c.id == h.set_id))
        .where(
            devices.c.host == host,
            # As claims do: a job that changes the layout or the program of the device uses it.
            sa.or_(h.arq_id.is_not(None), h.needs_cleaning, d.job_id.is_not(None)),
        )
    )
    used = [HandleUse(*row) for row in tx.execute(query)]

    def use_of(row: Any) -> PartitionUse:
        use = find_use(row.rp_uuid, members[row.id], used)
        is_missing = len(members[row.id]) != row.set_size
        return PartitionUse.MISSING if use is PartitionUse.UNUSED and is_missing else use

    return {row.address: SetUse(row.rp_uuid, use_of(row)) for row in rows}
