# SPDX-License-Identifier: Apache-2.0
"""Changes of devices by jobs, during which no handle is claimed: layouts and images.

A partition job applies a layout to a device, a program job loads an image into a deployable.

A device in use may drain first: it is cordoned until its partition job can begin
(``db.backends.desired``). Its bound handles stay, reports and restores change it as usual, and no
handle of it is claimed. The job is open meanwhile, so that any conductor continues it.

Locks are taken in one order: the agent of the host, deployables, handles, the job.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.jobs.completion import JobResult
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.errors import CyborgError, InUse, Invalid, NotFound, WrongState
from cyborg.core.inventory.device import MAX_TEXT, Ability
from cyborg.core.jobs.job import AFTER_REBOOT, DRAINS, JobKind, JobState, WorkItem
from cyborg.core.log import get_logger
from cyborg.core.text import join_limited
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.backends import desired as desired_backends
from cyborg.db.deployables import programming as store
from cyborg.db.devices import read as device_reads
from cyborg.db.devices import write as devices
from cyborg.db.jobs import write as jobs
from cyborg.db.providers import write as providers
from cyborg.db.services import write as services
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.threads.failures import JITTER, compute_delay

LOG = get_logger(__name__)

# Layouts or ARQs in an error.
MAX_NAMED = 8
# Seconds between two checks.
MAX_DELAY = 60.0
_FAILED = (JobState.FAILED, JobState.CANCELLED)


def lock_target(
    tx: sa.Connection, uuid: str, host: str, layout: str
) -> Sequence[store.PartitionRow]:
    """Return a device of a host with each of its deployables, which are locked.

    Raise NotFound if the device was removed, WrongState if its driver cannot partition it, and
    Invalid if it does not have the layout.
    """
    # A report must not add a deployable meanwhile: it would not be closed.
    desired_backends.lock_host(tx, host)
    rows = store.lock_device(tx, uuid)
    if not rows:
        raise NotFound(f"device {uuid} was removed", device=uuid)
    row = rows[0]  # the columns of the device are the same in each
    if Ability.PARTITIONS not in row["abilities"]:
        raise WrongState(
            f"device {uuid} of backend {row['backend']} on host {row['host']} cannot be "
            "partitioned: its driver does not support this",
            device=uuid,
        )
    names = [known["name"] for known in row["layouts"]]
    if layout not in names:
        raise Invalid(
            f"device {uuid} has no layout {layout!r}: expected one of "
            f"{join_limited(names, MAX_NAMED)}",
            field="layout",
        )
    return rows


class OpenJob(NamedTuple):
    """A job that changes or drains a device, by its row id."""

    id: int
    arguments: Mapping[str, Any]


def find_job(tx: sa.Connection, uuid: str, rows: Sequence[store.PartitionRow]) -> OpenJob | None:
    """Return the job that changes or drains a device, or None.

    ``rows`` are those of its deployables, or one row if it has none. A failed job is not returned,
    although the next report must still detach it from the device.
    """
    # Only its subject names the job of a device that still drains, or has no deployables.
    for job in store.open_partitions(tx, rows[0]["host"]):
        if job["subject"] == uuid:
            return OpenJob(job["id"], job["arguments"])
    for row in rows:
        if row["job_id"] is not None and row["job_state"] not in _FAILED:
            return OpenJob(row["job_id"], row["arguments"] or {})
    return None


def find_obstacle(
    tx: sa.Connection, uuid: str, rows: Sequence[store.PartitionRow]
) -> InUse | WrongState | None:
    """Lock the handles of a device; return why its layout cannot be changed now, or None."""
    ids, host = deployable_ids(rows), rows[0]["host"]
    # The locks block new claims of handles; earlier claims are visible.
    if owners := store.lock_handles(tx, ids):
        return InUse(
            f"device {uuid} is in use by {len(owners)} request(s): "
            f"{join_limited(owners, MAX_NAMED)}; delete them, or drain the device",
            device=uuid,
            requests=list(owners[:MAX_NAMED]),
        )
    if dirty := store.count_dirty(tx, ids):
        return WrongState(
            f"{dirty} handle(s) of device {uuid} are being cleaned: retry when this is done",
            device=uuid,
        )
    if not services.has_agent(tx, host):
        return WrongState(
            f"device {uuid} cannot be partitioned: the agent of host {host} is down", device=uuid
        )
    return None


def close_device(
    tx: sa.Connection, uuid: str, rows: Sequence[store.PartitionRow], job: int
) -> None:
    """Prevent claims of the handles of a device until a job has ended. Raise WrongState."""
    # A device offers nothing in some layouts, such as a network card of the host that has no
    # virtual functions: then it has no deployable that could be closed.
    ids = deployable_ids(rows)
    if any(row["job_state"] in _FAILED for row in rows):
        store.detach(tx, ids)  # from a failed job that waits for a report
    if not store.start(tx, ids, job):
        raise WrongState(f"device {uuid} was changed concurrently, retry", device=uuid)


def mark_stale(tx: sa.Connection, rows: Sequence[store.PartitionRow], now: datetime) -> int:
    """Mark the providers of a device stale; return their number."""
    stale = [provider for row in rows if (provider := row["rp_uuid"]) is not None]
    providers.mark_stale_existing(tx, stale, now)
    return len(stale)


def deployable_ids(rows: Sequence[store.PartitionRow]) -> list[int]:
    """Return the row ids of the deployables of a device, which may have none."""
    return [id_ for row in rows if (id_ := row["deployable_id"]) is not None]


def enqueue_partition(
    tx: sa.Connection,
    uuid: str,
    row: store.PartitionRow,
    layout: str,
    options: Mapping[str, bool],
    now: datetime,
    *,
    previous_layout: str | None,
    deadline: datetime | None = None,
) -> int:
    """Enqueue a job that applies a layout to a device; return the id of the job.

    ``options`` are further arguments of the job: DRAINS, AFTER_REBOOT.
    """
    # Without a deployable: the work is for the whole device.
    item = WorkItem(backend=row["backend"], device=row["address"], deployable="")
    arguments = {"items": [item.to_dict()], "layout": layout, "previous_layout": previous_layout}
    return jobs.enqueue(
        tx,
        kind=JobKind.PARTITION,
        host=row["host"],
        subject=uuid,
        arguments={**arguments, **options},
        now=now,
        deadline=deadline,
    )


def advance_drain(
    tx: sa.Connection,
    job: jobs.JobRow,
    owner: str,
    now: datetime,
    notifications: NotificationBuilder,
) -> JobResult:
    """Start the job if nothing uses its device any more; else schedule another check.

    After the deadline, or if the layout is not possible any more, end the job and uncordon the
    device. Do nothing if the conductor ``owner`` no longer has the job.
    """
    uuid, arguments = job["subject"], job["arguments"]
    obstacle: CyborgError | None
    try:
        rows = lock_target(tx, uuid, job["host"], arguments["layout"])
    except (NotFound, WrongState, Invalid) as exc:
        device = devices.by_uuid(tx, uuid)
        # Final, unless the device has no layouts: its kernel driver may not be bound yet.
        if device is None or device["layouts"]:
            return _fail(tx, job, owner, exc.message, now, notifications)
        rows, obstacle = (), exc
    else:
        is_changing = any(row["job_id"] is not None for row in rows)
        other_job = WrongState(f"another job changes device {uuid}")
        obstacle = other_job if is_changing else find_obstacle(tx, uuid, rows)
    if obstacle is None:
        return _begin(tx, job, owner, rows, now)
    if job["deadline"] is not None and now >= job["deadline"]:
        return _fail(tx, job, owner, f"not drained in time: {obstacle.message}", now, notifications)
    # Polled: the end of a use does not know which drains wait for it.
    jitter = JITTER.uniform(0.0, 0.5)
    until = now + timedelta(seconds=compute_delay(job["attempts"], MAX_DELAY, jitter))
    if job["deadline"] is not None:
        until = min(until, job["deadline"])
    jobs.reschedule(tx, job["id"], owner, until=until, error=obstacle.message, activity=None)
    return JobResult()


def _begin(
    tx: sa.Connection,
    job: jobs.JobRow,
    owner: str,
    rows: Sequence[store.PartitionRow],
    now: datetime,
) -> JobResult:
    """Make a job whose device is drained an ordinary one, which the dispatcher sends."""
    arguments = {name: value for name, value in job["arguments"].items() if name != DRAINS}
    # The layout may have changed since the request.
    arguments["previous_layout"] = rows[0]["layout"]
    if not jobs.end_drain(tx, job["id"], owner, arguments, now):
        return JobResult()
    # Closed by the job before the cordon ends: there is no moment in which a handle could be
    # claimed.
    close_device(tx, job["subject"], rows, job["id"])
    desired_backends.sync_cordon(tx, [job["host"]], now)
    return JobResult(completed=1, jobs=1, providers=mark_stale(tx, rows, now))


def _fail(
    tx: sa.Connection,
    job: jobs.JobRow,
    owner: str,
    error: str,
    now: datetime,
    notifications: NotificationBuilder,
) -> JobResult:
    """End a job whose device cannot be drained; do nothing if ``owner`` no longer has the job."""
    # Guarded by the owner: another conductor may have taken the job over and ended its drain.
    if jobs.reschedule(tx, job["id"], owner, until=now, error=error, activity=None):
        notifications.record_layout_finished(tx, job["subject"], job["arguments"]["layout"], error)
        return end_drain(tx, job, JobState.FAILED, error, now)
    return JobResult()


def end_drain(
    tx: sa.Connection, job: jobs.JobRow, state: JobState, error: str, now: datetime
) -> JobResult:
    """End a job whose device drains, and uncordon the device. The caller has locked the job."""
    jobs.end(tx, [job["id"]], state, error)
    desired_backends.sync_cordon(tx, [job["host"]], now)
    rows = store.lock_device(tx, job["subject"])
    return JobResult(completed=1, providers=mark_stale(tx, rows, now))


@dataclass(frozen=True)
class Partitions:
    """Partitioning of devices by layouts.

    ``wake_jobs`` and ``wake_publisher`` are called after the commit of a new job.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    wake_jobs: Callable[[], None] = lambda: None
    wake_publisher: Callable[[], None] = lambda: None

    def start(self, uuid: str, layout: str, drain: bool = False) -> dict[str, str]:
        """Enqueue a job that applies a layout to a device; return ``{"uuid": of the job}``.

        If a job already applies this layout, return that job. With ``drain``, cordon the device,
        and let the job wait until nothing uses it. Raise NotFound, Invalid for an unknown layout,
        and WrongState if the device cannot be partitioned. Without ``drain``, raise InUse if an ARQ
        owns a handle of the device, and WrongState if a handle is dirty or the agent is down.
        """
        uuid, layout = parse_uuid(uuid, "uuid"), check_text("layout", layout, MAX_TEXT)
        return self._start(uuid, layout, {DRAINS: True} if drain else {})

    def start_again(self, uuid: str, layout: str) -> None:
        """Enqueue a job, as ``start`` does, that applies the layout that a reboot removed."""
        self._start(uuid, layout, {AFTER_REBOOT: True})

    def _start(self, uuid: str, layout: str, options: Mapping[str, bool]) -> dict[str, str]:
        job = self.uow.run_once(
            lambda tx: self._enqueue_job(tx, uuid, layout, options),
            answer=lambda job: {"uuid": job},
        )
        LOG.info("Applying layout %s to device", layout, device=uuid)
        self.wake_jobs()
        self.wake_publisher()
        return {"uuid": job}

    def _enqueue_job(
        self, tx: sa.Connection, uuid: str, layout: str, options: Mapping[str, bool]
    ) -> str:
        """Enqueue the job of a layout; with DRAINS it may wait for the end of uses.

        ``options`` are arguments of the job, DRAINS or AFTER_REBOOT. Return the uuid of the job.
        """
        device = device_reads.get(tx, uuid)
        if device is None:
            raise NotFound(f"no device {uuid}", device=uuid)
        rows = lock_target(tx, uuid, device["hostname"], layout)
        row = rows[0]
        if (open_job := find_job(tx, uuid, rows)) is not None:
            current = open_job.arguments.get("layout")
            # After a reboot, a job that still drains is not enough: if it is cancelled, the layout
            # that the reboot removed is never applied.
            may_be_cancelled = DRAINS in open_job.arguments and AFTER_REBOOT in options
            if current == layout and not may_be_cancelled:
                return jobs.uuids(tx, [open_job.id])[0]
            # A program job has no layout.
            change = "programmed" if current is None else f"partitioned with layout {current}"
            raise WrongState(
                f"device {uuid} is being {change}: wait until the job has ended and the host has "
                "reported the device",
                device=uuid,
            )
        now, deadline = self.uow.clock(), None
        obstacle = find_obstacle(tx, uuid, rows)
        # Without an obstacle, the job need not wait and begins at once.
        if obstacle is None:
            options = {name: value for name, value in options.items() if name != DRAINS}
        elif DRAINS in options:
            deadline = now + timedelta(seconds=self.conf.conductor.drain_timeout)
        else:
            raise obstacle
        job = enqueue_partition(
            tx, uuid, row, layout, options, now, previous_layout=row["layout"], deadline=deadline
        )
        if obstacle is None:
            close_device(tx, uuid, rows, job)
        else:
            desired_backends.sync_cordon(tx, [row["host"]], now)
        mark_stale(tx, rows, now)
        return jobs.uuids(tx, [job])[0]


