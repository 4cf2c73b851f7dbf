# SPDX-License-Identifier: Apache-2.0
"""Read the attach handles of attachments, and those that agents attach to guests.

The type of a handle decides in which mode it can be attached, and whether Nova attaches it.
"""

from collections.abc import Collection
from datetime import datetime
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.attachments.attachment import AttachmentState, Mode
from cyborg.core.binding.states import OWNING_STATES, ArqState
from cyborg.core.hosts import AGENT, LIVE_ATTACH
from cyborg.core.inventory.device import HandleType
from cyborg.core.jobs.job import JobState
from cyborg.db import joins
from cyborg.db.rows import fetch_all, row_columns
from cyborg.db.schema import (
    arqs,
    attach_handles,
    attachments,
    deployables,
    devices,
    jobs,
    services,
    set_members,
)


def of_accelerator(tx: sa.Connection, uuid: str) -> set[str]:
    """Return the type of an accelerator, nothing if it does not exist."""
    query = sa.select(attach_handles.c.type).where(attach_handles.c.uuid == uuid)
    return set(tx.scalars(query))


def of_hosts(
    tx: sa.Connection, hosts: Collection[str], classes: Collection[str]
) -> dict[str, set[str]]:
    """Return the types of the handles of hosts, by resource class."""
    query = (
        sa.select(deployables.c.resource_class, attach_handles.c.type)
        .join(devices, devices.c.id == deployables.c.device_id)
        .join(attach_handles, attach_handles.c.deployable_id == deployables.c.id)
        .where(devices.c.host.in_(sorted(hosts)), deployables.c.resource_class.in_(sorted(classes)))
        .distinct()
    )
    return _group(tx, query)


def of_providers(tx: sa.Connection, providers: Collection[str]) -> dict[str, set[str]]:
    """Return the types of the handles of resource providers, by the uuid of the provider.

    The handles of a device set are those of its members.
    """
    columns = deployables.c.rp_uuid, attach_handles.c.type
    of_these = deployables.c.rp_uuid.in_(sorted(providers))
    of_deployables = sa.select(*columns).join(
        attach_handles, attach_handles.c.deployable_id == deployables.c.id
    )
    of_sets = (
        sa.select(*columns)
        .join(set_members, set_members.c.deployable_id == deployables.c.id)
        .join(attach_handles, attach_handles.c.id == set_members.c.handle_id)
    )
    return _group(tx, of_deployables.where(of_these).union(of_sets.where(of_these)))


def of_arqs(tx: sa.Connection, ids: Collection[int]) -> set[str]:
    """Return the types of the handles that ARQs own, by row id."""
    query = sa.select(attach_handles.c.type).where(attach_handles.c.arq_id.in_(sorted(ids)))
    return set(tx.scalars(query.distinct()))


def of_attachments(tx: sa.Connection, ids: Collection[int]) -> dict[int, set[str]]:
    """Return the types of the handles that the ARQs of attachments own, by row id."""
    query = (
        sa.select(arqs.c.attachment_id, attach_handles.c.type)
        .join(attach_handles, attach_handles.c.arq_id == arqs.c.id)
        .where(arqs.c.attachment_id.in_(sorted(ids)))
        .distinct()
    )
    return _group(tx, query)


def _group(tx: sa.Connection, query: sa.Executable) -> dict[Any, set[str]]:
    """Return the types that a query selects, by its first column."""
    found: dict[Any, set[str]] = {}
    for key, type_ in tx.execute(query).all():
        found.setdefault(key, set()).add(type_)
    return found


class GuestDeviceRow(TypedDict):
    """An ARQ, its handle, and the addresses of its device.

    ``ready`` is whether no job prepares the device, such as one after a reboot of the host.
    ``attached_by_nova`` is whether Nova attaches the device at most starts of the guest.
    """

    uuid: str
    state: str
    instance_uuid: str
    attach_handle_type: str
    attach_handle_uuid: str
    attach_handle_info: dict[str, Any]
    attached_at: datetime | None
    attach_error: str | None
    handle: str
    deployable: str
    device: str
    backend: str
    host: str
    ready: bool
    attached_by_nova: bool


