# SPDX-License-Identifier: Apache-2.0
"""Write which program or partition job changes a deployable: no handle is claimed during the job.

``start_boot_checks`` and the later functions write which layouts and images a host has lost with a
reboot: see ``core.inventory.device_state``.
"""

from collections.abc import Collection, Sequence
from typing import Any, TypedDict

import sqlalchemy as sa

from cyborg.core.inventory.device_state import BootCheck
from cyborg.core.jobs.job import JobKind, JobState
from cyborg.db import bulk, joins
from cyborg.db.rows import DeviceRow, fetch_all, fetch_first, row_columns
from cyborg.db.schema import arqs, attach_handles, deployables, devices, jobs, services


class ProgramRow(TypedDict):
    """A deployable, with the id and the arguments of its program job, and data of its device."""

    id: int
    address: str
    rp_uuid: str
    job_id: int | None
    arguments: dict[str, Any] | None
    device: str
    backend: str
    host: str
    abilities: list[str]


class PartitionRow(TypedDict):
    """A device and one of its deployables.

    The fields from ``deployable_id`` on are about the deployable, None if the device has none.
    ``job_id``, ``job_state`` and ``arguments`` are about the job of the deployable, None if it has
    no job.
    """

    address: str
    host: str
    backend: str
    abilities: list[str]
    layout: str | None
    layouts: list[dict[str, Any]]
    deployable_id: int | None
    rp_uuid: str | None
    job_id: int | None
    job_state: str | None
    arguments: dict[str, Any] | None


class OpenPartitionRow(TypedDict):
    """An open partition job, with the uuid and the address of its device."""

    id: int
    subject: str
    device: str
    arguments: dict[str, Any]


def lock_device(tx: sa.Connection, uuid: str) -> list[PartitionRow]:
    """Lock the deployables of a device; return one row for each.

    A device without deployables has one row. The result is empty if there is no such device.
    """
    # Locked first: PostgreSQL rejects FOR UPDATE of the nullable side of an outer join.
    ids = tx.scalars(
        sa.select(deployables.c.id)
        .join(devices, devices.c.id == deployables.c.device_id)
        .where(devices.c.uuid == uuid)
        .order_by(deployables.c.id)
        .with_for_update(of=deployables)
    ).all()
    of_job = {"deployable_id": deployables.c.id, "job_state": jobs.c.state}
    query = (
        sa.select(*row_columns(PartitionRow, devices, deployables, jobs, **of_job))
        .outerjoin(
            deployables,
            sa.and_(deployables.c.device_id == devices.c.id, deployables.c.id.in_(ids)),
        )
        .outerjoin(jobs, jobs.c.id == deployables.c.job_id)
        .where(devices.c.uuid == uuid)
        .order_by(deployables.c.id)
    )
    return fetch_all(PartitionRow, tx.execute(query))


def open_partitions(tx: sa.Connection, host: str) -> list[OpenPartitionRow]:
    """Return the open partition jobs of a host.

    The job of a device that is being drained, or that has no deployables, is found only here. The
    caller holds the lock of the host (``backends.desired.lock_host``), so that no other transaction
    adds a job.
    """
    query = (
        sa.select(*row_columns(OpenPartitionRow, jobs, device=devices.c.address))
        .join(devices, devices.c.uuid == jobs.c.subject)
        .where(
            jobs.c.host == host,
            jobs.c.kind == str(JobKind.PARTITION),
            jobs.c.state == str(JobState.OPEN),
        )
        .order_by(jobs.c.id)
    )
    return fetch_all(OpenPartitionRow, tx.execute(query))


def devices_in_use(tx: sa.Connection, host: str) -> Sequence[str]:
    """Return the uuids of the devices of a host that have a layout and are in use.

    A device is in use if an ARQ owns one of its handles that is not draining.
    """
    query = (
        sa.select(devices.c.uuid)
        .join(deployables, deployables.c.device_id == devices.c.id)
        .join(attach_handles, attach_handles.c.deployable_id == deployables.c.id)
        .where(
            devices.c.host == host,
            devices.c.layout.is_not(None),
            attach_handles.c.arq_id.is_not(None),
            # A draining handle did not exist any more before the boot.
            sa.not_(attach_handles.c.draining),
        )
        .distinct()
        .order_by(devices.c.uuid)
    )
    return tx.scalars(query).all()


