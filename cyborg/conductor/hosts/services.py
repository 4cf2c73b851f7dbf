# SPDX-License-Identifier: Apache-2.0
"""Deletion of daemons that are down, and of hosts that left the cloud for good.

With an agent the inventory of its host is deleted, and with a host everything that is stored of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db.exception import DBDuplicateEntry

from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.release import ReleaseResult
from cyborg.conductor.inventory.report_handler import ReportHandler, ReportResult
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.errors import InUse, Invalid, NotFound, WrongState
from cyborg.core.hosts import AGENT
from cyborg.core.log import get_logger
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.binding import write as arq_store
from cyborg.db.devices import tombstones
from cyborg.db.devices import write as devices
from cyborg.db.discoveries import write as discoveries
from cyborg.db.drivers import rollouts
from cyborg.db.jobs import write as jobs
from cyborg.db.providers import write as providers
from cyborg.db.services import write as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

# Objects that an error message names.
MAX_NAMED = 3
# Daemons that one sweep deletes.
PURGE_LIMIT = 64
# Seconds of a day.
DAY = 86400.0


@dataclass(frozen=True)
class Services:
    """Operations of operators on services (daemons).

    ``wake_publisher`` is called after a commit that changes resource providers.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    notifications: NotificationBuilder
    wake_publisher: Callable[[], None] = lambda: None

    def delete(self, uuid: str) -> None:
        """Delete a daemon that is down; for an agent, also delete the devices of its host.

        If the host returns, its devices are restored from tombstones ([conductor] tombstone_ttl)
        with their uuids and the settings of operators; the desired state of its drivers is lost.
        Raise Invalid, NotFound, WrongState while the daemon is up or late or a job is about its
        host, and InUse while a request holds a device of the host.
        """
        service, now = parse_uuid(uuid, "uuid"), self.uow.clock()

        # Read without a lock: the guards of the deletion compare the time of the last heartbeat
        # again.
        def write(tx: sa.Connection) -> tuple[store.DaemonRow, ReportResult]:
            row = store.find(tx, service)
            if row is None:
                raise NotFound(f"no service {service}", service=service)
            name = f"{row['binary']} of host {row['host']}"
            if row["binary"] == AGENT and (open_ := store.open_jobs(tx, row["host"])):
                raise WrongState(
                    f"{name} cannot be deleted: {len(open_)} open jobs work on this host, such as "
                    f"{', '.join(open_[:MAX_NAMED])}; cancel them or wait for their end",
                    service=service,
                )
            # A concurrent heartbeat wins: the deletion checks the mark under the row's lock.
            if not store.delete(tx, service, now):
                raise WrongState(f"{name} is not down; {_advice(row['binary'])}", service=service)
            if row["binary"] != AGENT:
                return row, ReportResult(stale_providers=0, summary="no inventory")
            handler = ReportHandler(self.conf, self.notifications)
            return row, remove_inventory(tx, row["host"], now, handler, name=name, verb="deleted")

        row, outcome = self.uow.run_once(write)
        LOG.info(
            "Deleted service %s: %s; %s resource providers to publish",
            row["binary"],
            outcome.summary,
            outcome.stale_providers,
            service=service,
            host=row["host"],
        )
        for remark in outcome.remarks:
            LOG.warning("%s", remark.text, host=row["host"], **remark.fields)
        if outcome.stale_providers:
            self.wake_publisher()

    def sweep(self) -> int:
        """Delete daemons not seen for ``[conductor] service_ttl`` seconds; return their number.

        The inventory of a host is deleted only by an operator: an agent with devices is kept.
        """
        ttl = self.conf.conductor.service_ttl
        if not ttl:
            return 0
        cutoff = self.uow.clock() - timedelta(seconds=ttl)

        def write(tx: sa.Connection) -> list[store.DaemonRow]:
            rows = store.purge(tx, cutoff, PURGE_LIMIT)
            rollouts.skip_pending_agent(tx, {r["host"] for r in rows if r["binary"] == AGENT})
            return rows

        rows = self.uow.run(write)
        for row in rows:
            LOG.info(
                "Deleted service %s, which sent no heartbeat for %g days",
                row["binary"],
                ttl / DAY,
                host=row["host"],
            )
        return len(rows)


