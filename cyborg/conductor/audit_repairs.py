# SPDX-License-Identifier: Apache-2.0
"""The safe repairs of an audit: what the conductors would do by themselves, ordered now.

Nothing here touches an allocation or a server. Each repair is a constant number of statements for
all findings of a host, but for the providers that are deleted one by one.
"""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.clients.placement import Placement
from cyborg.conductor import unbinding
from cyborg.core.audit import Finding, Repair
from cyborg.core.audit_view import SETTLE
from cyborg.core.deed import Deed
from cyborg.core.errors import CyborgError, InUse
from cyborg.db.store import deeds, jobs, orphans, providers, services
from cyborg.db.unit_of_work import UnitOfWork


class Repairs:
    """Does what a finding says may be done."""

    def __init__(
        self,
        uow: UnitOfWork,
        placement: Placement,
        wake_publisher: Callable[[], None],
        wake_jobs: Callable[[], None],
        *,
        now: Callable[[], datetime],
    ) -> None:
        """Each wake is called after the commit of what it is for."""
        self._uow = uow
        self._placement = placement
        self._wake_publisher = wake_publisher
        self._wake_jobs = wake_jobs
        self._now = now

    def apply(self, host: str, findings: Sequence[Finding]) -> list[dict[str, Any]]:
        """Repair what may be repaired of a host; return the findings as plain values.

        ``repaired`` says that the repair was done or ordered, ``error`` why it could not be.
        """
        results: dict[Repair, str | None] = {}
        for repair in Repair:
            mine = [finding for finding in findings if finding.repair is repair]
            if mine and repair is not Repair.DELETE_PROVIDER:
                results[repair] = self._try(lambda r=repair, f=mine: self._do(host, r, f))  # type: ignore[misc]
        told = []
        for finding in findings:
            if finding.repair is None:
                told.append(finding.to_dict())
                continue
            if finding.repair is Repair.DELETE_PROVIDER:
                error = self._try(lambda f=finding: self._delete(f.provider))  # type: ignore[misc]
            else:
                error = results[finding.repair]
            told.append(finding.to_dict(repaired=error is None, error=error))
        return told

    def _try(self, work: Callable[[], object]) -> str | None:
        """Return why the work failed, None when it did not."""
        try:
            work()
        except CyborgError as bad:
            return bad.message
        return None

    def _do(self, host: str, repair: Repair, findings: Sequence[Finding]) -> None:
        ids = sorted({id_ for finding in findings for id_ in finding.ids})
        now = self._now()
        match repair:
            case Repair.REPORT:
                self._uow.run(lambda tx: services.ask(tx, host))
            case Repair.PUBLISH:
                names = {f.provider: f.name for f in findings if f.provider and f.name}
                self._uow.run(lambda tx: providers.mark(tx, host, names, now))
                self._wake_publisher()
            case Repair.CLEAN:
                self._uow.run(lambda tx: _clean(tx, ids, now))
                self._wake_jobs()
            case Repair.RECONCILE:
                self._uow.run(lambda tx: _suspect(tx, ids, now))

    def _delete(self, uuid: str | None) -> None:
        """Delete a provider. Placement refuses by itself while it has allocations or children."""
        if uuid is None:
            raise AssertionError("a provider that is to be deleted has a uuid")
        if users := self._placement.allocations(uuid):
            raise InUse(f"{len(users)} consumers have allocations of it now")
        self._placement.delete(uuid)
        # A report may have asked for it since it was looked at, and the publisher be done with it.
        now = self._now()
        if self._uow.run(lambda tx: providers.mark_known(tx, [uuid], now)):
            self._wake_publisher()


def _clean(tx: sa.Connection, ids: Sequence[int], now: datetime) -> None:
    unbinding.clean(tx, jobs.dirty(tx, len(ids), ids), now=now)


def _suspect(tx: sa.Connection, ids: Sequence[int], now: datetime) -> None:
    # The guard keeps out what was bound anew since it was looked at.
    count = orphans.suspect(tx, ids, now, now - SETTLE)
    deeds.add(tx, Deed.ORPHANS_SUSPECTED, count, now)
