# SPDX-License-Identifier: Apache-2.0
"""Write deployables: the parts of devices that are resource providers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import uuid4

import sqlalchemy as sa

from cyborg.core import naming
from cyborg.core.inventory.device import Deployable
from cyborg.core.inventory.device_set import DeviceSet
from cyborg.core.inventory.plan import DeployableKey
from cyborg.core.validation import optional
from cyborg.db import bulk, joins
from cyborg.db.deployables import facts
from cyborg.db.deployables.facts import DeviceFactsColumns
from cyborg.db.deployables.read import DeployableColumns
from cyborg.db.rows import StoredRow, fetch_all
from cyborg.db.schema import (
    attach_handles,
    attributes,
    deployables,
    devices,
    jobs,
    services,
    set_members,
)


class DeployableRow(StoredRow, DeployableColumns):
    """All columns of a deployable, and the addresses of its device and its parent."""

    device_id: int
    host: str
    parent_id: int | None
    root_id: int | None
    desired_image: str | None
    draining: bool
    job_id: int | None
    device_set: dict[str, Any] | None
    set_size: int | None
    set_group: str | None
    offer: str | None
    offer_reason: str | None
    device: str
    parent: str | None
    job_state: str | None


class DesiredProviderRow(DeviceFactsColumns):
    """The data for the desired state of a provider.

    ``parent`` is the uuid of the parent provider. ``set_size`` is the number of members of a device
    set, None for other deployables, and ``offer`` the state of its offer. ``total`` is the number
    of all handles without draining handles that have no owner: of a set those of its members, of
    other deployables those that are no member of a set, or have an owner of their own. ``stuck`` is
    the number of these whose cleaning job has failed and is retried, and of a set all that are
    dirty.
    ``host_down`` is whether the agent is marked down, False without an agent. ``identity`` has the
    names of the compute node that the agent reported, None without an agent.
    """

    uuid: str
    name: str
    parent: str | None
    host: str
    resource_class: str
    traits: list[str]
    set_size: int | None
    offer: str | None
    total: int
    stuck: int
    host_down: bool
    identity: dict[str, Any] | None


def of_host(tx: sa.Connection, host: str) -> list[DeployableRow]:
    """Return every deployable row of a host."""
    parents = deployables.alias("parents")
    query = (
        sa.select(
            deployables,
            devices.c.address.label("device"),
            parents.c.address.label("parent"),
            jobs.c.state.label("job_state"),
        )
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(parents, parents.c.id == deployables.c.parent_id)
        .outerjoin(jobs, jobs.c.id == deployables.c.job_id)
        .where(devices.c.host == host)
    )
    return fetch_all(DeployableRow, tx.execute(query))


def to_deployable(row: DeployableRow) -> Deployable:
    """Convert a row of ``of_host`` to the value that describes a reported deployable.

    The value has no handles.
    """
    return Deployable(
        address=row["address"],
        resource_class=row["resource_class"],
        traits=frozenset(row["traits"]),
        attributes=row["attributes"],
        parent=row["parent"],
        bitstream_id=row["bitstream_id"],
        device_set=optional(DeviceSet.from_dict, row["device_set"]),
    )


def _reported(deployable: Deployable) -> dict[str, Any]:
    device_set = deployable.device_set
    return {
        "device_set": None if device_set is None else device_set.to_dict(),
        "set_size": None if device_set is None else device_set.size,
        # A set without a group shares what is wanted with the other sets of its host only.
        "set_group": None if device_set is None else device_set.group or None,
        "resource_class": deployable.resource_class,
        "traits": sorted(deployable.traits),
        "attributes": dict(deployable.attributes),
        "bitstream_id": deployable.bitstream_id,
        "draining": False,
    }


class NewDeployable(NamedTuple):
    """A deployable to insert, with the row id of its device and the number of its handles."""

    device_id: int
    value: Deployable
    num_handles: int


def add(
    tx: sa.Connection,
    host: str,
    new: Iterable[NewDeployable],
    uuids: Mapping[str, str],
    providers: Mapping[str, str],
) -> None:
    """Insert deployables of a host.

    ``uuids`` maps the addresses of restored deployables to their former uuids, ``providers`` those
    of all deployables to the uuids of their providers. ``set_parents`` writes the parents
    of the new deployables.
    """
    bulk.insert(
        tx,
        deployables,
        [
            {
                "uuid": uuids.get(value.address) or str(uuid4()),
                "device_id": device_id,
                "host": host,
                "address": value.address,
                "name": naming.provider_name(host, value.address),
                "rp_uuid": providers[value.address],
                "num_accelerators": num_handles,
                **_reported(value),
            }
            for device_id, value, num_handles in new
        ],
    )


def find_name_conflicts(
    tx: sa.Connection, host: str, addresses: Collection[str]
) -> Sequence[tuple[str, str]]:
    """Return (provider name, other host) of names of this host that another host already uses."""
    conflicts: set[tuple[str, str]] = set()
    # Names are unique in the cloud, and two pairs of a host and an address can give the same one.
    for chunk in bulk.chunks(sorted({naming.provider_name(host, a) for a in addresses})):
        conflicts |= {
            (str(name), str(other))
            for name, other in tx.execute(
                sa.select(deployables.c.name, deployables.c.host).where(
                    deployables.c.name.in_(chunk), deployables.c.host != host
                )
            )
        }
    return sorted(conflicts)


def ids_by_key(tx: sa.Connection, host: str) -> dict[DeployableKey, int]:
    """Return the row ids of a host's deployables."""
    query = (
        sa.select(devices.c.address, deployables.c.address, deployables.c.id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(devices.c.host == host)
    )
    return {DeployableKey(device, deployable): id_ for device, deployable, id_ in tx.execute(query)}


def update(tx: sa.Connection, changed: Mapping[int, Deployable]) -> None:
    """Write the reported values of deployables, by row id.

    A draining deployable becomes available again.
    """
    bulk.update(tx, deployables, [{"id": id_, **_reported(d)} for id_, d in changed.items()])


class ParentIds(NamedTuple):
    """The row ids of the parent and the root of a deployable; a root has no parent."""

    parent_id: int | None
    root_id: int


def set_parents(tx: sa.Connection, parents: Mapping[int, ParentIds]) -> None:
    """Write the parents of deployables, by row id of the deployable."""
    # Nearly all deployables have no parent: these need only one statement.
    without_parent = [id_ for id_, ids in parents.items() if ids.parent_id is None]
    row_id = deployables.c.id
    # Each is its own root.
    bulk.update_where(tx, row_id, without_parent, parent_id=None, root_id=row_id)
    bulk.update(
        tx,
        deployables,
        [{"id": id_, **ids._asdict()} for id_, ids in parents.items() if ids.parent_id is not None],
    )


def set_handle_counts(tx: sa.Connection, counts: Mapping[int, int]) -> None:
    """Write the number of handles of deployables, by row id."""
    bulk.update(tx, deployables, [{"id": i, "num_accelerators": n} for i, n in counts.items()])


def mark_draining(tx: sa.Connection, ids: Collection[int]) -> None:
    """Mark deployables, by row id, that were removed from the host but have a bound handle."""
    bulk.update_where(tx, deployables.c.id, ids, draining=True)


def delete(tx: sa.Connection, ids: Collection[int]) -> None:
    """Delete deployables by row id. Raise oslo.db's DBReferenceError if handles still exist."""
    bulk.delete(tx, deployables, ids)


def desired_state(tx: sa.Connection, providers: Collection[str]) -> list[DesiredProviderRow]:
    """Return the data for the desired state of the providers with these uuids.

    A provider that must be deleted from Placement has no row.
    """
    parents = deployables.alias("parents")
    # Correlated subqueries instead of a join with GROUP BY: an index answers each, for the few
    # providers of a call.
    h = attach_handles.c
    is_present = sa.or_(sa.not_(h.draining), h.arq_id.is_not(None))
    is_dirty = sa.and_(h.arq_id.is_(None), sa.not_(h.draining), h.needs_cleaning)
    is_stuck = sa.and_(is_dirty, jobs.c.error.is_not(None))
    # The handles of deployables, and the members of sets, each with its cleaning job.
    own = attach_handles.outerjoin(jobs, jobs.c.id == h.job_id)
    of_set = set_members.join(attach_handles, h.id == set_members.c.handle_id)
    of_set = of_set.outerjoin(jobs, jobs.c.id == h.job_id)
    is_member = sa.exists(sa.select(set_members.c.id).where(set_members.c.handle_id == h.id))
    # A member is allocated through its sets, unless an ARQ had it before there were sets.
    is_single = sa.or_(sa.not_(is_member), sa.and_(h.arq_id.is_not(None), h.set_id.is_(None)))

    def count(
        condition: sa.ColumnElement[bool], of_members: sa.ColumnElement[bool]
    ) -> sa.ColumnElement[int]:
        """Count handles that meet ``condition``, of a set the members that meet ``of_members``."""
        single = sa.select(sa.func.count()).select_from(own)
        single = single.where(h.deployable_id == deployables.c.id, condition, is_single)
        members = sa.select(sa.func.count()).select_from(of_set)
        members = members.where(set_members.c.deployable_id == deployables.c.id, of_members)
        is_set = deployables.c.set_size.is_not(None)
        return sa.case((is_set, members.scalar_subquery()), else_=single.scalar_subquery())

    query = (
        sa.select(
            deployables.c.rp_uuid.label("uuid"),
            deployables.c.name,
            parents.c.rp_uuid.label("parent"),
            deployables.c.set_size,
            deployables.c.offer,
            count(is_present, is_present).label("total"),
            # Any dirty member: a set is seldom released, and a server of many GPUs must not be
            # scheduled to one whose partition is still being deactivated.
            count(is_stuck, is_dirty).label("stuck"),
            deployables.c.resource_class,
            deployables.c.traits,
            *facts.columns(),
            facts.HOST_DOWN.label("host_down"),
            devices.c.host,
            services.c.identity,
        )
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(parents, parents.c.id == deployables.c.parent_id)
        .outerjoin(services, joins.AGENT_OF_DEVICE)
        .where(deployables.c.rp_uuid.in_(sorted(providers)))
        .order_by(deployables.c.id)
    )
    return fetch_all(DesiredProviderRow, tx.execute(query))


def add_attribute(tx: sa.Connection, deployable: str, row: Mapping[str, str | datetime]) -> bool:
    """Add an attribute to the deployable with this uuid; return whether the deployable exists.

    Raise oslo.db's DBDuplicateEntry if the deployable already has an attribute with this key, and
    DBReferenceError if the deployable is deleted concurrently.
    """
    values = [sa.literal(v, attributes.c[name].type).label(name) for name, v in row.items()]
    columns = ["deployable_id", *row]
    # INSERT ... SELECT: no row is inserted if there is no such deployable.
    source = sa.select(deployables.c.id, *values).where(deployables.c.uuid == deployable)
    return bool(tx.execute(sa.insert(attributes).from_select(columns, source)).rowcount)


def delete_attribute(tx: sa.Connection, uuid: str) -> bool:
    """Delete an attribute; return whether it existed."""
    return bool(tx.execute(sa.delete(attributes).where(attributes.c.uuid == uuid)).rowcount)
