# SPDX-License-Identifier: Apache-2.0
"""Safe repairs of an audit: the self-healing actions of the conductors, started immediately.

No repair changes an allocation or a server. A repair takes a constant number of statements for all
findings of a host; only providers are deleted one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import sqlalchemy as sa

from cyborg.clients.placement import Placement
from cyborg.conductor.binding import release
from cyborg.conductor.jobs import reboot
from cyborg.conductor.jobs.active_partitions import enqueue_deactivation
from cyborg.core.audit.sources import SETTLE_TIME, Finding, Repair
from cyborg.core.errors import CyborgError, InUse, attempt
from cyborg.core.self_heal import CorrectiveAction
from cyborg.db.jobs import write as jobs
from cyborg.db.orphans import write as orphans
from cyborg.db.providers import write as providers
from cyborg.db.services import write as services
from cyborg.db.totals import write as self_heal
from cyborg.db.unit_of_work import UnitOfWork


@dataclass(frozen=True)
class RepairExecutor:
    """Executor of the repairs that findings allow.

    Each wake-up function is called after a commit that adds work for its task. ``release_timeout``
    is [conductor] release_timeout, the seconds to clean a handle.
    """

    uow: UnitOfWork
    placement: Placement
    wake_publisher: Callable[[], None]
    wake_jobs: Callable[[], None]
    release_timeout: float

    def apply(self, host: str, findings: Sequence[Finding]) -> list[dict[str, Any]]:
        """Run the repairs of the findings of a host; return each finding as a dictionary.

        In a finding with a repair, ``repaired`` is True if the repair was done or enqueued, else
        ``error`` is why it failed.
        """
        errors: dict[Repair, CyborgError | None] = {}
        for repair in Repair:
            group = [finding for finding in findings if finding.repair is repair]
            # All findings of a repair at once, in one transaction; only providers have one call
            # each.
            if group and repair is not Repair.DELETE_PROVIDER:
                errors[repair] = attempt(partial(self._repair, host, repair, group))
        repaired = []
        for finding in findings:
            if finding.repair is None:
                repaired.append(finding.to_dict())
                continue
            if finding.repair is Repair.DELETE_PROVIDER:
                error = attempt(partial(self._delete_provider, finding.provider))
            else:
                error = errors[finding.repair]
            text = None if error is None else error.message
            repaired.append(finding.to_dict(repaired=error is None, error=text))
        return repaired

    def _repair(self, host: str, repair: Repair, findings: Sequence[Finding]) -> None:
        """Execute one kind of repair for all its findings."""
        ids = sorted({id_ for finding in findings for id_ in finding.ids})
        now = self.uow.clock()
        match repair:
            case Repair.REPORT:
                self.uow.run(lambda tx: services.request_report(tx, host))
            case Repair.PUBLISH:
                names = {f.provider: f.name for f in findings if f.provider and f.name}
                self.uow.run(lambda tx: providers.mark_stale(tx, host, names, now))
                self.wake_publisher()
            # Rows are read again in the transaction: what was repaired since is left out.
            case Repair.CLEAN:
                self.uow.run(lambda tx: _clean(tx, ids, now, self.release_timeout))
                self.wake_jobs()
            # Findings name a device set by the uuid of its provider.
            case Repair.ACTIVATE:
                sets = [finding.provider for finding in findings if finding.provider]
                self.uow.run(lambda tx: reboot.enqueue_set_restores(tx, host, sets, now))
                self.wake_jobs()
            case Repair.DEACTIVATE:
                sets = [finding.provider for finding in findings if finding.provider]
                self.uow.run(lambda tx: enqueue_deactivation(tx, sets, now, self.release_timeout))
                # The members are dirty now, so that the providers of the sets are stale.
                self.wake_publisher()
                self.wake_jobs()
            case Repair.RECONCILE:
                self.uow.run(lambda tx: _mark_suspected(tx, ids, now))

    def _delete_provider(self, uuid: str | None) -> None:
        """Delete a provider of Placement. Raise InUse while it has allocations or children."""
        if uuid is None:
            raise AssertionError("the finding lacks the uuid of the provider to delete")
        # Placement refuses the deletion too, but does not say who has allocations.
        if users := self.placement.allocations(uuid):
            raise InUse(f"resource provider {uuid} now has allocations of {len(users)} consumers")
        self.placement.delete(uuid)
        # A report may have added the device since the audit, and the publisher be done with it:
        # mark the provider stale, so that it is created again.
        now = self.uow.clock()
        if self.uow.run(lambda tx: providers.mark_stale_existing(tx, [uuid], now)):
            self.wake_publisher()


def _clean(tx: sa.Connection, ids: Sequence[int], now: datetime, timeout: float) -> None:
    dirty = jobs.unassigned_dirty(tx, len(ids), ids)
    release.enqueue_cleaning(tx, dirty, now=now, timeout=timeout, repeated=True)


def _mark_suspected(tx: sa.Connection, ids: Sequence[int], now: datetime) -> None:
    # The time limit excludes requests that were bound after the audit read them.
    count = orphans.mark_suspected(tx, ids, now, now - SETTLE_TIME)
    self_heal.increment(tx, CorrectiveAction.ORPHANS_SUSPECTED, count, now)
