# SPDX-License-Identifier: Apache-2.0
"""Partitioning of devices: a job applies a layout; no handle of the device is claimed meanwhile."""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.jobs.layout_change import (
    close_device,
    find_job,
    find_obstacle,
    lock_target,
    mark_stale,
)
from cyborg.core.errors import NotFound, WrongState
from cyborg.core.inventory.device import MAX_TEXT
from cyborg.core.jobs.job import AFTER_REBOOT, DRAINS, JobKind, WorkItem
from cyborg.core.log import get_logger
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.backends import desired as desired_backends
from cyborg.db.devices import read as device_reads
from cyborg.db.jobs import write as jobs
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)


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
        job = self._uow.run_once(
            lambda tx: self._enqueue_job(tx, uuid, layout, options), lambda job: {"uuid": job}
        )
        LOG.info("Applying layout %s to device", layout, device=uuid)
        self._wake_jobs()
        self._wake_publisher()
        return {"uuid": job}

    def _enqueue_job(
        self, tx: sa.Connection, uuid: str, layout: str, options: Mapping[str, bool]
    ) -> str:
        device = device_reads.get(tx, uuid)
        if device is None:
            raise NotFound(f"no device {uuid}", device=uuid)
        rows = lock_target(tx, uuid, device["hostname"], layout)
        row = rows[0]
        if (open_job := find_job(tx, uuid, rows)) is not None:
            id_, given = open_job
            # A job that drains can still be cancelled: then what a reboot removed is not applied.
            drains = DRAINS in given and AFTER_REBOOT in options
            if given.get("layout") == layout and not drains:
                return jobs.uuids(tx, [id_])[0]
            change = "programmed"
            if "layout" in given:
                change = f"partitioned with layout {given['layout']}"
            raise WrongState(
                f"device {uuid} is being {change}: wait until the job has ended and the host has "
                "reported the device",
                device=uuid,
            )
        now = self._now()
        obstacle = find_obstacle(tx, uuid, rows)
        if obstacle is not None and DRAINS not in options:
            raise obstacle
        item = WorkItem(backend=row["backend"], device=row["address"], deployable="")
        arguments: dict[str, Any] = {
            "items": [item.to_dict()],
            "layout": layout,
            "previous_layout": row["layout"],
            **options,
        }
        deadline = None
        if obstacle is not None:
            deadline = now + timedelta(seconds=self._conf.conductor.drain_timeout)
        else:
            arguments.pop(DRAINS, None)
        job = jobs.enqueue(
            tx,
            kind=JobKind.PARTITION,
            host=row["host"],
            subject=uuid,
            arguments=arguments,
            now=now,
            deadline=deadline,
        )
        if obstacle is None:
            close_device(tx, uuid, rows, job)
        else:
            desired_backends.sync_cordon(tx, [row["host"]], now)
        mark_stale(tx, rows, now)
        return jobs.uuids(tx, [job])[0]
