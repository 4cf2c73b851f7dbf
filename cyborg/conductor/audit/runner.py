# SPDX-License-Identifier: Apache-2.0
"""Audits: compare four sources of each host, in the conductor that has the lease.

Several hosts are audited at a time, so that an agent that does not answer delays no other host.
Their results are recorded in the order of their names.

A difference is only a finding if a recheck confirms it, since most differences are changes in
progress. If a conductor stops, another one continues the audit after the last recorded host: the
row of the audit has its lease, its progress and its findings.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from oslo_config import cfg

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.audit.collect import SourceCollector
from cyborg.conductor.audit.repair import RepairExecutor
from cyborg.conductor.common.work_lease import LeaseLost, Leasing, WorkLease
from cyborg.conductor.custody.check import ChainChecker
from cyborg.core.audit.compare import compare
from cyborg.core.audit.sources import Finding, Kind, Source, State, confirmed
from cyborg.core.errors import Conflict, Invalid, NotFound, is_expected
from cyborg.core.log import get_logger, log_fields
from cyborg.core.validation import check_optional_text
from cyborg.db import old_rows
from cyborg.db.audits import write as store
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.agent_api import AgentAPI
from cyborg.threads.calls import map_ahead

LOG = get_logger(__name__)

# Hosts whose names are read together.
PAGE_SIZE = 100
# Hosts that are audited at a time. Most of their threads wait for an agent, up to [rpc] timeout.
MAX_HOSTS = 64
# Hosts whose results may wait for that of an earlier host.
MAX_AHEAD = 1024
# Findings that are stored for one audit.
MAX_FINDINGS = 1000

# Seconds before a recheck: a report and its publishing take less.
RECHECK_DELAY = 3.0
# How long audits that have ended can be looked up.
RETENTION = timedelta(days=7)
# Old audits that one sweep deletes.
PURGE_LIMIT = 100
# A timer that creates audits faster than hosts answer gets an error.
MAX_OPEN_AUDITS = 100


@dataclass(eq=False)
class AuditLease:
    """An audit that this conductor has leased and runs. Every write checks the lease.

    ``row`` is the audit's row before the lease.
    """

    uow: UnitOfWork
    row: store.LeasedAuditRow
    lease: WorkLease
    stopped: threading.Event

    def __post_init__(self) -> None:
        self._hosts_done = self.row["hosts_done"]
        self._num_findings = self.row["num_findings"]
        self._findings: list[Any] = list(self.row["findings"])
        self._uuid = self.row["uuid"]
        self._renewing = threading.Lock()

    def remaining_hosts(self) -> Iterator[str]:
        """Iterate over the hosts that are not audited yet, by name."""
        if self.row["host"] is not None:
            if not self._hosts_done:
                yield self.row["host"]
            return
        last = self.row["last_host"] or ""
        while names := self.uow.run(partial(store.next_hosts, after=last, limit=PAGE_SIZE)):
            yield from names
            last = names[-1]

    def renew_if_due(self) -> None:
        """Renew the lease if a third of its duration is over. Raise LeaseLost. Thread-safe.

        If the service stops, end the lease and raise it too: another conductor continues the audit.
        """
        with self._renewing:
            if self.stopped.is_set():
                self.uow.run(lambda tx: store.release(tx, self._uuid, self.lease.owner))
                raise LeaseLost
            if self.lease.needs_renewal():
                owner = self.lease.owner
                self.lease.renew(
                    lambda until: self.uow.run(lambda tx: store.renew(tx, self._uuid, owner, until))
                )

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
        has_new = self._append_findings(host, results)
        self._hosts_done += 1
        self._num_findings += len(findings)
        # Progress and renewal are one UPDATE: a conductor that has lost the lease records nothing.
        record = partial(
            store.record_progress,
            uuid=self._uuid,
            owner=self.lease.owner,
            host=host,
            hosts_done=self._hosts_done,
            num_findings=self._num_findings,
            # The list may be long: it is written only if it has changed.
            findings=self._findings if has_new else None,
        )
        with self._renewing:
            self.lease.renew(lambda until: self.uow.run(partial(record, until=until)))

    def finish(self, state: State, error: str | None = None) -> bool:
        """Record the end of the audit; return False if the lease was lost."""
        if error is not None:
            LOG.warning("Audit failed: %s", error, audit=self._uuid)
        else:
            LOG.info(
                "Audit completed: %s hosts, %s findings",
                self._hosts_done,
                self._num_findings,
                audit=self._uuid,
            )
        self.lease.ended()
        return self.uow.run(lambda tx: store.end(tx, self._uuid, self.lease.owner, state, error))

    def _append_findings(self, host: str, results: Sequence[Mapping[str, Any]]) -> bool:
        """Append findings up to MAX_FINDINGS; return whether the list of findings has changed.

        If there are more, append one finding of the kind TOO_MANY in place of the rest.
        """
        free = MAX_FINDINGS - len(self._findings)
        # One more than the limit is stored already: the finding TOO_MANY.
        if not results or free < 0:
            return False
        self._findings += results[:free]
        if len(results) > free:
            message = f"there are more findings than the limit of {MAX_FINDINGS}"
            self._findings.append(Finding(host, Kind.TOO_MANY, "audit", message).to_dict())
        return True


@dataclass(eq=False)
class AuditRunner:
    """Runner of audits; safe to run in several conductors.

    ``nova`` is None in an installation without Nova. ``clock`` returns monotonic seconds. ``wait``
    sleeps before a recheck.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    agents: AgentAPI
    placement: Placement
    nova: Nova | None
    repairs: RepairExecutor
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], object] | None = None

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._wait = self.wait or self._stopped.wait
        conf, now = self.conf, self.uow.clock
        self._slowest = max(
            conf.placement.request_timeout, conf.rpc.timeout, conf.nova.request_timeout
        )
        self._chains = ChainChecker(conf, self.uow, now=now)
        self._leasing = Leasing(conf, "audits", now=now, clock=self.clock, requests=3)

    def create(self, host: str | None, repair: bool) -> dict[str, Any]:
        """Enqueue an audit of a host, or of all hosts; return its uuid.

        Raise Invalid, NotFound, and Conflict while too many audits are open.
        """
        host = check_optional_text("host", host)
        if not isinstance(repair, bool):
            raise Invalid("repair must be true or false", field="repair")
        sources = [
            source for source in Source if source is not Source.NOVA or self.nova is not None
        ]

        def write(tx: Any) -> str:
            if host is not None and not store.host_exists(tx, host):
                raise NotFound(
                    f"unknown host {host!r}; GET /v2/services lists the known hosts", field="host"
                )
            if store.count_open(tx) >= MAX_OPEN_AUDITS:
                raise Conflict(f"{MAX_OPEN_AUDITS} audits are open; wait until one has ended")
            return store.add(tx, host, repair, sources)

        return {"uuid": self.uow.run_once(write, lambda uuid: {"uuid": uuid})}

    def run_once(self) -> int:
        """Run audits that are pending or whose lease has expired; return the number that ended."""
        ended = 0
        while not self._stopped.is_set():
            lease = self._leasing.begin(request_timeout=self._slowest)
            row = self.uow.run(
                partial(store.lease, owner=lease.owner, now=lease.start, until=lease.until)
            )
            if row is None:
                break
            lease.taken(1)
            with log_fields(audit=row["uuid"]):
                ended += self._run(AuditLease(self.uow, row, lease, self._stopped))
        return ended

    def sweep(self) -> int:
        """Delete old audits; return their number."""
        updated_before = self.uow.clock() - RETENTION
        return self.uow.run(lambda tx: old_rows.AUDITS.purge(tx, updated_before, PURGE_LIMIT))

    def stop(self) -> None:
        """Make ``run_once`` return soon; it releases the lease of the running audit."""
        self._stopped.set()

    def _run(self, lease: AuditLease) -> bool:
        """Run an audit, or the rest of it; return whether it has ended."""
        ended = threading.Event()

        def renew_lease() -> None:
            if ended.is_set():
                raise LeaseLost
            lease.renew_if_due()

        collector = SourceCollector(
            conf=self.conf,
            uow=self.uow,
            agents=self.agents,
            placement=self.placement,
            nova=self.nova,
            renew_lease=renew_lease,
        )
        try:
            is_nova_reported = False
            repairs = self.repairs if lease.row["repair"] else None
            audit = partial(self._audit_host, collector)
            hosts = map_ahead(
                "audit",
                lambda host: (host, audit(host)),
                lease.remaining_hosts(),
                max_threads=MAX_HOSTS,
                max_ahead=MAX_AHEAD,
                on_wait=lease.renew_if_due,
                # The threads that still wait for their turn then make no call: otherwise each would
                # wait for a Placement that does not answer, until the lease has ended.
                stopped=ended,
            )
            # Closed, so that no thread works on after an error here.
            with contextlib.closing(hosts):
                for host, findings in hosts:
                    # The error may be that of a later host, which is audited at the same time.
                    if collector.nova_error is not None and not is_nova_reported:
                        is_nova_reported = True
                        message = f"Nova: {collector.nova_error}; its servers were not compared"
                        nova = Finding(host, Kind.NOVA_UNAVAILABLE, "nova", message)
                        findings = [*findings, nova]  # noqa: PLW2901
                    lease.record(host, findings, repairs)
            return lease.finish(State.DONE)
        except LeaseLost:
            return False
        except Exception as exc:
            # The audit ends with an error: left open, it would be run again by each conductor in
            # turn.
            if is_expected(exc):
                return lease.finish(State.FAILED, str(exc))
            LOG.exception("Unexpected error while running an audit", audit=lease.row["uuid"])
            return lease.finish(State.FAILED, "internal error: the conductor's log has it")

    def _audit_host(self, collector: SourceCollector, host: str) -> Sequence[Finding]:
        """Return the confirmed findings of a host; called in several threads."""
        findings = self._compare_sources(collector, host)
        with collector.turn():
            return [*findings, *self._chains.check(host, collector.renew_lease)]

    def _compare_sources(self, collector: SourceCollector, host: str) -> Sequence[Finding]:
        """Return the confirmed findings of a host.

        Return none for a host that has only custody logs in the database: ``ChainChecker`` checks
        these.
        """
        if not self.uow.run(lambda tx: store.has_inventory(tx, host)):
            return []
        first = compare(collector.collect(host))
        # An unreachable agent has missed a timeout or longer: a recheck would add nothing.
        unreachable = [finding for finding in first if finding.kind is Kind.AGENT_UNREACHABLE]
        doubtful = [finding for finding in first if finding.kind is not Kind.AGENT_UNREACHABLE]
        if not doubtful:
            return unreachable
        # Placement, the agent and the database are read one after the other, so a change in between
        # looks like a difference.
        self._wait(RECHECK_DELAY)
        return [*unreachable, *confirmed(doubtful, compare(collector.collect(host, doubtful)))]
