# SPDX-License-Identifier: Apache-2.0
"""Joins and conditions that many queries need, between handles, ARQs, devices and agents."""

import sqlalchemy as sa

from cyborg.core.hosts import AGENT
from cyborg.db.schema import arqs, attach_handles, backends, deployables, devices, services

# Joins that many queries need: up from a handle, or from the ARQ that owns the handle.
HANDLES = attach_handles.join(deployables, deployables.c.id == attach_handles.c.deployable_id).join(
    devices, devices.c.id == deployables.c.device_id
)
# Up from a member of a device set, to the set through which it was claimed and to its source.
MEMBERS = attach_handles.join(deployables, deployables.c.id == attach_handles.c.set_id).join(
    devices, devices.c.id == deployables.c.device_id
)
OWNED_HANDLES = (
    arqs.join(attach_handles, attach_handles.c.arq_id == arqs.c.id)
    .join(deployables, deployables.c.id == attach_handles.c.deployable_id)
    .join(devices, devices.c.id == deployables.c.device_id)
)

# The addresses of the parts that have a handle, by their keys in rows: see ``rows.row_columns``.
ADDRESSES = {"deployable": deployables.c.address, "device": devices.c.address}

# The agent of the host of a device, and there its backend; the host may have no agent any more.
AGENT_OF_DEVICE = sa.and_(services.c.host == devices.c.host, services.c.binary == AGENT)
BACKEND_OF_DEVICE = sa.and_(
    backends.c.service_id == services.c.id, backends.c.name == devices.c.backend
)


def agent_of(host: str, epoch: str | None = None) -> sa.ColumnElement[bool]:
    """Return the condition that a service is the agent of a host, in this epoch if it is given."""
    agent = sa.and_(services.c.binary == AGENT, services.c.host == host)
    return agent if epoch is None else sa.and_(agent, services.c.epoch == epoch)
