# SPDX-License-Identifier: Apache-2.0
"""Write the program job of a deployable, whose handles are not allocated during the job."""

from collections.abc import Sequence
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.jobs.job import JobState
from cyborg.db.rows import fetch_first
from cyborg.db.schema import arqs, attach_handles, deployables, devices, jobs


class ProgramRow(TypedDict):
    """A deployable, with its program job and that job's arguments, and its device's address."""

    id: int
    address: str
    rp_uuid: str
    job_id: int | None
    arguments: dict[str, Any] | None
    device: str
    backend: str
    host: str
    abilities: list[str]


def lock(tx: sa.Connection, uuid: str) -> ProgramRow | None:
    """Return a deployable, locked, or None."""
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
    return fetch_first(ProgramRow, tx.execute(query))


def lock_handles(tx: sa.Connection, deployable_id: int) -> Sequence[str]:
    """Lock every handle of a deployable; return the uuids of the ARQs that own them."""
    tx.execute(
        sa.select(attach_handles.c.id)
        .where(attach_handles.c.deployable_id == deployable_id)
        .order_by(attach_handles.c.id)
        .with_for_update()
    ).all()
    owners = (
        sa.select(arqs.c.uuid)
        .join(attach_handles, attach_handles.c.arq_id == arqs.c.id)
        .where(attach_handles.c.deployable_id == deployable_id)
        .order_by(arqs.c.id)
    )
    return tx.scalars(owners).all()


def start(tx: sa.Connection, deployable_id: int, job_id: int) -> bool:
    """Assign a program job to a deployable; return False if it already has one."""
    changed = tx.execute(
        sa.update(deployables)
        .where(deployables.c.id == deployable_id, deployables.c.job_id.is_(None))
        .values(job_id=job_id)
    ).rowcount
    return bool(changed)


def end(tx: sa.Connection, job_id: int, image: str | None) -> Sequence[str]:
    """Detach a job from its deployable and set the loaded image, None if unknown.

    Return the uuid of the provider, in a list.
    """
    programmed = deployables.c.job_id == job_id
    providers = tx.scalars(sa.select(deployables.c.rp_uuid).where(programmed)).all()
    tx.execute(sa.update(deployables).where(programmed).values(job_id=None, bitstream_id=image))
    return providers


def detach_ended_jobs(tx: sa.Connection) -> int:
    """Detach deployables from jobs that have already ended; return their number."""
    ended = sa.select(jobs.c.id).where(jobs.c.state != JobState.OPEN)
    return tx.execute(
        sa.update(deployables).where(deployables.c.job_id.in_(ended)).values(job_id=None)
    ).rowcount
