# SPDX-License-Identifier: Apache-2.0
"""Restore the bound handles of a host that has rebooted, within the transaction of the caller.

A reboot removes what a driver has prepared, such as mediated devices, and layouts, such as virtual
functions. The jobs are enqueued when the agent sends its first heartbeat with another boot id. Each
ARQ has its own job: if it is unbound before the job is done, only this job is cancelled.
"""

from datetime import datetime

import sqlalchemy as sa

from cyborg.core.binding.profile import parse_group
from cyborg.core.errors import Conflict
from cyborg.core.inventory.device import Ability
from cyborg.core.jobs.job import AFTER_REBOOT, JobKind, WorkItem
from cyborg.db.binding import write as arqs
from cyborg.db.deployables import programming
from cyborg.db.jobs import write as jobs
from cyborg.db.providers import write as providers


def enqueue_restores(tx: sa.Connection, host: str, now: datetime) -> int:
    """Enqueue jobs that prepare the bound handles of a host again; return their number.

    An ARQ that waits for an open job is left out: the agent forgets the jobs of an older boot, so
    that job runs again.
    """
    restores = [
        jobs.Restore(
            arq_id=row["id"],
            instance=row["instance_uuid"],
            subject=row["instance_uuid"] or row["attachment"] or row["context"] or "",
            item=WorkItem(
                backend=row["backend"],
                device=row["device"],
                deployable=row["deployable"],
                handle=row["handle"],
                accel=parse_group(row["group"], "group").accel,
            ),
        )
        for row in arqs.lock_bound_without_job(tx, host)
        if Ability.PREPARES in row["abilities"]
    ]
    if restores:
        jobs.enqueue_restores(tx, host, restores, now)
    return len(restores)


def enqueue_layouts(tx: sa.Connection, host: str, now: datetime) -> int:
    """Enqueue jobs that apply the layouts of the devices in use again; return their number.

    The bound handles of such a device do not exist on the host before the end of its job. So
    reports do not change the device until then, and its handles are not drained. ``reapply``
    handles the devices that are not in use. Raise Conflict if a device was changed concurrently.
    The caller has locked the ARQs of ``enqueue_restores`` and then the host's agent.
    """
    count = 0
    for uuid in programming.devices_in_use(tx, host):
        rows = programming.lock_device(tx, uuid)
        row = rows[0]
        known = [layout["name"] for layout in row["layouts"]]
        if any(row["job_id"] is not None for row in rows):
            continue
        if Ability.PARTITIONS not in row["abilities"] or row["layout"] not in known:
            continue
        if len(known) < 2:
            continue  # such as a card without virtual functions: there is nothing to apply
        item = WorkItem(backend=row["backend"], device=row["address"], deployable="")
        # No previous layout: after an error, the device keeps what it has after the boot.
        arguments = {
            "items": [item.to_dict()],
            "layout": row["layout"],
            "previous_layout": None,
            AFTER_REBOOT: True,
        }
        job = jobs.enqueue(
            tx,
            kind=JobKind.PARTITION,
            host=host,
            subject=uuid,
            arguments=arguments,
            now=now,
            deadline=None,
        )
        ids = [id_ for r in rows if (id_ := r["deployable_id"]) is not None]
        if not programming.start(tx, ids, job):
            raise Conflict(f"device {uuid} was changed concurrently", device=uuid)
        stale = [provider for r in rows if (provider := r["rp_uuid"]) is not None]
        providers.mark_stale_existing(tx, stale, now)
        count += 1
    return count
