# SPDX-License-Identifier: Apache-2.0
"""What daemons tell of themselves: that they live (hello) and what their host has (report)."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc
from oslo_log import log
from oslo_utils import timeutils

from cyborg.conductor import limits, liveness, reports
from cyborg.conductor.limits import text
from cyborg.conductor.notices import Notices
from cyborg.core import wire
from cyborg.core.catalogue import fingerprint
from cyborg.core.errors import Conflict, Invalid, Stale
from cyborg.core.report import BackendState, Report
from cyborg.core.request import parse_uuid
from cyborg.db.store import backends as backend_store
from cyborg.db.store import drivers, jobs, providers
from cyborg.db.store import services as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = log.getLogger(__name__)

T = TypeVar("T")

MAX_BACKENDS = 256  # of one host
MAX_VERSIONS = 16384  # characters of a hello's versions
AUDITED = 64  # providers that one sweep has compared with Placement again


class Hosts:
    """The daemons and the inventory of their hosts."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        wake_publisher: Callable[[], None] = lambda: None,
        wake_jobs: Callable[[], None] = lambda: None,
        notices: Notices | None = None,
        *,
        now: Callable[[], datetime] = timeutils.utcnow,
    ) -> None:
        """``wake_publisher`` is called after a commit that Placement must be told of.

        ``wake_jobs`` is called when an agent begins anew that had work to do.
        """
        self._conf = conf
        self._uow = uow
        self._wake_publisher = wake_publisher
        self._wake_jobs = wake_jobs
        self._notices = notices or Notices(conf, now=now)
        self._now = now

    def hello(
        self,
        host: str,
        epoch: str,
        endpoint: str | None,
        status: str,
        drivers: Sequence[Mapping[str, Any]],
        digest: str | None,
        versions: Mapping[str, Any] | None,
        wanted: int | None = None,
    ) -> dict[str, Any]:
        """Note that an agent is alive; say when the next hello is due and whether to report.

        The hello of an agent that has nothing new costs one UPDATE, however much its host has. That
        of one that is held for down opens what its host has. ``wanted`` is the revision of what is
        wanted of the host that the agent has come to, None from an older one. Raises Invalid.
        """
        host, epoch = text("host", host), parse_uuid(epoch, "epoch")
        digest = text("digest", digest, 64) if digest else None
        said = {
            "endpoint": text("endpoint", endpoint) if endpoint else None,
            "status": text("status", status, 32),
            "versions": _versions(versions),
        }
        now = self._now()
        asks, come_to = False, limits.revision("wanted", wanted)
        revision = come_to or 0
        if digest is None or not self._uow.run(
            lambda tx: store.unchanged(tx, store.AGENT, host, epoch, digest, now, said, come_to)
        ):
            states = _backends(drivers)

            def enter(tx: sa.Connection) -> tuple[sa.RowMapping, int, sa.RowMapping | None, int]:
                before = store.other_life(tx, store.AGENT, host, epoch)
                row = store.alive(tx, store.AGENT, host, epoch, now, said)
                backend_store.replace(tx, host, states)
                # An agent begins anew: the time to see whether Placement still has what it had.
                # Once: it may say many hellos before its first report, which are as dear each.
                anew = before is not None and row["digest"] is not None
                marked = providers.audit_host(tx, host, now) if anew else 0
                if row["down_since"] is not None:
                    liveness.returned(tx, row, self._notices, now)
                    marked = providers.mark_hosts(tx, [host], now)
                # Its last life took what it was doing along: it is asked again at once.
                hurried = jobs.hurry(tx, host, now) if before is not None else 0
                return row, marked, before, hurried

            row, stale, before, hurried = self._again(enter)
            if before is not None:
                _say_new_life(host, endpoint, before, now)
            if (down := row["down_since"]) is not None:
                seconds = (now - down).total_seconds()
                LOG.info("Host %s: the agent was down for %.0f s and speaks again", host, seconds)
            if hurried:
                self._wake_jobs()
            asks, revision = digest is not None and row["digest"] != digest, row["wanted"]
            if stale:
                self._wake_publisher()
        return {
            "interval": self._conf.conductor.hello_interval,
            "report": asks,
            "wanted": revision,
        }

    def report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Record what a host has, in one transaction, and have Placement told of what changed.

        Raises Stale when it comes from a life of the agent that is over or is not newer than the
        last one, Invalid when it is malformed, Conflict when it claims what another host has.
        """
        said = self._read(report)
        now = self._now()

        def take(tx: sa.Connection) -> tuple[reports.Outcome, int]:
            if not store.accept(tx, said.host, said.epoch, said.generation, said.digest, now):
                raise Stale(
                    f"report {said.generation} of epoch {said.epoch} of host {said.host} comes too "
                    "late: say hello first, then report with a higher generation",
                    host=said.host,
                    generation=said.generation,
                )
            known = backend_store.replace(tx, said.host, said.backends)
            moved = 0
            if said.drivers is not None and known["catalogue"] != fingerprint(said.drivers):
                drivers.replace(tx, known["agent"], said.drivers)
            if known["identity"] != (identity := wire.dump_identity(said.identity)):
                store.identify(tx, said.host, identity)
                # Another compute node, perhaps, is to be the parent of what the host has.
                moved = providers.mark_hosts(tx, [said.host], now)
            remember = self._conf.conductor.remember > 0
            marks = bool(known["marks"])
            return (
                reports.record(tx, said, now, self._notices, remember=remember, marks=marks),
                moved,
            )

        try:
            outcome, moved = self._uow.run(take)
        except db_exc.DBDuplicateEntry as bad:
            raise Conflict(
                f"host {said.host} reports something that another host has: provider names are "
                "<host>_<address> and must differ",
                host=said.host,
            ) from bad
        for line in outcome.remarks:
            LOG.warning("Host %s: %s", said.host, line)
        if outcome.providers:
            LOG.info(
                "Host %s, report %s: %s; %s resource providers to publish",
                said.host,
                said.generation,
                outcome.summary,
                outcome.providers,
            )
        if outcome.providers or moved:
            self._wake_publisher()
        return {"accepted": True}

    def service_hello(
        self, binary: str, host: str, epoch: str, versions: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Note that a daemon other than an agent is alive; say when the next hello is due.

        ``now`` of the answer is this conductor's time, naive UTC in ISO 8601.
        """
        binary, host = text("binary", binary, 64), text("host", host)
        epoch = parse_uuid(epoch, "epoch")
        if binary == store.AGENT:
            raise Invalid("an agent says hello, not service_hello", field="binary")
        said = {"status": "READY", "versions": _versions(versions)}
        now = self._now()
        self._again(lambda tx: store.alive(tx, binary, host, epoch, now, said))
        return {"interval": self._conf.conductor.hello_interval, "now": now.isoformat()}

    def sweep(self) -> int:
        """Have done what nobody else would ask for; return how much that is.

        Hosts are asked again that keep drained handles which nobody owns, and providers are
        compared with Placement again that have not been for long, a few at a time.
        """
        now = self._now()
        before = now - timedelta(seconds=self._conf.conductor.audit_interval)
        asked = self._uow.run(store.ask_again)
        old = self._uow.run(lambda tx: providers.mark_old(tx, before, now, AUDITED))
        if old:
            self._wake_publisher()
        return asked + old

    def _again(self, work: Callable[[sa.Connection], T]) -> T:
        """Run work that may find that another conductor has just entered the same daemon."""
        try:
            return self._uow.run(work)
        except db_exc.DBDuplicateEntry:
            return self._uow.run(work)

    def _read(self, body: Mapping[str, Any]) -> Report:
        said = wire.load_report(body)
        limits.check_report(said)
        return replace(said, epoch=parse_uuid(said.epoch, "epoch"))


