# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of daemons, and reports of agents on the inventory of their hosts."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import sqlalchemy as sa
from oslo_config import cfg
from oslo_db import exception as db_exc

from cyborg.conductor.hosts import failure_detector
from cyborg.conductor.inventory.report_handler import ReportHandler, ReportResult
from cyborg.conductor.jobs import cancellation, reboot
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.conf.options import reference_release
from cyborg.core.drivers.registry import fingerprint
from cyborg.core.errors import Conflict, Invalid, Stale
from cyborg.core.hosts import AGENT, ServiceStatus, has_rebooted
from cyborg.core.inventory.reference_names import add_reference_names
from cyborg.core.inventory.report import BackendState, Report, parse_backends
from cyborg.core.log import get_logger
from cyborg.core.text import join_limited
from cyborg.core.validation import check_integer, check_text, parse_uuid
from cyborg.db import errors
from cyborg.db.backends import desired as wanted_store
from cyborg.db.backends import write as backend_store
from cyborg.db.deployables import programming
from cyborg.db.deployables import write as deployable_store
from cyborg.db.drivers import write as drivers
from cyborg.db.jobs import write as jobs
from cyborg.db.providers import write as providers
from cyborg.db.services import write as store
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

T = TypeVar("T")

# Characters of the versions in a heartbeat. The versions are stored and compared at each heartbeat.
MAX_VERSIONS = 16384
# Provider names in one message.
MAX_NAMED = 8
# Uninstalled backends of down hosts that one sweep removes. Each removal is a transaction of its
# own: the next sweep does the rest.
MAX_REMOVALS = 64


@dataclass(frozen=True, slots=True)
class _Heartbeat:
    """A heartbeat of an agent. ``digest`` is that of its inventory, None if it has none yet."""

    host: str
    epoch: str
    digest: str | None
    times: store.HeartbeatTimes
    fields: store.HeartbeatFields
    boot_id: str | None


@dataclass(frozen=True, slots=True)
class _Registration:
    """What a heartbeat with changes has written.

    ``row`` and ``previous`` are the agent and its last process, None for the same process.
    ``stale`` and ``expedited`` are the numbers of providers to publish and of open jobs.
    """

    row: store.DaemonRow
    previous: store.DaemonRow | None
    stale: int
    expedited: int