# Nova gives these to the servers of flavors with ``accel:device_profile``. Those of contexts may be
# meant for the next start of a guest, as those of successors are.
_BY_NOVA = sa.and_(
    attach_handles.c.type == HandleType.PCI,
    arqs.c.attachment_id.is_(None),
    arqs.c.context_id.is_(None),
)
_OPEN_JOB = sa.exists().where(jobs.c.id == arqs.c.job_id, jobs.c.state == JobState.OPEN)
_GUEST_DEVICES = (
    sa.select(
        *row_columns(
            GuestDeviceRow,
            arqs,
            devices,
            attach_handle_type=attach_handles.c.type,
            attach_handle_uuid=attach_handles.c.uuid,
            attach_handle_info=attach_handles.c.info,
            handle=attach_handles.c.address,
            **joins.ADDRESSES,
            ready=sa.not_(_OPEN_JOB),
            attached_by_nova=_BY_NOVA,
        )
    )
    .join(attach_handles, attach_handles.c.arq_id == arqs.c.id)
    .join(deployables, deployables.c.id == attach_handles.c.deployable_id)
    .join(devices, devices.c.id == deployables.c.device_id)
    .order_by(arqs.c.id)
)


def of_attachment(tx: sa.Connection, id_: int) -> list[GuestDeviceRow]:
    """Return the devices that the ARQs of an attachment own."""
    owns_handle = arqs.c.state.in_(sorted(OWNING_STATES))
    query = _GUEST_DEVICES.where(arqs.c.attachment_id == id_, owns_handle)
    return fetch_all(GuestDeviceRow, tx.execute(query))


def all_ready(tx: sa.Connection, id_: int) -> bool:
    """Return whether no open job prepares a device of an attachment.

    A job that has ended does not count. An ARQ may refer to one in a database that was restored or
    edited by hand.
    """
    query = sa.select(arqs.c.id).where(
        arqs.c.attachment_id == id_, arqs.c.state.in_(sorted(OWNING_STATES)), _OPEN_JOB
    )
    return tx.scalar(query.limit(1)) is None


def of_host(tx: sa.Connection, host: str) -> list[GuestDeviceRow]:
    """Return the devices of a host that its agent attaches to the running guests that lack them.

    These are the devices of attachments, and those of other ARQs that Nova does not attach, or may
    forget. An attachment that is being attached or detached is left out: its own jobs change the
    guest.
    """
    is_attached = sa.and_(
        attachments.c.mode == Mode.LIVE, attachments.c.state == AttachmentState.ATTACHED
    )
    is_ignored_by_nova = sa.and_(
        attach_handles.c.type == HandleType.VFIO, arqs.c.attachment_id.is_(None)
    )
    query = _GUEST_DEVICES.outerjoin(attachments, attachments.c.id == arqs.c.attachment_id).where(
        devices.c.host == host,
        arqs.c.state == ArqState.BOUND,
        # Under a lease there is no instance yet.
        arqs.c.instance_uuid.is_not(None),
        # Nova 34 starts guests again at the boot of a host (``resume_guests_state_on_host_boot``),
        # and in a rescue, without their accelerators: ``resume_state_on_host_boot`` of its libvirt
        # driver has no argument for them.
        sa.or_(is_attached, is_ignored_by_nova, _BY_NOVA),
    )
    rows = fetch_all(GuestDeviceRow, tx.execute(query))
    return [row for row in rows if not (row["attached_by_nova"] and _is_of_port(row))]


def _is_of_port(row: GuestDeviceRow) -> bool:
    """Return whether a device may be that of a Neutron port, which Nova does not forget.

    As a plain device, the function would have neither the MAC address nor the VLAN of the port,
    such as after a port was deleted while its server runs.
    """
    return "physical_network" in row["attach_handle_info"]


def live_hosts(tx: sa.Connection, names: Collection[str]) -> dict[str, bool]:
    """Return, for each of these hosts that has an agent, whether live attach is enabled there."""
    query = sa.select(services.c.host, services.c.versions).where(
        services.c.binary == AGENT, services.c.host.in_(sorted(names))
    )
    return {host: versions.get(LIVE_ATTACH) is True for host, versions in tx.execute(query)}


def is_current_agent(tx: sa.Connection, host: str, epoch: str) -> bool:
    """Return whether the agent of a host has this epoch."""
    return tx.scalar(sa.select(services.c.id).where(joins.agent_of(host, epoch))) is not None
