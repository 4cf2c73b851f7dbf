# SPDX-License-Identifier: Apache-2.0
"""Programming of deployables: a job loads an image; no handle is claimed before its end."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.errors import InUse, NotFound, WrongState
from cyborg.core.inventory.device import Ability
from cyborg.core.jobs.job import AFTER_REBOOT, JobKind, WorkItem
from cyborg.core.log import get_logger
from cyborg.core.validation import parse_uuid
from cyborg.db.deployables import programming as store
from cyborg.db.jobs import write as jobs
from cyborg.db.providers import write as providers
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)


class Programs:
    """Programming of deployables with images."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        wake_jobs: Callable[[], None] = lambda: None,
        notices: NotificationBuilder | None = None,
        *,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """``wake_jobs`` is called after the commit of a new job."""
        self._conf = conf
        self._uow = uow
        self._wake_jobs = wake_jobs
        self._now = now or uow.clock
        self._notices = notices or NotificationBuilder(conf, now=self._now)

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
        self._uow.run_once(lambda tx: self._enqueue_job(tx, uuid, image, after_reboot))
        LOG.info("Programming deployable with image %s", image, deployable=uuid)
        self._wake_jobs()

    def _enqueue_job(self, tx: sa.Connection, uuid: str, image: str, after_reboot: bool) -> None:
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
        now, deadline = self._now(), None
        arguments: dict[str, Any] = {"items": [item.to_dict()], "image": image}
        if after_reboot:
            # No deadline: such a job is retried until it succeeds.
            arguments[AFTER_REBOOT] = True
        else:
            deadline = now + timedelta(seconds=self._conf.conductor.program_timeout)
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
        self._notices.record_program_started(tx, uuid, image)
