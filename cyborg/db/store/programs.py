# SPDX-License-Identifier: Apache-2.0
"""Which deployable is being programmed: one that is has a job, and gives no handle out."""

from collections.abc import Sequence

import sqlalchemy as sa

from cyborg.core.job import JobState
from cyborg.db.schema import attach_handles, deployables, devices, jobs, requests


def lock(tx: sa.Connection, uuid: str) -> sa.RowMapping | None:
    """Return a deployable, locked until the end, or None.

    Keys: id, address, rp_uuid, job_id, arguments (of that job), device (address), backend, host,
    abilities.
    """
    if (
        tx.scalar(sa.select(deployables.c.id).where(deployables.c.uuid == uuid).with_for_update())
        is None
    ):
        return None
    query = (
        sa.select(
            deployables.c.id,
            deployables.c.address,
            deployables.c.rp_uuid,
            deployables.c.job_id,
            jobs.c.arguments,
            devices.c.address.label("device"),
            devices.c.backend,
            devices.c.host,
            devices.c.abilities,
        )
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(jobs, jobs.c.id == deployables.c.job_id)
        .where(deployables.c.uuid == uuid)
    )
    return tx.execute(query).mappings().first()


def lock_handles(tx: sa.Connection, deployable_id: int) -> Sequence[str]:
    """Lock every handle of a deployable; return the uuids of the requests that own any."""
    tx.execute(
        sa.select(attach_handles.c.id)
        .where(attach_handles.c.deployable_id == deployable_id)
        .order_by(attach_handles.c.id)
        .with_for_update()
    ).all()
    owners = (
        sa.select(requests.c.uuid)
        .join(attach_handles, attach_handles.c.request_id == requests.c.id)
        .where(attach_handles.c.deployable_id == deployable_id)
        .order_by(requests.c.id)
    )
    return tx.scalars(owners).all()


def begin(tx: sa.Connection, deployable_id: int, job_id: int) -> bool:
    """Close a deployable for the time of a job; tell whether no other had closed it."""
    changed = tx.execute(
        sa.update(deployables)
        .where(deployables.c.id == deployable_id, deployables.c.job_id.is_(None))
        .values(job_id=job_id)
    ).rowcount
    return bool(changed)


def end(tx: sa.Connection, job_id: int, image: str | None) -> Sequence[str]:
    """Open the deployable of a job again, with the image that is in it now, None for unknown.

    Returns the uuid of its provider, in a list.
    """
    mine = deployables.c.job_id == job_id
    providers = tx.scalars(sa.select(deployables.c.rp_uuid).where(mine)).all()
    tx.execute(sa.update(deployables).where(mine).values(job_id=None, bitstream_id=image))
    return providers


def open_again(tx: sa.Connection) -> int:
    """Open deployables whose job has ended, which nobody did; return how many."""
    ended = sa.select(jobs.c.id).where(jobs.c.state != JobState.OPEN)
    return tx.execute(
        sa.update(deployables).where(deployables.c.job_id.in_(ended)).values(job_id=None)
    ).rowcount