def lock(tx: sa.Connection, uuid: str) -> ProgramRow | None:
    """Return a deployable, locked, or None."""
    # Locked first, as in ``lock_device``: the query below has an outer join.
    locked = sa.select(deployables.c.id).where(deployables.c.uuid == uuid).with_for_update()
    if tx.scalar(locked) is None:
        return None
    of_device = {"device": devices.c.address, "host": devices.c.host}
    query = (
        sa.select(*row_columns(ProgramRow, deployables, jobs, devices, **of_device))
        .join(devices, devices.c.id == deployables.c.device_id)
        .outerjoin(jobs, jobs.c.id == deployables.c.job_id)
        .where(deployables.c.uuid == uuid)
    )
    return fetch_first(ProgramRow, tx.execute(query))


def lock_handles(tx: sa.Connection, deployable_ids: Collection[int]) -> Sequence[str]:
    """Lock every handle of deployables; return the uuids of the ARQs that own them."""
    tx.execute(
        sa.select(attach_handles.c.id)
        .where(attach_handles.c.deployable_id.in_(deployable_ids))
        .order_by(attach_handles.c.id)
        .with_for_update()
    ).all()
    owners = (
        sa.select(arqs.c.uuid)
        .join(attach_handles, attach_handles.c.arq_id == arqs.c.id)
        .where(attach_handles.c.deployable_id.in_(deployable_ids))
        .order_by(arqs.c.id)
    )
    return tx.scalars(owners).all()


def count_dirty(tx: sa.Connection, deployable_ids: Collection[int]) -> int:
    """Return the number of handles, of these deployables, that need cleaning and have no owner."""
    h = attach_handles.c
    query = sa.select(sa.func.count()).where(
        h.deployable_id.in_(deployable_ids), h.needs_cleaning, h.arq_id.is_(None)
    )
    return int(tx.scalar(query) or 0)


def start(tx: sa.Connection, deployable_ids: Collection[int], job_id: int) -> bool:
    """Assign a job to deployables; return False if one of the deployables already has a job.

    The others have the new job then: the caller must roll the transaction back.
    """
    changed = tx.execute(
        sa.update(deployables)
        .where(deployables.c.id.in_(deployable_ids), deployables.c.job_id.is_(None))
        .values(job_id=job_id)
    ).rowcount
    return changed == len(deployable_ids)


def end(tx: sa.Connection, job_id: int, image: str | None) -> Sequence[str]:
    """Detach a job from its deployable, and write the loaded image, None if it is unknown.

    Return a list with the provider uuid of the deployable.
    """
    programmed = deployables.c.job_id == job_id
    # Before the UPDATE, after which no column refers to the job.
    providers = tx.scalars(sa.select(deployables.c.rp_uuid).where(programmed)).all()
    values = {"job_id": None, "bitstream_id": image}
    # After a failure the image of the last success stays desired.
    if image is not None:
        values["desired_image"] = image
    tx.execute(sa.update(deployables).where(programmed).values(**values))
    return providers


def detach(tx: sa.Connection, deployable_ids: Collection[int]) -> Sequence[str]:
    """Detach deployables from their ended jobs; return the provider uuids of these deployables.

    Deployables that no longer exist are left out.

    The caller holds the lock of the host's inventory.
    """
    selected = deployables.c.id.in_(deployable_ids)
    tx.execute(sa.update(deployables).where(selected).values(job_id=None))
    return tx.scalars(sa.select(deployables.c.rp_uuid).where(selected)).all()


def detach_ended_jobs(tx: sa.Connection) -> set[str]:
    """Detach deployables from program jobs that have already ended; return their providers' uuids.

    The deployables of a partition job are detached by the report that has the new layout.
    """
    ended = tx.execute(
        sa.select(jobs.c.id, deployables.c.rp_uuid)
        .join(deployables, deployables.c.job_id == jobs.c.id)
        .where(
            # An index finds the few deployables with a job. MariaDB reads all deployables for an
            # UPDATE with a subquery.
            deployables.c.job_id.is_not(None),
            jobs.c.state != JobState.OPEN,
            jobs.c.kind == JobKind.PROGRAM,
        )
    ).all()
    # An ended job stays ended, so that the second statement need not check it again.
    bulk.update_where(tx, deployables.c.job_id, sorted({row.id for row in ended}), job_id=None)
    return {row.rp_uuid for row in ended}