def remove_inventory(
    tx: sa.Connection, host: str, now: datetime, handler: ReportHandler, *, name: str, verb: str
) -> ReportResult:
    """Remove the inventory of a host whose agent is down, and fail its jobs on devices.

    ``name`` and ``verb`` say in errors what is removed and how. Raise InUse while a request holds a
    device of the host.
    """
    outcome = handler.remove_backend(tx, host, backend=None, now=now)
    # After the removal: no free handle is left that could be claimed between this check and the
    # commit. The error rolls the removal back.
    if owners := store.holders(tx, host):
        raise InUse(
            f"{name} cannot be {verb}: {len(owners)} requests hold devices of this host, such as "
            f"{', '.join(owners[:MAX_NAMED])}; delete or evacuate their instances",
            requests=list(owners[:MAX_NAMED]),
        )
    # No handle of the host is left to prepare or clean, and no agent to do it.
    jobs.fail_host_jobs(tx, host, f"abandoned: {name} was {verb}")
    rollouts.skip_pending_agent(tx, [host])
    return outcome


@dataclass(frozen=True, slots=True)
class HostRemovalResult:
    """What was removed of a host; ``counts`` are the numbers of objects for the caller.

    The resource providers of ``counts`` remain to be deleted in Placement.
    """

    counts: dict[str, int]
    report: ReportResult
    release: ReleaseResult


