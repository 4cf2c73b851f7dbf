# SPDX-License-Identifier: Apache-2.0
"""Deletion of daemons that are down; for an agent, together with the inventory of its host."""

from collections.abc import Callable
from datetime import datetime, timedelta

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.conductor.inventory import report_handler
from cyborg.conductor.inventory.report_handler import ReportResult
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.errors import InUse, NotFound, WrongState
from cyborg.core.hosts.liveness import AGENT
from cyborg.core.log import get_logger
from cyborg.core.validation import parse_uuid
from cyborg.db.drivers import rollouts
from cyborg.db.jobs import write as jobs
from cyborg.db.services import write as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

MAX_NAMED = 3  # objects that an error message names
PURGE_LIMIT = 64  # daemons that one sweep deletes
DAY = 86400.0  # seconds


class Services:
    """Operations of operators on services (daemons)."""

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        wake_publisher: Callable[[], None] = lambda: None,
        notices: NotificationBuilder | None = None,
        *,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        """``wake_publisher`` is called after a commit that changes resource providers."""
        self._conf = conf
        self._uow = uow
        self._wake_publisher = wake_publisher
        self._now = now or uow.clock
        self._notices = notices or NotificationBuilder(conf, now=self._now)

    def delete(self, uuid: str) -> None:
        """Delete a daemon that is down; for an agent, also delete the devices of its host.

        If the host returns, its devices are restored from tombstones ([conductor] tombstone_ttl)
        with their uuids and the settings of operators; the desired state of its drivers is lost.
        Raise Invalid, NotFound, WrongState while the daemon is up or late or a job is about its
        host, and InUse while a request holds a device of the host.
        """
        service, now = parse_uuid(uuid, "uuid"), self._now()

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
            # A concurrent heartbeat wins: the deletion checks the time under the row's lock.
            if not store.delete(tx, service, now):
                raise WrongState(f"{name} is not down; stop it first", service=service)
            if row["binary"] != AGENT:
                return row, ReportResult(0, "no inventory")
            inventory = remove_inventory(
                tx, row["host"], name, "deleted", now, self._conf, self._notices
            )
            return row, inventory

        row, outcome = self._uow.run_once(write)
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
            self._wake_publisher()

    def sweep(self) -> int:
        """Delete daemons not seen for ``[conductor] service_ttl`` seconds; return their number.

        The inventory of a host is deleted only by an operator: an agent with devices is kept.
        """
        ttl = self._conf.conductor.service_ttl
        if not ttl:
            return 0
        cutoff = self._now() - timedelta(seconds=ttl)

        def write(tx: sa.Connection) -> list[store.DaemonRow]:
            rows = store.purge(tx, cutoff, PURGE_LIMIT)
            rollouts.skip_pending_agent(tx, {r["host"] for r in rows if r["binary"] == AGENT})
            return rows

        rows = self._uow.run(write)
        for row in rows:
            LOG.info(
                "Deleted service %s, which sent no heartbeat for %g days",
                row["binary"],
                ttl / DAY,
                host=row["host"],
            )
        return len(rows)


def remove_inventory(
    tx: sa.Connection,
    host: str,
    name: str,
    verb: str,
    now: datetime,
    conf: cfg.ConfigOpts,
    notices: NotificationBuilder,
) -> ReportResult:
    """Remove the inventory of a host whose agent is down, and fail its jobs on devices.

    ``name`` and ``verb`` say in errors what is removed and how. Raise InUse while a request holds a
    device of the host.
    """
    keep_tombstones = conf.conductor.tombstone_ttl > 0
    outcome = report_handler.remove_backend(
        tx, host, None, now, notices, keep_tombstones=keep_tombstones
    )
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