def set_desired_layout(tx: sa.Connection, device: str, layout: str) -> None:
    """Record the layout that was applied to the device with this uuid.

    If the device has a boot check that waits for a report, the check continues: it is not known yet
    which images the device has lost.
    """
    waits = devices.c.boot_check == BootCheck.AWAITING_REPORT
    check = sa.case((waits, devices.c.boot_check), else_=None)
    values = {"desired_layout": layout, "boot_check": check}
    tx.execute(sa.update(devices).where(devices.c.uuid == device).values(**values))


def start_boot_checks(tx: sa.Connection, host: str) -> int:
    """Start the boot check of each device of a rebooted host that has a desired layout or image.

    The check waits for the next report. Return the number of devices.
    """
    has_image = (
        sa.exists()
        .where(deployables.c.device_id == devices.c.id, deployables.c.desired_image.is_not(None))
        .correlate(devices)
    )
    desired = sa.or_(devices.c.desired_layout.is_not(None), has_image)
    return tx.execute(
        sa.update(devices)
        .where(devices.c.host == host, desired)
        .values(boot_check=BootCheck.AWAITING_REPORT)
    ).rowcount


# What was desired and is not reported after the boot: NULL counts as another value.
_IMAGE_LOST = sa.and_(
    deployables.c.desired_image.is_not(None),
    sa.func.coalesce(deployables.c.bitstream_id, "") != deployables.c.desired_image,
)
_LOST = sa.or_(
    sa.and_(
        devices.c.desired_layout.is_not(None),
        sa.func.coalesce(devices.c.layout, "") != devices.c.desired_layout,
    ),
    sa.exists().where(deployables.c.device_id == devices.c.id, _IMAGE_LOST).correlate(devices),
)


def end_boot_checks(tx: sa.Connection, host: str, addresses: Collection[str]) -> int:
    """Compare the desired values with the reported values, for devices with a boot check.

    Return how many devices have lost a layout or image. Call this after the report is written.
    ``addresses`` are the addresses of the reported devices.
    """
    query = sa.select(devices.c.id, devices.c.address, _LOST.label("lost")).where(
        devices.c.host == host, devices.c.boot_check == BootCheck.AWAITING_REPORT
    )
    checked = [row for row in tx.execute(query) if row.address in addresses]
    # Two statements, whatever the number of devices.
    for lost in (False, True):
        ids = [row.id for row in checked if bool(row.lost) is lost]
        bulk.update_where(tx, devices.c.id, ids, boot_check=BootCheck.LOST if lost else None)
    return sum(bool(row.lost) for row in checked)


def find_lost(tx: sa.Connection, limit: int, after: int = 0) -> list[DeviceRow]:
    """Return up to ``limit`` devices that lost values and can get them again now.

    The devices are ordered by id; only ids greater than ``after`` are returned. A device is left
    out while its host is down, a handle of the device is owned or dirty, or the device is being
    programmed.
    """
    h = attach_handles.c
    busy = (
        sa.select(deployables.c.id)
        .outerjoin(attach_handles, h.deployable_id == deployables.c.id)
        .where(
            deployables.c.device_id == devices.c.id,
            sa.or_(h.arq_id.is_not(None), h.needs_cleaning, deployables.c.job_id.is_not(None)),
        )
        .correlate(devices)
    )
    query = (
        sa.select(devices)
        .join(services, joins.AGENT_OF_DEVICE)
        .where(
            devices.c.boot_check == BootCheck.LOST,
            devices.c.id > after,
            sa.not_(devices.c.draining),
            services.c.down_since.is_(None),
            sa.not_(sa.exists(busy)),
        )
        .order_by(devices.c.id)
        .limit(limit)
    )
    return fetch_all(DeviceRow, tx.execute(query))


def lost_images(tx: sa.Connection, device_id: int) -> dict[str, str]:
    """Return the lost images of operators, by the uuid of the deployable."""
    query = (
        sa.select(deployables.c.uuid, deployables.c.desired_image)
        .where(deployables.c.device_id == device_id, _IMAGE_LOST)
        .order_by(deployables.c.id)
    )
    return {row.uuid: row.desired_image for row in tx.execute(query)}


def clear_boot_check(tx: sa.Connection, device_id: int) -> bool:
    """End the boot check of a device with lost values; return False if it is in another state."""
    lost = sa.and_(devices.c.id == device_id, devices.c.boot_check == BootCheck.LOST)
    return bool(tx.execute(sa.update(devices).where(lost).values(boot_check=None)).rowcount)
