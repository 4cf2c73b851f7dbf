# SPDX-License-Identifier: Apache-2.0
"""One audit while a conductor makes it: its lease, how far it is, and what was found so far."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from oslo_log import log

from cyborg.conductor.audit_repairs import Repairs
from cyborg.core.audit import Finding, Kind, State
from cyborg.db.store import audits as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

PAGE = 100  # hosts whose names are read together
MOST = 1000  # findings that are kept of one audit


class Lost(Exception):
    """The audit is another conductor's now, or this one stops: nothing went wrong."""


class Held:
    """An audit under a lease of so many seconds. Every write says whether the lease still is."""

    def __init__(
        self,
        uow: UnitOfWork,
        row: Mapping[str, Any],
        owner: str,
        seconds: float,
        stopped: threading.Event,
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float],
    ) -> None:
        """``row`` is as it was before the lease; ``clock`` counts seconds upwards."""
        self._uow = uow
        self._row = row
        self._owner = owner
        self._seconds = seconds
        self._stopped = stopped
        self._now = now
        self._clock = clock
        self._renewed = clock()
        self._done: int = row["done"]
        self._found: int = row["found"]
        self._findings: list[Any] = list(row["findings"])
        self.uuid: str = row["uuid"]
        self.repair = bool(row["repair"])

    def hosts(self) -> Iterator[str]:
        """Give the hosts that are still to be looked at."""
        if self._row["host"] is not None:
            if not self._done:
                yield self._row["host"]
            return
        last: str = self._row["last_host"] or ""
        while names := self._uow.run(
            lambda tx, last=last: store.hosts(tx, last, PAGE)  # type: ignore[misc]
        ):
            yield from names
            last = names[-1]

    def keep(self) -> None:
        """Keep the lease for longer when a third of it is over. Raises Lost."""
        if self._stopped.is_set():
            self._uow.run(lambda tx: store.give_back(tx, self.uuid, self._owner))
            raise Lost
        if self._clock() - self._renewed < self._seconds / 3:
            return
        if not self._uow.run(lambda tx: store.renew(tx, self.uuid, self._owner, self._until())):
            raise Lost
        self._renewed = self._clock()

    def record(self, host: str, found: Sequence[Finding], repairs: Repairs | None) -> None:
        """Record what was found on a host, repaired if asked to. Raises Lost."""
        self.keep()
        told = repairs.apply(host, found) if repairs else [finding.to_dict() for finding in found]
        added = self._add(host, told)
        self._done += 1
        self._found += len(found)
        kept = self._uow.run(
            lambda tx: store.progress(
                tx,
                self.uuid,
                self._owner,
                host=host,
                done=self._done,
                found=self._found,
                findings=self._findings if added else None,
                until=self._until(),
            )
        )
        if not kept:
            raise Lost
        self._renewed = self._clock()

    def end(self, state: State, error: str | None = None) -> bool:
        """Record how it ended; tell whether it was still ours."""
        if error is not None:
            LOG.warning("Audit %s failed: %s", self.uuid, error)
        else:
            LOG.info("Audit %s: %s hosts, %s disagreements", self.uuid, self._done, self._found)
        return self._uow.run(lambda tx: store.end(tx, self.uuid, self._owner, state, error))

    def _add(self, host: str, told: Sequence[Mapping[str, Any]]) -> bool:
        """Keep findings while there is room, and once say that there was none; tell whether."""
        room = MOST - len(self._findings)
        if not told or room < 0:
            return False
        self._findings += told[:room]
        if len(told) > room:
            more = "there are more disagreements than are kept here"
            self._findings.append(Finding(host, Kind.TOO_MANY, "audit", more).to_dict())
        return True

    def _until(self) -> datetime:
        return self._now() + timedelta(seconds=self._seconds)