@dataclass(frozen=True)
class Programs:
    """Programming of deployables with images; ``wake_jobs`` is called after the commit of a job."""

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    notifications: NotificationBuilder
    wake_jobs: Callable[[], None] = lambda: None

    def start(self, uuid: str, image_uuid: str) -> None:
        """Enqueue a job that loads an image into a deployable; do not wait for its end.

        Do nothing if the same image is being loaded. Raise NotFound, InUse if a request owns a
        handle of the deployable, and WrongState if the driver cannot program or another image is
        being loaded.
        """
        uuid, image = parse_uuid(uuid, "uuid"), parse_uuid(image_uuid, "image_uuid")
        self._start(uuid, image, after_reboot=False)

    def start_again(self, uuid: str, image: str) -> None:
        """Enqueue a job, as ``start`` does, that loads the image that a reboot removed."""
        self._start(uuid, image, after_reboot=True)

    def _start(self, uuid: str, image: str, *, after_reboot: bool) -> None:
        self.uow.run_once(lambda tx: self._enqueue_job(tx, uuid, image, after_reboot))
        LOG.info("Programming deployable with image %s", image, deployable=uuid)
        self.wake_jobs()

    def _enqueue_job(self, tx: sa.Connection, uuid: str, image: str, after_reboot: bool) -> None:
        """Enqueue the job of an image, unless it is being programmed already."""
        row = store.lock(tx, uuid)
        if row is None:
            raise NotFound(f"no deployable {uuid}", deployable=uuid)
        if row["job_id"] is not None:
            loading = (row["arguments"] or {}).get("image")
            if loading == image:
                return
            raise WrongState(
                f"deployable {uuid} is being programmed with image {loading}: wait until the job "
                "has ended",
                deployable=uuid,
            )
        if Ability.PROGRAMS not in row["abilities"]:
            raise WrongState(
                f"deployable {uuid} of backend {row['backend']} on host {row['host']} cannot be "
                "programmed: its driver does not support this",
                deployable=uuid,
            )
        # The locks block new claims of handles; earlier claims are visible.
        if owners := store.lock_handles(tx, [row["id"]]):
            raise InUse(
                f"deployable {uuid} is in use by {len(owners)} request(s): {', '.join(owners[:3])}",
                deployable=uuid,
                requests=list(owners),
            )
        item = WorkItem(backend=row["backend"], device=row["device"], deployable=row["address"])
        now, deadline = self.uow.clock(), None
        arguments: dict[str, Any] = {"items": [item.to_dict()], "image": image}
        if after_reboot:
            # No deadline: such a job is retried until it succeeds.
            arguments[AFTER_REBOOT] = True
        else:
            deadline = now + timedelta(seconds=self.conf.conductor.program_timeout)
        job = jobs.enqueue(
            tx,
            kind=JobKind.PROGRAM,
            host=row["host"],
            subject=uuid,
            arguments=arguments,
            now=now,
            deadline=deadline,
        )
        # The deployable was locked first, so only a change by hand gets here.
        if not store.start(tx, [row["id"]], job):
            raise WrongState(f"deployable {uuid} was changed concurrently, retry", deployable=uuid)
        providers.mark_stale_existing(tx, [row["rp_uuid"]], now)
        self.notifications.record_program_started(tx, uuid, image)