@dataclass(frozen=True)
class HostRemoval:
    """Removal of hosts by operators.

    ``wake_publisher`` is called after a commit that changes resource providers.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    arqs: Arqs
    notifications: NotificationBuilder
    wake_publisher: Callable[[], None] = lambda: None

    def forget(self, host: str, force: bool, dry_run: bool | None = None) -> dict[str, int]:
        """Remove the daemons of a host that are down, its inventory and its resource providers.

        Return the number of removed objects of each kind. With ``force``, also delete the ARQs that
        hold its devices, fail its jobs on devices, and make the publisher delete what consumers
        have allocated of its resource providers. Custody records stay, and so do the tombstones of
        devices with dirty handles: such a device must be cleaned if it ever returns.

        All is one transaction; only Placement changes later. With ``dry_run`` the transaction is
        rolled back: the numbers and errors are those of a removal. Raise Invalid, NotFound if
        nothing is stored of the host, WrongState while a daemon is up or late or a job is about the
        host, and InUse while a request holds a device and ``force`` is False.
        """
        host, now = check_text("host", host), self.uow.clock()
        if not isinstance(force, bool):
            raise Invalid("force: expected true or false", field="force")
        if not isinstance(dry_run, bool | None):
            raise Invalid("dry_run: expected true or false", field="dry_run")
        if dry_run:
            return self._count(host, force, now)
        try:
            result = self.uow.run_once(
                lambda tx: self._forget(tx, host, force, now),
                answer=lambda removal: removal.counts,
            )
        except DBDuplicateEntry as exc:
            raise _returned(host) from exc
        LOG.info(
            "Removed host: %d services, %d devices, %d ARQs, %d tombstones; %d resource providers "
            "to delete in Placement; %s",
            *result.counts.values(),
            result.report.summary,
            host=host,
        )
        for remark in result.report.remarks:
            LOG.warning("%s", remark.text, host=host, **remark.fields)
        self.arqs.finish_release(result.release, deleted=True)
        if result.counts["resource_providers"]:
            self.wake_publisher()
        return result.counts

    def _count(self, host: str, force: bool, now: datetime) -> dict[str, int]:
        """Return what a removal would return. Raise its errors."""

        # The same statements as the removal, then a rollback: a count of its own could differ from
        # it.
        def undo(tx: sa.Connection) -> None:
            raise _RolledBackError(self._forget(tx, host, force, now))

        # A deliberate error is the only way to end a unit of work without a commit.
        try:
            self.uow.run(undo)
        except _RolledBackError as exc:
            return exc.result.counts
        raise AssertionError("the transaction was committed")

    def _forget(
        self, tx: sa.Connection, host: str, force: bool, now: datetime
    ) -> HostRemovalResult:
        """Delete all that is stored of a host whose daemons are down; see ``forget``."""
        daemons = store.lock_of_host(tx, host)
        if up := sorted(row["binary"] for row in daemons if not _is_down(row, now)):
            raise WrongState(f"{up[0]} of host {host} is not down; {_advice(up[0])}", host=host)
        ids = [row["id"] for row in daemons]
        # The row of the agent is the lock of the inventory. An imported host has no such row yet.
        if not any(row["binary"] == AGENT for row in daemons):
            ids.append(store.insert_absent_agent(tx, host, now))
        # With ``force``, ``remove_inventory`` fails the jobs on devices. Jobs of several hosts are
        # never failed here: their operator decides what they do next.
        if open_ := store.open_jobs(tx, host, programs=not force):
            raise WrongState(
                f"host {host} cannot be removed: {len(open_)} open jobs work on it, such as "
                f"{', '.join(open_[:MAX_NAMED])}; cancel them or wait for their end",
                host=host,
            )
        released = self._release(tx, host) if force else ReleaseResult(count=0)
        uuids = devices.uuids_of_host(tx, host)
        tombstone_devices = tombstones.uuids_of_host(tx, host)
        handler = ReportHandler(self.conf, self.notifications)
        report = remove_inventory(tx, host, now, handler, name=f"host {host}", verb="removed")
        if store.delete_of_host(tx, ids, now) != len(ids):
            raise _returned(host)
        # Not all: a device with dirty handles must be cleaned if it ever returns.
        removed = tombstones.delete_clean(tx, host)
        # A device that returns from its tombstone is still in its maintenance window.
        kept = tombstones.uuids_of_host(tx, host)
        devices.delete_windows(tx, {*uuids, *tombstone_devices}.difference(kept))
        discoveries.delete_of_host(tx, host)
        remaining = providers.mark_removed(tx, host, now, evict=force)
        # ``forget`` logs the numbers in this order.
        counts = {
            "services": len(daemons),
            "devices": len(uuids),
            "accelerator_requests": released.count,
            "tombstones": removed,
            "resource_providers": remaining,
        }
        if not any(counts.values()):
            raise NotFound(
                f"nothing is stored of host {host}; GET /v2/services lists the known hosts",
                host=host,
            )
        return HostRemovalResult(counts, report, released)

    def _release(self, tx: sa.Connection, host: str) -> ReleaseResult:
        """Delete the ARQs that hold devices of a host; unbind those of device contexts."""
        rows = arq_store.lock(tx, store.holders(tx, host))
        return self.arqs.release_arqs(tx, rows, keep=False) if rows else ReleaseResult(count=0)


class _RolledBackError(Exception):
    """Ends a transaction without a commit; ``result`` is what it would have done."""

    def __init__(self, result: HostRemovalResult) -> None:
        super().__init__()
        self.result = result


def _is_down(row: store.DaemonRow, now: datetime) -> bool:
    """Return whether a daemon is down, for the message of the error.

    The guard of the deletion, ``_is_down`` of ``cyborg/db/services/write.py``, is the same rule in
    SQL and decides again.
    """
    return row["down_since"] is not None or (row["binary"] != AGENT and row["down_at"] <= now)


def _advice(binary: str) -> str:
    """Return what to do about a daemon that is not down."""
    if binary != AGENT:
        return "stop it first"
    return "stop it first, and wait until a conductor has marked it down"


def _returned(host: str) -> WrongState:
    return WrongState(f"a daemon of host {host} has just returned; stop it first", host=host)
