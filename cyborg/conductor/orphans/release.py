# SPDX-License-Identifier: Apache-2.0
"""Release orphaned ARQs, and delete ARQs that Nova has created and will not bind.

Nova binds an ARQ within seconds of its creation. Nobody knows for which instance an unbound ARQ
was, so it is only deleted while Nova builds no server of its project.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.clients.nova import Nova
from cyborg.conductor.binding import release as arq_release
from cyborg.conductor.binding.context_states import follow_arqs
from cyborg.conductor.notifications.notifications import ArqEventRecorder
from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger
from cyborg.core.orphans import orphans
from cyborg.core.orphans.orphans import BoundArq
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.binding import write as arq_store
from cyborg.db.orphans import write as store
from cyborg.db.totals import write as self_heal
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

RELEASE_BATCH = 100  # orphans released in one transaction

PAGE = 500  # ARQs deleted in one transaction, the only one of a round
MAX_PROJECTS = 50  # projects queried in Nova in one round


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
            # Sorted: concurrent releases lock ARQs in one order.
            rows = arq_store.lock(tx, sorted(by_uuid))
            # Placement and Nova were asked before the lock: an ARQ that was bound again since is
            # another use.
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


def acquire_turn(
    uow: UnitOfWork, action: CorrectiveAction, started_before: datetime, now: datetime
) -> bool:
    """Return whether to run a round now: no conductor has begun one since ``started_before``."""
    try:
        return uow.run(lambda tx: self_heal.acquire_turn(tx, action, started_before, now))
    except db_exc.DBDuplicateEntry:
        return False  # the first round ever: another conductor has inserted the row


def record_suspects(
    uow: UnitOfWork,
    suspects: Sequence[BoundArq],
    recovered: Sequence[BoundArq],
    now: datetime,
    bound_before: datetime,
) -> tuple[int, int]:
    """Mark ARQs as suspected, end the suspicion of others; return the number of each.

    An ARQ that was bound after ``bound_before`` is not marked.
    """
    if not suspects and not recovered:
        return 0, 0

    def write(tx: sa.Connection) -> tuple[int, int]:
        new = store.mark_suspected(tx, [arq.id for arq in suspects], now, bound_before)
        self_heal.increment(tx, CorrectiveAction.ORPHANS_SUSPECTED, new, now)
        return new, store.clear_suspicion(tx, [arq.id for arq in recovered])

    counts = uow.run(write)
    log_suspected(suspects)
    return counts


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


def delete_expired(
    tx: sa.Connection,
    cutoff: datetime,
    limit: int,
    now: datetime,
    projects: Collection[str] | None = None,
) -> int:
    """Delete unbound ARQs as ``store.delete_expired`` does, and count the correction."""
    count = store.delete_expired(tx, cutoff, limit, projects)
    self_heal.increment(tx, CorrectiveAction.UNBOUND_EXPIRED, count, now)
    return count


class DroppedArqs:
    """Deletion of dropped ARQs by one conductor; ``stopped`` ends a round early."""

    def __init__(self, uow: UnitOfWork, nova: Nova, stopped: threading.Event) -> None:
        self._uow = uow
        self._nova = nova
        self._stopped = stopped
        self._last_project = ""  # the next round starts after it, so that none hides the others

    def delete(self, ttl: float, now: datetime) -> int:
        """Delete ARQs that have not changed for ``ttl`` seconds; return their number."""
        unbound_before = now - timedelta(seconds=ttl)
        idle = self._find_idle_projects(unbound_before)
        if not idle or self._stopped.is_set():
            return 0
        return self._uow.run(lambda tx: delete_expired(tx, unbound_before, PAGE, now, idle))

    def _find_idle_projects(self, unbound_before: datetime) -> list[str]:
        """Return projects that have old ARQs and of which Nova builds no server.

        Query at most MAX_PROJECTS projects, from the one after ``_last_project``, and resume there
        in the next round; begin again after the last project. If the credentials do not let Nova
        list the servers of all projects, return none: a server in build could be hidden, so nothing
        is deleted.
        """
        last, idle = self._last_project, list[str]()
        projects = self._uow.run(
            lambda tx: store.projects_of_expired(tx, unbound_before, last, MAX_PROJECTS)
        )
        try:
            if projects and self._nova.lists_all_projects():
                for project in projects:
                    if self._stopped.is_set():
                        return []
                    self._last_project = project  # also if the query fails
                    if not self._nova.is_building(project):
                        idle.append(project)
            if len(projects) < MAX_PROJECTS:
                self._last_project = ""
        except CyborgError as exc:
            LOG.warning(
                "Cannot query Nova about unbound ARQs, retrying in the next scan: %s", exc.message
            )
        return idle
