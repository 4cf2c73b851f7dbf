# SPDX-License-Identifier: Apache-2.0
"""Loading an image into a deployable: promised at once, done by its agent, closed meanwhile."""

from collections.abc import Callable
from datetime import datetime, timedelta

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor.notices import Notices
from cyborg.core.device import Ability
from cyborg.core.errors import InUse, NotFound, WrongState
from cyborg.core.job import Item, JobKind
from cyborg.core.request import parse_uuid
from cyborg.db.store import jobs, providers
from cyborg.db.store import programs as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)


class Programs:
    """What may be done about the images of deployables."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        wake_jobs: Callable[[], None] = lambda: None,
        notices: Notices | None = None,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
    ) -> None:
        """``wake_jobs`` is called after the commit of a new job."""
        self._conf = conf
        self._uow = uow
        self._wake_jobs = wake_jobs
        self._notices = notices or Notices(conf)
        self._now = now

    def start(self, uuid: str, image_uuid: str) -> None:
        """Have an image loaded; return when that is promised, long before it is done.

        The same image again while it is being loaded is the same promise. Raises NotFound, InUse
        when a request owns one of the handles, and WrongState when the driver cannot program or
        another image is being loaded.
        """
        uuid, image = parse_uuid(uuid, "uuid"), parse_uuid(image_uuid, "image_uuid")
        self._uow.run(lambda tx: self._promise(tx, uuid, image))
        LOG.info("Programming deployable %s with image %s", uuid, image)
        self._wake_jobs()

    def _promise(self, tx: sa.Connection, uuid: str, image: str) -> None:
        row = store.lock(tx, uuid)
        if row is None:
            raise NotFound(f"no deployable {uuid}", deployable=uuid)
        if row["job_id"] is not None:
            loading = (row["arguments"] or {}).get("image")
            if loading == image:
                return
            raise WrongState(
                f"deployable {uuid} is being programmed with image {loading}: wait for its end",
                deployable=uuid,
            )
        if Ability.PROGRAMS not in row["abilities"]:
            raise WrongState(
                f"deployable {uuid} of backend {row['backend']} on host {row['host']} cannot be "
                "programmed: its driver has no such ability",
                deployable=uuid,
            )
        # The locks let no claim of a handle through; those that were before are seen.
        if owners := store.lock_handles(tx, row["id"]):
            raise InUse(
                f"deployable {uuid} is in use by {len(owners)} request(s): {', '.join(owners[:3])}",
                deployable=uuid,
                requests=list(owners),
            )
        item = Item(backend=row["backend"], device=row["device"], deployable=row["address"])
        now = self._now()
        job = jobs.add(
            tx,
            kind=JobKind.PROGRAM,
            host=row["host"],
            subject=uuid,
            arguments={"items": [item.to_dict()], "image": image},
            now=now,
            deadline=now + timedelta(seconds=self._conf.conductor.program_timeout),
        )
        if not store.begin(tx, row["id"], job):
            raise WrongState(f"deployable {uuid} changed meanwhile: ask again", deployable=uuid)
        providers.mark_known(tx, [row["rp_uuid"]], now)
        self._notices.programming(tx, uuid, image)
