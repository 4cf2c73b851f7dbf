# SPDX-License-Identifier: Apache-2.0
"""Delete ARQs that Nova has created and will not bind.

Nova binds an ARQ within seconds of its creation. Nobody knows for which instance it was, so Nova
must build no server of its project.
"""

import threading
from collections.abc import Collection
from datetime import datetime, timedelta

import sqlalchemy as sa

from cyborg.clients.nova import Nova
from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.orphans import write as store
from cyborg.db.totals import write as self_heal
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

PAGE = 500  # ARQs deleted in one transaction, the only one of a round
MAX_PROJECTS = 50  # projects queried in Nova in one round


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
        """Return projects that have old ARQs and of which Nova builds no server."""
        last, idle = self._last_project, list[str]()
        projects = self._uow.run(
            lambda tx: store.projects_of_expired(tx, unbound_before, last, MAX_PROJECTS)
        )
        error: str | None = None
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
            error = exc.message
        if error is not None:
            LOG.warning(
                "Cannot query Nova about unbound ARQs, retrying in the next scan: %s", error
            )
        return idle
