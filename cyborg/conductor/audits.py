# SPDX-License-Identifier: Apache-2.0
"""Audits: four sides held against each other, host by host, by whichever conductor has the lease.

What disagrees is looked at a second time before it counts, since most of it was only on its way. An
audit whose conductor goes is carried on by another behind the last host that was recorded.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from oslo_config import cfg
from oslo_log import log
from oslo_utils import timeutils

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor import limits
from cyborg.conductor.audit_lease import Held, Lost
from cyborg.conductor.audit_repairs import Repairs
from cyborg.conductor.audit_sides import Agents, Sides
from cyborg.core.audit import Finding, Kind, Side, State, lasting
from cyborg.core.audit_compare import compare
from cyborg.core.errors import Conflict, Invalid, NotFound, Unavailable
from cyborg.db.store import audits as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

PAUSE = 3.0  # seconds between the two looks: a report and its publishing take less
KEEP = timedelta(days=7)  # how long audits that have ended can be looked up
PURGED = 100  # of them at a time
WAITING = 100  # audits that may be open: a timer that asks faster than hosts answer must hear of it


class Audits:
    """What may be done about audits; several conductors may each have one."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        agents: Agents,
        placement: Placement,
        nova: Nova | None,
        repairs: Repairs,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """``nova`` is None without Nova.

        ``now`` is naive UTC, ``clock`` counts seconds upwards, ``wait`` passes the time between the
        two looks.
        """
        self._conf = conf
        self._uow = uow
        self._agents = agents
        self._placement = placement
        self._nova = nova
        self._repairs = repairs
        self._now = now
        self._clock = clock
        self._stopped = threading.Event()
        self._wait = wait or self._stopped.wait
        slowest = max(conf.placement.request_timeout, conf.rpc.timeout, conf.nova.request_timeout)
        self._lease = max(conf.conductor.lease, 3 * slowest)

    def create(self, host: str | None, repair: bool) -> dict[str, Any]:
        """Promise an audit of a host or of all; return its uuid.

        Raises Invalid, NotFound, and Conflict while too many are open.
        """
        host = limits.optional("host", host)
        if not isinstance(repair, bool):
            raise Invalid("repair must be true or false", field="repair")
        sides = [side for side in Side if side is not Side.NOVA or self._nova is not None]

        def write(tx: Any) -> str:
            if host is not None and not store.is_host(tx, host):
                raise NotFound(f"nothing is known of a host {host!r}", field="host")
            if store.count_open(tx) >= WAITING:
                raise Conflict(f"{WAITING} audits wait or are being made: wait until one has ended")
            return store.add(tx, host, repair, sides)

        return {"uuid": self._uow.run(write)}

    def run_once(self) -> int:
        """Make the audits that wait, or that nobody carries on; return how many were ended."""
        ended = 0
        while not self._stopped.is_set():
            owner = str(uuid4())
            now = self._now()
            row = self._uow.run(
                lambda tx, owner=owner, now=now: store.lease(  # type: ignore[misc]
                    tx, owner=owner, now=now, until=now + timedelta(seconds=self._lease)
                )
            )
            if row is None:
                break
            ended += self._make(
                Held(
                    self._uow,
                    row,
                    owner,
                    self._lease,
                    self._stopped,
                    now=self._now,
                    clock=self._clock,
                )
            )
        return ended

    def sweep(self) -> int:
        """Forget old audits; return how many."""
        before = self._now() - KEEP
        return self._uow.run(lambda tx: store.purge(tx, before, PURGED))

    def stop(self) -> None:
        """Have ``run_once`` return soon; what it is at is given back."""
        self._stopped.set()

    def _make(self, held: Held) -> bool:
        """Make an audit, or the rest of it; tell whether it was ended here."""
        sides = Sides(
            self._conf,
            self._uow,
            self._agents,
            self._placement,
            self._nova,
            now=self._now,
            keep=held.keep,
        )
        try:
            for host in held.hosts():
                known = sides.nova_error
                found = self._host(sides, host)
                if sides.nova_error is not None and known is None:
                    told = f"Nova: {sides.nova_error}; its servers were not looked at"
                    found = [*found, Finding(host, Kind.NOVA_SILENT, "nova", told)]
                repairs = self._repairs if held.repair else None
                held.record(host, found, repairs)
            return held.end(State.DONE)
        except Lost:
            LOG.info("Audit %s is given up here and carried on elsewhere", held.uuid)
            return False
        except Unavailable as bad:
            return held.end(State.FAILED, bad.message)
        except Exception:
            LOG.exception("Audit %s failed for a reason nobody foresaw", held.uuid)
            return held.end(State.FAILED, "internal error: the conductor's log has it")

    def _host(self, sides: Sides, host: str) -> Sequence[Finding]:
        """Return what the sides of a host disagree about, twice."""
        first = compare(sides.look(host))
        # It was silent for a timeout or longer: no pause makes that surer.
        silent = [finding for finding in first if finding.kind is Kind.AGENT_SILENT]
        doubtful = [finding for finding in first if finding.kind is not Kind.AGENT_SILENT]
        if not doubtful:
            return silent
        self._wait(PAUSE)
        return [*silent, *lasting(doubtful, compare(sides.look(host, doubtful)))]
