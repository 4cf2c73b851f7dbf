# SPDX-License-Identifier: Apache-2.0
"""Lease of a running audit, with its progress and its findings."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from cyborg.conductor.audit.repair import RepairExecutor
from cyborg.core.audit.model import Finding, Kind, State
from cyborg.core.log import get_logger
from cyborg.db.audits import write as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

PAGE_SIZE = 100  # hosts whose names are read together
MAX_FINDINGS = 1000  # findings that are stored for one audit


class LeaseLost(Exception):
    """Another conductor has taken over the audit, or this conductor is stopping. Not an error."""


class AuditLease:
    """An audit that this conductor has leased and runs. Every write checks the lease."""

    def __init__(
        self,
        uow: UnitOfWork,
        row: store.LeasedAuditRow,
        owner: str,
        seconds: float,
        stopped: threading.Event,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float],
    ) -> None:
        """``row`` is the audit's row before the lease, ``seconds`` the duration of the lease.

        ``clock`` returns monotonic seconds.
        """
        self._uow = uow
        self._row = row
        self._owner = owner
        self._seconds = seconds
        self._stopped = stopped
        self._now = now
        self._clock = clock
        self._renewed = clock()
        self._hosts_done = row["hosts_done"]
        self._num_findings = row["num_findings"]
        self._findings: list[Any] = list(row["findings"])
        self.uuid = row["uuid"]
        self.repair = row["repair"]

    def remaining_hosts(self) -> Iterator[str]:
        """Iterate over the hosts that are not audited yet, by name."""
        if self._row["host"] is not None:
            if not self._hosts_done:
                yield self._row["host"]
            return
        last = self._row["last_host"] or ""
        while names := self._uow.run(
            lambda tx, last=last: store.next_hosts(tx, last, PAGE_SIZE)  # type: ignore[misc]
        ):
            yield from names
            last = names[-1]

    def renew_if_due(self) -> None:
        """Renew the lease if a third of its duration is over. Raise LeaseLost."""
        if self._stopped.is_set():
            self._uow.run(lambda tx: store.release(tx, self.uuid, self._owner))
            raise LeaseLost
        if self._clock() - self._renewed < self._seconds / 3:
            return
        if not self._uow.run(
            lambda tx: store.renew(tx, self.uuid, self._owner, self._expires_at())
        ):
            raise LeaseLost
        self._renewed = self._clock()

    def record(
        self, host: str, findings: Sequence[Finding], repairs: RepairExecutor | None
    ) -> None:
        """Record the findings of a host, after ``repairs``, if any, has repaired them.

        Raise LeaseLost.
        """
        self.renew_if_due()
        results = (
            repairs.apply(host, findings)
            if repairs
            else [finding.to_dict() for finding in findings]
        )
        added = self._append_findings(host, results)
        self._hosts_done += 1
        self._num_findings += len(findings)
        leased = self._uow.run(
            lambda tx: store.record_progress(
                tx,
                self.uuid,
                self._owner,
                host=host,
                hosts_done=self._hosts_done,
                num_findings=self._num_findings,
                findings=self._findings if added else None,
                until=self._expires_at(),
            )
        )
        if not leased:
            raise LeaseLost
        self._renewed = self._clock()

    def finish(self, state: State, error: str | None = None) -> bool:
        """Record the end of the audit; return False if the lease was lost."""
        if error is not None:
            LOG.warning("Audit failed: %s", error, audit=self.uuid)
        else:
            LOG.info(
                "Audit completed: %s hosts, %s findings",
                self._hosts_done,
                self._num_findings,
                audit=self.uuid,
            )
        return self._uow.run(lambda tx: store.end(tx, self.uuid, self._owner, state, error))

    def _append_findings(self, host: str, results: Sequence[Mapping[str, Any]]) -> bool:
        """Append findings up to MAX_FINDINGS; return whether the list of findings has changed.

        If there are more, append one finding of the kind TOO_MANY in place of the rest.
        """
        free = MAX_FINDINGS - len(self._findings)
        if not results or free < 0:
            return False
        self._findings += results[:free]
        if len(results) > free:
            message = f"there are more findings than the limit of {MAX_FINDINGS}"
            self._findings.append(Finding(host, Kind.TOO_MANY, "audit", message).to_dict())
        return True

    def _expires_at(self) -> datetime:
        return self._now() + timedelta(seconds=self._seconds)
