# SPDX-License-Identifier: Apache-2.0
"""Restore what a reboot of a host has removed: prepared handles, layouts and images.

A reboot removes what a driver has prepared, such as mediated devices, and layouts, such as virtual
functions. When the agent sends its first heartbeat with another boot id, the transaction of that
heartbeat enqueues the jobs for what is in use. Each ARQ has its own job: if it is unbound before
the job is done, only this job is cancelled. The ARQs of a device set with work on the host, such as
a fabric partition, have one job: as at their bind, the partition is activated when all its devices
are prepared, and no guest gets one of them before.

A sweep applies the layouts and images of devices that are not in use.
``core.inventory.device_state`` defines which values are lost. A device gets its layout first, and
its images only when it has the layout, since a new layout replaces the deployables. There is one
job for each lost value and reboot. A job that fails is retried until it succeeds, an operator
cancels it, or the device is removed.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

from cyborg.conductor.jobs import programming
from cyborg.core.binding.profile import parse_group
from cyborg.core.errors import Conflict, InUse, Invalid, NotFound, WrongState
from cyborg.core.inventory.device import Ability
from cyborg.core.jobs.job import AFTER_REBOOT, JobState, WorkItem
from cyborg.core.log import get_logger
from cyborg.db.binding import write as arqs
from cyborg.db.deployables import programming as store
from cyborg.db.device_sets import write as device_sets
from cyborg.db.jobs import write as jobs
from cyborg.db.providers import write as publishing
from cyborg.db.rows import DeviceRow
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.threads.failures import RateLimitedLogger

LOG = get_logger(__name__)

# Devices of one sweep. Each device takes several transactions, and other work of the sweep waits.
MAX_DEVICES = 64


class EndedRestores(NamedTuple):
    """Uuids of ended jobs, and the number of providers to publish."""

    uuids: Sequence[str]
    stale: int


def end_set_restores(tx: sa.Connection, host: str, now: datetime) -> EndedRestores:
    """End the open jobs of a rebooted host that do the work of sets alone, such as an audit's.

    One ARQ waits for such a job. Its handle would not be prepared again, and the partition would be
    active before the devices are prepared. ``enqueue_restores`` then enqueues one job for all.
    """
    # Before the jobs, as everywhere. All ARQs of the host at once: an audit could else enqueue such
    # a job between this and ``enqueue_restores``, or lock the ARQs in another order.
    jobs.lock_bound(tx, host)
    if not (ids := jobs.find_set_restores(tx, host)):
        return EndedRestores(uuids=(), stale=0)
    rows = arqs.lock_of_jobs(tx, ids)
    failing = jobs.failing_restores(tx, ids)
    jobs.end(tx, ids, JobState.CANCELLED, "the host was rebooted: all devices are restored")
    arqs.clear_job(tx, [row["id"] for row in rows])
    # The device was cordoned after the first failure.
    uncordoned = arqs.providers_of([row for row in rows if row["job_id"] in failing])
    stale = publishing.mark_stale_existing(tx, uncordoned, now)
    return EndedRestores(jobs.uuids(tx, ids), stale)


class _Group(NamedTuple):
    """The row id of what one job restores: a device set, or an ARQ."""

    set_id: int | None
    arq_id: int | None


def enqueue_restores(
    tx: sa.Connection, host: str, now: datetime, cancels: Sequence[str] = ()
) -> int:
    """Enqueue jobs that prepare the bound handles of a host again; return their number.

    An ARQ that waits for an open job is left out: the agent forgets the jobs of an older boot, so
    that job runs again. ``end_set_restores`` comes before this; ``cancels`` are the uuids of the
    jobs that it ended, since another conductor may be delivering one of them.
    """
    rows = jobs.lock_bound_without_job(tx, host)
    sets = device_sets.work_items(tx, (row["set_id"] for row in rows))
    # One job for each set with work of its own, and for each other ARQ.
    groups = defaultdict[_Group, list[jobs.BoundHandleRow]](list)
    for row in rows:
        if row["set_id"] in sets:
            group = _Group(set_id=row["set_id"], arq_id=None)
        else:
            group = _Group(set_id=None, arq_id=row["id"])
        groups[group].append(row)
    restores = []
    for group, members in groups.items():
        items = [item for row in members if (item := _find_item(row)) is not None]
        if group.set_id is not None:
            items.append(sets[group.set_id])
        if items:
            restores.append(_to_restore(members, items))
    # In bulk: a host may have hundreds of bound handles, and its heartbeat waits.
    if restores:
        jobs.enqueue_restores(tx, host, restores, now, cancels)
    return len(restores)


def enqueue_set_restores(
    tx: sa.Connection, host: str, providers: Collection[str], now: datetime
) -> int:
    """Enqueue a job that does the work of each of these bound device sets again.

    ``providers`` are the uuids of their providers. One ARQ of each set waits for the job. The
    handles are not prepared: servers use them. Return the number of jobs.
    """
    items = device_sets.work_items(tx, device_sets.find_ids(tx, providers))
    rows = {row["set_id"]: row for row in jobs.lock_bound_without_job(tx, host)}
    restores = [_to_restore([rows[id_]], [item]) for id_, item in items.items() if id_ in rows]
    if restores:
        jobs.enqueue_restores(tx, host, restores, now)
    return len(restores)


def _to_restore(rows: Sequence[jobs.BoundHandleRow], items: Sequence[WorkItem]) -> jobs.Restore:
    """Return the restore of ARQs, which belong to one instance, attachment or context."""
    first = rows[0]
    return jobs.Restore(
        arq_ids=tuple(row["id"] for row in rows),
        instance=first["instance_uuid"],
        subject=first["instance_uuid"] or first["attachment"] or first["context"] or "",
        items=tuple(items),
    )


def _find_item(row: jobs.BoundHandleRow) -> WorkItem | None:
    """Return the work that prepares the handle of an ARQ again, None without any."""
    if Ability.PREPARES not in row["abilities"]:
        return None
    return WorkItem(
        backend=row["backend"],
        device=row["device"],
        deployable=row["deployable"],
        handle=row["handle"],
        accel=parse_group(row["group"], "group").accel,
    )


def enqueue_layouts(tx: sa.Connection, host: str, now: datetime) -> int:
    """Enqueue jobs that apply the layouts of the devices in use again; return their number.

    The bound handles of such a device do not exist on the host before the end of its job. So
    reports do not change the device until then, and its handles are not drained. ``reapply``
    handles the devices that are not in use. Raise Conflict if a device was changed concurrently.
    The caller has locked the ARQs of ``enqueue_restores`` and then the host's agent.
    """
    count = 0
    for uuid in store.devices_in_use(tx, host):
        rows = store.lock_device(tx, uuid)
        device = rows[0]  # the columns of the device are the same in each
        layout, offered = device["layout"], [known["name"] for known in device["layouts"]]
        # A job already changes the device, or has ended and waits for a report.
        if any(row["job_id"] is not None for row in rows):
            continue
        if Ability.PARTITIONS not in device["abilities"] or layout is None or layout not in offered:
            continue
        if len(offered) < 2:
            continue  # such as a card without virtual functions: there is nothing to apply
        # No previous layout: after an error, the device keeps what it has after the boot. No
        # deadline either: such a job is retried until it succeeds.
        options = {AFTER_REBOOT: True}
        job = programming.enqueue_partition(
            tx, uuid, device, layout, options, now, previous_layout=None
        )
        if not store.start(tx, programming.deployable_ids(rows), job):
            raise Conflict(f"device {uuid} was changed concurrently", device=uuid)
        programming.mark_stale(tx, rows, now)
        count += 1
    return count


@dataclass(eq=False)
class LostValues:
    """Sweep of the devices that lost their layout or images; safe to run in several conductors."""

    uow: UnitOfWork
    partitions: programming.Partitions
    programs: programming.Programs
    _log: RateLimitedLogger = field(
        init=False, default_factory=lambda: RateLimitedLogger(logger=LOG)
    )
    # Id of the last device of the previous sweep. Devices that must wait are found each time: a
    # sweep that began with the first would never reach those behind MAX_DEVICES of them.
    _last: int = field(init=False, default=0)

    def sweep(self) -> int:
        """Create the jobs that are possible now; return the number of devices with new jobs."""
        after = self._last
        devices = self.uow.run(lambda tx: store.find_lost(tx, MAX_DEVICES, after))
        self._last = devices[-1]["id"] if len(devices) == MAX_DEVICES else 0
        return sum(map(self._apply, devices))

    def _apply(self, device: DeviceRow) -> bool:
        """Create the jobs of a device; return False if the device must wait.

        The last transaction records that the device is done. If the conductor is killed before it,
        a later sweep finds the device again, after the end of its job.
        """
        layout = device["desired_layout"]
        if layout is not None and layout != device["layout"]:
            attempts: list[Callable[[], object]] = [
                lambda: self.partitions.start_again(device["uuid"], layout)
            ]
            text = f"layout {layout}"
        else:
            images = self.uow.run(lambda tx: store.lost_images(tx, device["id"]))
            attempts = [
                functools.partial(self.programs.start_again, deployable, image)
                for deployable, image in images.items()
            ]
            text = "an image"
        fields: dict[str, Any] = {"device": device["uuid"], "host": device["host"]}
        for attempt in attempts:
            try:
                attempt()
            except (InUse, WrongState, NotFound, Invalid) as exc:
                # It changed since it was found: the next sweep decides again. Invalid: a device
                # whose kernel driver is not bound yet has no layouts.
                self._log.warn("Cannot apply %s again yet, will retry: %s", text, exc, **fields)
                return False
            LOG.info("Applying %s again after the reboot of the host", text, **fields)
        self.uow.run(lambda tx: store.clear_boot_check(tx, device["id"]))
        return True