@dataclass(eq=False)
class Hosts:
    """Registry of daemons and of the inventory of their hosts.

    ``wake_publisher`` is called after a commit that changes resource providers, ``wake_jobs`` when
    an agent restarts that has open jobs. ``interval`` is the interval of the agents.
    """

    conf: cfg.ConfigOpts
    uow: UnitOfWork
    notifications: NotificationBuilder
    wake_publisher: Callable[[], None] = lambda: None
    wake_jobs: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.interval = failure_detector.HeartbeatInterval(self.conf, self.uow)

    def heartbeat(
        self,
        host: str,
        epoch: str,
        endpoint: str | None,
        status: str,
        drivers: Sequence[Mapping[str, Any]],
        digest: str | None,
        versions: Mapping[str, Any] | None,
        observed_generation: int | None = None,
        boot_id: str | None = None,
    ) -> dict[str, Any]:
        """Record an agent's heartbeat; return the answer of ``ConductorAPI.hello``.

        ``drivers`` are the states of its backends; ``digest`` is that of its inventory, None if it
        has none yet. A heartbeat without changes costs one UPDATE for an inventory of any size. A
        heartbeat from an agent marked down uncordons its host. ``observed_generation`` is the
        generation of the desired state that the host has applied, None from an older agent. If
        ``boot_id`` has changed, the host has rebooted, and its bound handles are prepared again.
        Raise Invalid.
        """
        host, epoch = check_text("host", host), parse_uuid(epoch, "epoch")
        digest = self._digest(check_text("digest", digest, 64)) if digest else None
        fields: store.HeartbeatFields = {
            "endpoint": check_text("endpoint", endpoint) if endpoint else None,
            "status": check_text("status", status, 32),
            "versions": _check_versions(versions),
            "has_digest": digest is not None,
        }
        if boot_id is not None:
            fields["boot_id"] = check_text("boot_id", boot_id, 64)
        observed = None
        if observed_generation is not None:
            observed = check_integer("observed_generation", observed_generation)
        now, interval = self.uow.clock(), self.interval.seconds
        times = self.interval.agent_times(now)
        answer = {"interval": interval, "report": False, "desired_generation": observed or 0}
        # The usual case, one UPDATE: its guards compare everything that could call for more, also
        # the observed generation with the desired one.
        if digest is not None and self.uow.run(
            lambda tx: store.heartbeat_if_unchanged(
                tx, AGENT, host, epoch, digest, times, fields, observed
            )
        ):
            return answer
        states = parse_backends(drivers)
        beat = _Heartbeat(host, epoch, digest, times, fields, boot_id)
        registration = self._retry_on_duplicate(lambda tx: self._register(tx, beat, states, now))
        agent = registration.row
        if registration.previous is not None:
            _log_restart(host, endpoint, registration.previous, now)
        if (down := agent["down_since"]) is not None:
            LOG.info("Agent is up again after %.0f s", (now - down).total_seconds(), host=host)
        if registration.expedited:
            self.wake_jobs()
        if registration.stale:
            self.wake_publisher()
        answer["report"] = digest is not None and agent["digest"] != digest
        answer["desired_generation"] = agent["desired_generation"]
        return answer

    def _register(
        self, tx: sa.Connection, beat: _Heartbeat, states: Sequence[BackendState], now: datetime
    ) -> _Registration:
        """Write a heartbeat that differs from the last one, and what follows from it."""
        host = beat.host
        # Before the row is overwritten: it says which process sent the last heartbeat.
        previous = store.previous_incarnation(tx, AGENT, host, beat.epoch)
        # This locks the row of the agent, and with it the inventory of the host.
        values = (beat.epoch, beat.times, beat.fields)
        row = None if previous is None else store.restart(tx, previous, *values)
        if row is None:
            row = store.upsert_heartbeat(tx, AGENT, host, *values)
        stored = backend_store.replace(tx, host, states)
        stale = 0  # the number of providers to publish
        # An agent has restarted: compare its providers with Placement, if there are any: a host
        # without a digest has never reported. Only at the first heartbeat of an epoch, which alone
        # has a previous one: each before the first report would cost the same again.
        if previous is not None and row["digest"] is not None:
            stale = providers.schedule_verification_of_hosts(tx, [host], now)
            if previous["versions"] != beat.fields["versions"]:
                # An upgrade may have changed what follows from the same devices.
                backend_store.sync_functions(tx, host)
        stale += _sync_cordons(tx, host, stored.changed_cordons, now)
        if row["down_since"] is not None:
            # Not added: all providers of the host are stale now, those counted before among them.
            failure_detector.mark_up(tx, row, self.notifications, now)
            stale = providers.mark_stale_of_hosts(tx, [host], now)
        if previous is None:
            return _Registration(row, previous=None, stale=stale, expedited=0)
        if has_rebooted(previous["boot_id"], beat.boot_id):
            stale += _restore_after_reboot(
                tx, host, now, known_digest=row["digest"], digest=beat.digest
            )
        # The restart has lost the running jobs: ask the agent about them at once.
        return _Registration(row, previous, stale, jobs.expedite(tx, host, now))

    def report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Record the inventory of a host in one transaction and wake the publisher on changes.

        Raise Stale if the report is from a previous epoch of the agent or is not newer than the
        last accepted report, Invalid if it is malformed, Conflict if another host already uses one
        of its provider names.
        """
        inventory = self._parse_report(report)
        now = self.uow.clock()
        times = self.interval.agent_times(now)

        outcome, marked = self._run_report(
            inventory, lambda tx: self._record_report(tx, inventory, times, now)
        )
        for remark in outcome.remarks:
            LOG.warning("%s", remark.text, host=inventory.host, **remark.fields)
        if outcome.stale_providers:
            LOG.info(
                "Recorded report %s: %s; %s resource providers to publish",
                inventory.generation,
                outcome.summary,
                outcome.stale_providers,
                host=inventory.host,
            )
        if outcome.stale_providers or marked:
            self.wake_publisher()
        return {"accepted": True}

    def _record_report(
        self, tx: sa.Connection, inventory: Report, times: store.HeartbeatTimes, now: datetime
    ) -> tuple[ReportResult, int]:
        """Record a report; return the result, and how many other providers to publish.

        The order of the steps: the agent's row first, which locks out other reports of the host;
        then the state of its backends and drivers; then the devices, which depend on both. The
        providers come last, as in the plans of device sets, which lock the sets before.
        """
        host = inventory.host
        if not store.accept_report(
            tx, host, inventory.epoch, inventory.generation, inventory.digest, times
        ):
            raise Stale(
                f"stale report: host {host} epoch {inventory.epoch} generation "
                f"{inventory.generation} is not newer than the last accepted one",
                host=host,
                generation=inventory.generation,
            )
        stored = backend_store.replace(tx, host, inventory.backends)
        is_changed = bool(stored.changed_cordons and wanted_store.sync_cordon(tx, [host], now))
        # Another compute node may be the parent of the host's providers now.
        is_changed = _store_agent(tx, inventory, stored) or is_changed
        if stored.has_failed_changes:
            cancellation.give_up_impossible(tx, inventory, now)
        handler = ReportHandler(self.conf, self.notifications)
        result = handler.record_report(tx, inventory, now, has_overrides=stored.has_overrides)
        return result, providers.mark_others_stale(tx, host, now) if is_changed else 0

    def service_heartbeat(
        self,
        binary: str,
        host: str,
        epoch: str,
        versions: Mapping[str, Any] | None,
        status: str | None = None,
    ) -> dict[str, Any]:
        """Record the heartbeat of a daemon other than an agent. Raise Invalid.

        Return the answer of ``ConductorAPI.service_hello``.
        """
        binary, host = check_text("binary", binary, 64), check_text("host", host)
        epoch = parse_uuid(epoch, "epoch")
        # An agent has an inventory, whose digest only ``hello`` carries.
        if binary == AGENT:
            raise Invalid("binary cyborg-agent must use hello, not service_hello", field="binary")
        if status not in (None, *ServiceStatus):
            raise Invalid(
                f"status must be one of {', '.join(ServiceStatus)}, or null", field="status"
            )
        fields: store.HeartbeatFields = {
            "status": status or ServiceStatus.READY,
            "versions": _check_versions(versions),
        }
        now = self.uow.clock()
        times = self.interval.service_times(now)
        self._retry_on_duplicate(
            lambda tx: store.upsert_heartbeat(tx, binary, host, epoch, times, fields)
        )
        return {"interval": self.conf.conductor.hello_interval, "now": now.isoformat()}

    def sweep(self) -> int:
        """Schedule work that no other event triggers; return the number of objects.

        Request a report from hosts that still have drained, unowned handles. Remove such handles
        if the host is down and the backend was force-uninstalled.
        """
        requested = self.uow.run(store.request_stale_reports)
        removed, stale = self._remove_abandoned_backends(self.uow.clock())
        if stale:
            self.wake_publisher()
        return requested + removed

    def _remove_abandoned_backends(self, now: datetime) -> tuple[int, int]:
        """Remove force-uninstalled backends of hosts that are down.

        Return the number of backends and of changed providers. Each backend has its own
        transaction, so that a failure affects no other backend.
        """
        removed = stale = 0
        handler = ReportHandler(self.conf, self.notifications)
        remove = partial(cancellation.remove_abandoned_backend, now=now, handler=handler)
        for host, backend in self.uow.run(
            lambda tx: wanted_store.removed_with_drained_handles(tx, MAX_REMOVALS)
        ):
            outcome = self.uow.run(partial(remove, host=host, backend=backend))
            # None: the backend was installed again meanwhile.
            if outcome is not None and outcome.stale_providers:
                LOG.info(
                    "Removed uninstalled backend of a host that is down: %s",
                    outcome.summary,
                    host=host,
                    backend=backend,
                )
                removed += 1
                stale += outcome.stale_providers
        return removed, stale

    def _run_report(self, inventory: Report, work: Callable[[sa.Connection], T]) -> T:
        """Run a report's transaction and return its result; retry it once on a duplicate key.

        The retry succeeds if another transaction has just written the same row. Otherwise raise
        Conflict, which names the cause.
        """
        addresses = {
            deployable.address for device in inventory.devices for deployable in device.deployables
        }
        # Once more only: a second duplicate is no race but a conflict that somebody must resolve.
        for attempt in range(2):
            try:
                return self.uow.run(work)
            except db_exc.DBDuplicateEntry as exc:
                # Kept for the cause: Python deletes the name of the exception at the end of this
                # block.
                duplicate = exc
            conflicts = self.uow.run(
                lambda tx: deployable_store.find_name_conflicts(tx, inventory.host, addresses)
            )
            if conflicts:
                named = [f"{name} belongs to host {host}" for name, host in conflicts]
                raise Conflict(
                    f"host {inventory.host} reports deployables whose provider names are in use: "
                    f"{join_limited(named, MAX_NAMED)}. Provider names are "
                    "<host>_<address> and must be unique",
                    host=inventory.host,
                ) from duplicate
            LOG.log(
                logging.INFO if attempt == 0 else logging.ERROR,
                "Cannot record report %s: duplicate key (%s), attempt %d of 2",
                inventory.generation,
                errors.reason(duplicate),
                attempt + 1,
                host=inventory.host,
            )
        raise Conflict(
            f"the report of host {inventory.host} breaks a uniqueness constraint of the database "
            f"({errors.constraint_name(duplicate)}), although no other host uses its provider "
            "names; see the duplicate key in the conductor's log",
            host=inventory.host,
        ) from duplicate

    def _retry_on_duplicate(self, work: Callable[[sa.Connection], T]) -> T:
        """Run a transaction; repeat it if another conductor has just registered the same daemon."""
        # Both conductors found no row. An INSERT that ignores the duplicate would hide that the
        # other one has written newer values.
        try:
            return self.uow.run(work)
        except db_exc.DBDuplicateEntry:
            return self.uow.run(work)

    def _parse_report(self, body: Mapping[str, Any]) -> Report:
        inventory = Report.load(body)
        inventory.check_limits()
        # In the conductor and not in the agent: one option for the cloud, and agents need no
        # restart.
        if (release := reference_release(self.conf)) is not None:
            devices = tuple(add_reference_names(d, release) for d in inventory.devices)
            inventory = replace(inventory, devices=devices)
        return replace(
            inventory,
            epoch=parse_uuid(inventory.epoch, "epoch"),
            digest=self._digest(inventory.digest),
        )

    def _digest(self, reported: str) -> str:
        """Return the digest to store: it changes with the option that changes reported devices."""
        release = reference_release(self.conf)
        if release is None:
            return reported
        return hashlib.sha256(f"{release} {reported}".encode()).hexdigest()


def _store_agent(tx: sa.Connection, inventory: Report, stored: backend_store.Replacement) -> bool:
    """Write the drivers and the identity of a host; return whether the identity has changed."""
    reported = inventory.drivers
    if reported is not None and stored.drivers_digest != fingerprint(reported):
        drivers.replace(tx, stored.agent_id, reported)
    identity = inventory.identity.to_dict()
    if stored.identity == identity:
        return False
    store.set_identity(tx, inventory.host, identity)
    return True


def _restore_after_reboot(
    tx: sa.Connection, host: str, now: datetime, *, known_digest: str | None, digest: str | None
) -> int:
    """Prepare again what a reboot has undone; return the number of providers to publish."""
    # Before the jobs are locked: the locks of ARQs come first.
    ended = reboot.end_set_restores(tx, host, now)
    reboot.enqueue_restores(tx, host, now, ended.uuids)
    stale = ended.stale + reboot.enqueue_layouts(tx, host, now)
    # An unchanged inventory has lost nothing. Without a digest this is not known yet: the next
    # inventory is compared even if it is unchanged.
    changed = digest is None or known_digest != digest
    if changed and programming.start_boot_checks(tx, host):
        store.request_report(tx, host)
    return stale


def _sync_cordons(tx: sa.Connection, host: str, cordons: Sequence[str], now: datetime) -> int:
    """Cordon or uncordon the devices of backends that were cordoned or uncordoned.

    Return the number of changed providers.
    """
    if not cordons or not wanted_store.sync_cordon(tx, [host], now):
        return 0
    return providers.mark_stale_of_hosts(tx, [host], now)


def _log_restart(host: str, endpoint: str | None, previous: store.DaemonRow, now: datetime) -> None:
    seconds = (now - previous["last_seen_at"]).total_seconds()
    LOG.warning(
        "Agent at %s replaces the agent at %s, last seen %.0f s ago. This is normal after "
        "a restart; if it repeats, two agents use the same host name, check [DEFAULT] host",
        endpoint,
        previous["endpoint"],
        seconds,
        host=host,
    )


def _check_versions(versions: Any) -> dict[str, Any]:
    versions = {} if versions is None else versions
    if not isinstance(versions, Mapping) or len(json.dumps(versions)) > MAX_VERSIONS:
        raise Invalid(
            f"versions must be an object of at most {MAX_VERSIONS} characters", field="versions"
        )
    return dict(versions)
