# SPDX-License-Identifier: Apache-2.0
"""Partitioning of devices: a job applies a layout; no handle of the device is claimed meanwhile."""

from collections.abc import Callable
from datetime import datetime

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.core.errors import InUse, Invalid, NotFound, WrongState
from cyborg.core.hosts.liveness import heartbeat_timeout
from cyborg.core.inventory.device import MAX_TEXT, Ability
from cyborg.core.jobs.job import JobKind, WorkItem
from cyborg.core.log import get_logger
from cyborg.core.text import join_limited
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.read import devices
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.db.write import desired_backends, jobs, providers, services
from cyborg.db.write import programming as store

LOG = get_logger(__name__)

MAX_NAMED = 8  # layouts or ARQs in an error


class Partitions:
    """Partitioning of devices by layouts."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        wake_jobs: Callable[[], None] = lambda: None,
        wake_publisher: Callable[[], None] = lambda: None,
        *,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """``wake_jobs`` and ``wake_publisher`` are called after the commit of a new job."""
        self._conf = conf
        self._uow = uow
        self._wake_jobs = wake_jobs
        self._wake_publisher = wake_publisher
        self._now = now or uow.clock

    def start(self, uuid: str, layout: str) -> dict[str, str]:
        """Enqueue a job that applies a layout to a device; return ``{"uuid": of the job}``.

        If a job already applies this layout, return that job. Raise NotFound, Invalid for an
        unknown layout, InUse if an ARQ owns a handle of the device, and WrongState if the device
        cannot be partitioned now.
        """
        uuid, layout = parse_uuid(uuid, "uuid"), check_text("layout", layout, MAX_TEXT)
        job = self._uow.run_once(
            lambda tx: self._enqueue_job(tx, uuid, layout), lambda job: {"uuid": job}
        )
        LOG.info("Applying layout %s to device", layout, device=uuid)
        self._wake_jobs()
        self._wake_publisher()
        return {"uuid": job}

    def _enqueue_job(self, tx: sa.Connection, uuid: str, layout: str) -> str:
        device = devices.get(tx, uuid)
        if device is None:
            raise NotFound(f"no device {uuid}", device=uuid)
        # A report must not add a deployable meanwhile: it would not be closed.
        desired_backends.lock_host(tx, device["hostname"])
        rows = store.lock_device(tx, uuid)
        if not rows:
            raise NotFound(f"device {uuid} was removed", device=uuid)
        # A device offers nothing in some layouts, such as a network card of the host that has no
        # virtual functions: then it has no deployable that could be closed.
        row, ids = rows[0], [id_ for row in rows if (id_ := row["deployable_id"]) is not None]
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
        busy = [
            (job_id, row["arguments"] or {})
            for row in rows
            if (job_id := row["job_id"]) is not None
        ]
        if not ids:
            open_jobs = store.open_partitions(tx, row["host"])
            busy = [(o["id"], o["arguments"]) for o in open_jobs if o["device"] == row["address"]]
        if busy:
            job_id, arguments = busy[0]
            if len(busy) == len(rows) and arguments.get("layout") == layout:
                return jobs.uuids(tx, [job_id])[0]
            change = "programmed"
            if "layout" in arguments:
                change = f"partitioned with layout {arguments['layout']}"
            raise WrongState(
                f"device {uuid} is being {change}: wait until the job has ended", device=uuid
            )
        # The locks block new claims of handles; earlier claims are visible.
        if owners := store.lock_handles(tx, ids):
            raise InUse(
                f"device {uuid} is in use by {len(owners)} request(s): "
                f"{join_limited(owners, MAX_NAMED)}; disable the device and wait until they are "
                "deleted",
                device=uuid,
                requests=list(owners[:MAX_NAMED]),
            )
        if dirty := store.count_dirty(tx, ids):
            raise WrongState(
                f"{dirty} handle(s) of device {uuid} are being cleaned: retry when this is done",
                device=uuid,
            )
        now, options = self._now(), self._conf.conductor
        last_seen = services.last_seen(tx, row["host"])
        down_after = heartbeat_timeout(options.hello_interval, options.down_heartbeats)
        if last_seen is None or last_seen < now - down_after:
            raise WrongState(
                f"device {uuid} cannot be partitioned: the agent of host {row['host']} is down",
                device=uuid,
            )
        item = WorkItem(backend=row["backend"], device=row["address"], deployable="")
        job = jobs.enqueue(
            tx,
            kind=JobKind.PARTITION,
            host=row["host"],
            subject=uuid,
            arguments={
                "items": [item.to_dict()],
                "layout": layout,
                "previous_layout": row["layout"],
            },
            now=now,
            deadline=None,
        )
        if not store.start(tx, ids, job):
            raise WrongState(f"device {uuid} was changed concurrently, retry", device=uuid)
        stale = [provider for row in rows if (provider := row["rp_uuid"]) is not None]
        providers.mark_stale_existing(tx, stale, now)
        return jobs.uuids(tx, [job])[0]
