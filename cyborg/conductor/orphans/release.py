# SPDX-License-Identifier: Apache-2.0
"""Release orphaned ARQs, for the orphan collector and for a bind that finds no free handle."""

from collections.abc import Callable, Collection, Iterable
from datetime import datetime

import sqlalchemy as sa

from cyborg.conductor.binding import release as arq_release
from cyborg.conductor.binding.context_states import follow_arqs
from cyborg.conductor.notifications.arq_events import ArqEventRecorder
from cyborg.core.log import get_logger
from cyborg.core.orphans import orphans
from cyborg.core.orphans.orphans import BoundArq
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.binding import write as arq_store
from cyborg.db.totals import write as self_heal
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

RELEASE_BATCH = 100  # orphans released in one transaction


class OrphanReleaser:
    """Releases orphaned ARQs and frees their handles, unless their bind has changed since."""

    def __init__(
        self,
        uow: UnitOfWork,
        event_recorder: ArqEventRecorder,
        wake_jobs: Callable[[], None],
        now: Callable[[], datetime],
    ) -> None:
        """``wake_jobs`` is called after a commit that adds host work; ``now`` returns naive UTC."""
        self._uow = uow
        self._event_recorder = event_recorder
        self._wake_jobs = wake_jobs
        self._now = now

    def release(
        self,
        orphan_arqs: Collection[BoundArq],
        *,
        keep: bool,
        unchanged: Callable[[orphans.LockedArqRow, BoundArq], bool] = orphans.is_same_bind,
    ) -> list[BoundArq]:
        """Unbind ARQs if ``keep`` is True, else delete them; return the released ARQs.

        The ARQs of a device context are unbound in any case.

        All is one transaction. ``unchanged`` compares a locked row with the ARQ as it was read
        before the lock; an ARQ that has changed is skipped.
        """
        by_uuid = {arq.uuid: arq for arq in orphan_arqs}
        now = self._now()
        timeout = self._event_recorder.conf.conductor.release_timeout

        def write(tx: sa.Connection) -> tuple[list[BoundArq], int]:
            rows = arq_store.lock(tx, sorted(by_uuid))
            rows = [row for row in rows if unchanged(row, by_uuid[row["uuid"]])]
            if not rows:
                return [], 0
            result = arq_release.release(tx, rows, keep=keep, now=now, timeout=timeout)
            self._event_recorder.record_released(
                tx, rows, keep=keep, failed=result.failed_arqs, orphans=True
            )
            recorder, failure = self._event_recorder, arq_release.make_cancelled(now)
            follow_arqs(tx, rows, recorder, now)
            follow_arqs(tx, result.failed_arqs, recorder, now, failure)
            self_heal.increment(tx, CorrectiveAction.ORPHANS_RELEASED, result.count, now)
            return [by_uuid[row["uuid"]] for row in rows], result.jobs_created

        released, jobs = self._uow.run(write)
        if jobs:
            self._wake_jobs()
        return released


def log_suspected(suspects: Iterable[BoundArq]) -> None:
    """Log each ARQ that is newly suspected."""
    for arq in suspects:
        LOG.info(
            "ARQ may be an orphan: its instance has no allocation on the resource provider",
            arq=arq.uuid,
            instance=arq.instance,
            provider=arq.provider,
        )


def log_released(released: Iterable[BoundArq], *, deleted: bool) -> None:
    """Log each released orphan."""
    for arq in released:
        if deleted:
            text = (
                "Orphaned ARQ was deleted: its instance no longer exists and has no allocation on "
                "the resource provider"
            )
        elif arq.orphan_since is None:
            text = (
                "Orphaned ARQ was unbound: its instance is shelved and offloaded and has no "
                "allocation on the resource provider"
            )
        else:
            text = (
                "Orphaned ARQ was unbound: its instance has had no allocation on the resource "
                f"provider since {arq.orphan_since}"
            )
        LOG.warning("%s", text, arq=arq.uuid, instance=arq.instance, provider=arq.provider)
