# SPDX-License-Identifier: Apache-2.0
"""The services of a conductor, their periodic tasks, and the handlers of its RPC methods.

The arguments of a handler are unchecked plain values, which the services validate. An error of
``cyborg.core.errors`` is returned to the caller.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oslo_config import cfg

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.arqs.arqs import Arqs
from cyborg.conductor.arqs.orphan_check import OrphanCheck
from cyborg.conductor.arqs.orphan_collector import OrphanCollector
from cyborg.conductor.arqs.orphan_release import OrphanReleaser
from cyborg.conductor.arqs.ownership import OwnerResolver
from cyborg.conductor.audit.repair import RepairExecutor
from cyborg.conductor.audit.runner import AuditRunner
from cyborg.conductor.common.idempotency import CallRecords
from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.conductor.drivers.lookup import DriverLookup
from cyborg.conductor.drivers.rollout_controller import RolloutController
from cyborg.conductor.drivers.service import Drivers
from cyborg.conductor.hosts.discoveries import Discoveries
from cyborg.conductor.hosts.failure_detector import FailureDetector
from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.conductor.hosts.services import Services
from cyborg.conductor.inventory.accelerators import Accelerators
from cyborg.conductor.inventory.attributes import Attributes
from cyborg.conductor.inventory.devices import Devices
from cyborg.conductor.inventory.tombstones import Tombstones
from cyborg.conductor.jobs.completion import JobResult
from cyborg.conductor.jobs.dispatcher import JobDispatcher
from cyborg.conductor.jobs.programming import Programs
from cyborg.conductor.notifications.arq_events import ArqEventRecorder
from cyborg.conductor.notifications.notifications import NotificationBuilder, create_worker
from cyborg.conductor.notifications.outbox import DeadLetters, NovaEventWorker
from cyborg.conductor.notifications.outbox_worker import OutboxWorker
from cyborg.conductor.placement.compute_node_watch import ComputeNodeWatch
from cyborg.conductor.placement.publisher import Publisher
from cyborg.core.errors import Unavailable, is_expected
from cyborg.core.log import get_logger
from cyborg.db.clock import INTERVAL
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.contract import AgentAPI
from cyborg.rpc.notifier import Notifier
from cyborg.threads.periodic import PeriodicTask

LOG = get_logger(__name__)

BATCH_DELAY = 0.05
"""Seconds that an outbox message waits, so that a batch shares the cost of one lease, one call and
one commit. Nova requests its ARQs before it waits for their events, so it is not delayed."""


class Conductor:
    """Services of the conductor, with their periodic tasks.

    The creator of the conductor starts and stops the tasks (``loops``).
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        agents: AgentAPI,
        placement: Placement,
        nova: Nova,
        notifier: Notifier | None = None,
    ) -> None:
        """``notifier`` sends notifications, None if ``conf`` enables none."""
        self.publisher = Publisher(
            conf, uow, placement and placement.with_timeout(conf.conductor.publish_timeout)
        )
        self.outbox = NovaEventWorker(conf, uow, nova)
        publisher_task = PeriodicTask(
            "publisher", conf.conductor.publish_interval, self.publisher.run_once
        )
        outbox_task = PeriodicTask(
            "outbox", conf.conductor.outbox_interval, self.outbox.run_once, batch_delay=BATCH_DELAY
        )
        sweep_task = PeriodicTask("sweep", conf.conductor.hello_interval, self.sweep)
        self.notices = NotificationBuilder(conf, now=uow.clock)
        self.jobs = JobDispatcher(conf, uow, agents, self._wake_tasks, self.notices)
        self._jobs_task = PeriodicTask("jobs", conf.conductor.jobs_interval, self.jobs.run_once)
        self._publisher_task, self._outbox_task = publisher_task, outbox_task
        self.loops: Sequence[PeriodicTask] = (
            publisher_task,
            outbox_task,
            self._jobs_task,
            sweep_task,
        )
        self.orphan_collector = OrphanCollector(
            conf,
            uow,
            placement,
            self._jobs_task.wake,
            self.notices,
            nova if conf.nova.send_events else None,
        )
        if interval := conf.conductor.orphan_scan_interval:
            self.loops = (
                *self.loops,
                PeriodicTask("orphan scan", interval, self.orphan_collector.run_once),
            )
        self.compute_nodes = ComputeNodeWatch(uow, placement, publisher_task.wake)
        if interval := conf.conductor.compute_node_interval:
            compute_node_task = PeriodicTask("compute nodes", interval, self.compute_nodes.run_once)
            self.loops = (*self.loops, compute_node_task)
        self.outbox_workers: list[OutboxWorker] = [self.outbox]
        if notifier is not None:
            notification_worker = create_worker(conf, uow, notifier)
            self.outbox_workers.append(notification_worker)
            notification_task = PeriodicTask(
                "notifications",
                conf.conductor.outbox_interval,
                notification_worker.run_once,
                batch_delay=BATCH_DELAY,
            )
            self.loops = (*self.loops, notification_task)
        self.dead_letters = DeadLetters(conf, uow, outbox_task.wake)
        self.hosts = Hosts(conf, uow, publisher_task.wake, self._jobs_task.wake, self.notices)
        self.services = Services(conf, uow, publisher_task.wake, self.notices)
        self.failure_detector = FailureDetector(conf, uow, publisher_task.wake, self.notices)
        self.tombstones = Tombstones(conf, uow)
        self.call_records = CallRecords(conf, uow)
        self.devices = Devices(uow, publisher_task.wake, self.notices)
        self.discoveries = Discoveries(conf, uow, agents)
        self.accelerators = Accelerators(uow)
        self.attributes = Attributes(uow)
        self.device_profiles = DeviceProfiles(uow, self.notices)
        # Without Nova there are no allocations, and a request keeps the project of its creation.
        owners = OwnerResolver(placement) if conf.nova.send_events else None
        orphans = None
        if conf.nova.send_events and conf.conductor.orphan_grace != 0:
            recorder = ArqEventRecorder(conf, self.notices)
            releaser = OrphanReleaser(uow, recorder, self._jobs_task.wake, uow.clock)
            orphans = OrphanCheck(uow, placement, nova, releaser)
        self.arqs = Arqs(
            conf, uow, outbox_task.wake, self._jobs_task.wake, owners, self.notices, orphans
        )
        self.programs = Programs(conf, uow, self._jobs_task.wake, self.notices)
        self.audits = AuditRunner(
            conf,
            uow,
            agents,
            placement,
            nova if conf.nova.send_events else None,
            RepairExecutor(
                uow, placement, publisher_task.wake, self._jobs_task.wake, now=uow.clock
            ),
        )
        self.rollouts = RolloutController(
            conf, uow, agents, self._wake_rollouts, publisher_task.wake, self.notices
        )
        self._rollout_task = PeriodicTask(
            "rollouts", conf.conductor.jobs_interval, self.rollouts.run_once
        )
        self.driver_lookup = DriverLookup(conf, uow, agents)
        self.drivers = Drivers(
            conf, uow, self._rollout_task.wake, publisher_task.wake, find=self.driver_lookup.find
        )
        self._audit_task = PeriodicTask(
            "audits", conf.conductor.hello_interval, self.audits.run_once
        )
        self.loops = (
            *self.loops,
            self._audit_task,
            self._rollout_task,
            PeriodicTask("clock", INTERVAL, uow.clock.measure),
        )

    @property
    def handlers(self) -> Mapping[str, Callable[..., Any]]:
        """Return the function of each method of ``cyborg.rpc.contract.ConductorAPI``."""
        return {
            "hello": self.hosts.heartbeat,
            "report": self.hosts.report,
            "service_hello": self.hosts.service_heartbeat,
            "device_profile_create": self.device_profiles.create,
            "device_profile_delete": self.device_profiles.delete,
            "accelerator_update": self.accelerators.update,
            "attribute_create": self.attributes.create,
            "attribute_delete": self.attributes.delete,
            "arq_create": self.arqs.create,
            "arq_bind": self.arqs.bind,
            "arq_unbind": self.arqs.unbind,
            "arq_delete": self.arqs.delete,
            "device_set_status": self.devices.set_status,
            "deployable_program": self.programs.start,
            "outbox_retry": self.dead_letters.retry,
            "outbox_delete": self.dead_letters.delete,
            "service_delete": self.services.delete,
            "audit_create": self.create_audit,
            "discovery_create": self.discoveries.create,
            "discovery_done": self.discoveries.complete,
            "driver_install": self.drivers.install,
            "driver_uninstall": self.drivers.uninstall,
            "driver_update": self.drivers.update,
            "hardware_adopt": self.drivers.adopt,
            "hardware_release": self.drivers.release,
            "job_cancel": self.rollouts.cancel,
            "get_desired_backends": self.rollouts.get_desired_state,
            "report_backend_outcomes": self.rollouts.record_outcomes,
            "job_done": self.jobs.complete,
        }

    def sweep(self) -> None:
        """Run the sweep of each service, such as the failure detector.

        Raise the first failure and log each other one. If the database is unavailable, all fail
        alike, and only the first is raised.
        """
        failures: list[tuple[str, Exception]] = []
        for name, sweep in (
            ("discoveries", self.discoveries.sweep),
            ("hosts", self.hosts.sweep),
            ("failure detector", self.failure_detector.sweep),
            ("tombstones", self.tombstones.sweep),
            ("call records", self.call_records.sweep),
            ("jobs", self.jobs.sweep),
            ("dead letters", self.dead_letters.sweep),
            ("audits", self.audits.sweep),
        ):
            try:
                sweep()
            except Exception as exc:  # noqa: BLE001  a failure must not stop the other sweeps
                failures.append((name, exc))
        if failures:
            _, first = failures[0]
            for name, other in failures[1:]:
                if not is_expected(other):
                    LOG.error("Sweep of %s failed", name, exc_info=other)
                elif not (isinstance(first, Unavailable) and isinstance(other, Unavailable)):
                    LOG.warning("Sweep of %s failed, retrying: %s", name, other)
            raise first

    def create_audit(self, host: str | None, repair: bool) -> dict[str, Any]:
        """Enqueue an audit of a host or of all hosts, and start it; return its uuid."""
        audit = self.audits.create(host, repair)
        self._audit_task.wake()
        return audit

    def _wake_rollouts(self) -> None:
        self._rollout_task.wake()

    def _wake_tasks(self, result: JobResult) -> None:
        """Wake the tasks that have new work after the end of a job."""
        for task, count in (
            (self._jobs_task, result.jobs),
            (self._outbox_task, result.events),
            (self._publisher_task, result.providers),
        ):
            if count:
                task.wake()
