# SPDX-License-Identifier: Apache-2.0
"""Check the ARQs of the servers that Nova has deleted lately, without Nova's notifications.

Nova deletes no ARQ of a port if the user who deletes the server may not read the binding profile of
the port. One conductor at a time asks Nova for the deleted servers, in one list for the cloud, and
has the instance watcher check them. So a scan costs one query to Nova, one query of the database
for each batch of servers, and queries to Placement and Nova only for servers that have ARQs.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

from oslo_db import exception as db_exc

from cyborg.clients.nova import Nova
from cyborg.core.errors import CyborgError
from cyborg.core.log import get_logger
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.totals import write as self_heal
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.threads.failures import RateLimitedLogger

LOG = get_logger(__name__)

SCAN_INTERVAL = 30.0  # seconds between two scans
WINDOW = timedelta(minutes=5)
"""Age of the deletions that a scan lists.

Each is listed several times: a conductor may be away, and a check may find the allocation that Nova
is about to delete. Nova's clock may differ.
"""


class DeletionScan:
    """Periodic query of the deleted servers. Safe to run in several conductors."""

    def __init__(
        self,
        uow: UnitOfWork,
        nova: Nova,
        check: Callable[[str], object],
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """``check`` has the ARQs of an instance checked; ``now`` returns naive UTC."""
        self._uow = uow
        self._nova = nova
        self._check = check
        self._now = now or uow.clock
        self._log = RateLimitedLogger(logger=LOG)
        self._forbidden = False  # Nova refused the last list, which was logged

    def run_once(self) -> int:
        """Check the servers that were deleted lately; return their number.

        Return 0 if another scan began less than half an interval ago, or if Nova does not answer.
        """
        now = self._now()
        if not self._acquire_turn(now):
            return 0
        error: str | None = None
        forbidden = False
        try:
            deleted = self._nova.deleted_servers(now - WINDOW)
        except CyborgError as exc:
            error, forbidden = exc.message, exc.details.get("status") == 403
        if error is not None:
            self._log_failure(error, forbidden=forbidden)
            return 0
        self._log.reset()
        self._forbidden = False
        for instance in sorted(deleted):
            self._check(instance)
        return len(deleted)

    def _log_failure(self, error: str, *, forbidden: bool) -> None:
        """Log a failed list; log a missing permission once, until a list succeeds."""
        if not forbidden:
            self._log.warn(
                "Cannot list the deleted servers in Nova; the orphan scan releases their ARQs: %s",
                error,
            )
        elif not self._forbidden:
            self._forbidden = True
            LOG.warning(
                "The Nova user of [nova] cannot list the servers of all projects: ARQs that Nova "
                "leaves of deleted servers stay bound. Give the user this permission"
            )

    def _acquire_turn(self, now: datetime) -> bool:
        # Half an interval: the conductors' tasks do not start at the same time.
        cutoff = now - timedelta(seconds=SCAN_INTERVAL / 2)
        try:
            return self._uow.run(
                lambda tx: self_heal.acquire_turn(tx, CorrectiveAction.DELETION_SCANS, cutoff, now)
            )
        except db_exc.DBDuplicateEntry:
            return False