def _say_new_life(host: str, endpoint: str | None, before: sa.RowMapping, now: datetime) -> None:
    seconds = (now - before["last_seen_at"]).total_seconds()
    LOG.warning(
        "Host %s: the agent at %s takes over from the one at %s, last seen %.0f s ago. A restart "
        "does that once; if it goes on, two agents say that they are this host: see [DEFAULT] host",
        host,
        endpoint,
        before["endpoint"],
        seconds,
    )


def _backends(drivers: Any) -> list[BackendState]:
    if not isinstance(drivers, Sequence) or len(drivers) > MAX_BACKENDS:
        raise Invalid(f"drivers must be a list of at most {MAX_BACKENDS}", field="drivers")
    try:
        states = [wire.load_backend(body) for body in drivers]
    except (KeyError, TypeError, ValueError, AttributeError) as bad:
        raise Invalid(f"malformed drivers: {type(bad).__name__} {bad}", field="drivers") from bad
    limits.check_backends(states)
    return states


def _versions(versions: Any) -> dict[str, Any]:
    versions = {} if versions is None else versions
    if not isinstance(versions, Mapping) or len(json.dumps(versions)) > MAX_VERSIONS:
        raise Invalid(f"versions must be an object of at most {MAX_VERSIONS}", field="versions")
    return dict(versions)
