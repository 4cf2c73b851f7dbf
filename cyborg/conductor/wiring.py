# SPDX-License-Identifier: Apache-2.0
"""Construction of the objects of a conductor and of its periodic tasks."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oslo_config import cfg

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.attachments.attachments import Attachments
from cyborg.conductor.attachments.deliveries import GuestDeliveries
from cyborg.conductor.attachments.devices import AttachedDevices
from cyborg.conductor.attachments.ports import GuestPorts
from cyborg.conductor.attachments.runner import AttachmentRunner
from cyborg.conductor.audit.repair import RepairExecutor
from cyborg.conductor.audit.runner import AuditRunner
from cyborg.conductor.binding.arqs import Arqs
from cyborg.conductor.binding.binder import OwnerResolver
from cyborg.conductor.binding.limits import LimitLookup, LimitSource
from cyborg.conductor.common import counts, sweeps
from cyborg.conductor.common.calls import CallRecords
from cyborg.conductor.contexts.device_contexts import DeviceContexts
from cyborg.conductor.contexts.leases import ContextLeases
from cyborg.conductor.custody.sealer import CustodyAnchors, CustodySealer
from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.conductor.drivers.lookup import DriverLookup
from cyborg.conductor.drivers.rollout_controller import RolloutController
from cyborg.conductor.drivers.service import Drivers
from cyborg.conductor.hosts.discoveries import Discoveries
from cyborg.conductor.hosts.failure_detector import FailureDetector
from cyborg.conductor.hosts.heartbeats import Hosts
from cyborg.conductor.hosts.services import HostRemoval, Services
from cyborg.conductor.inventory.devices import Accelerators, Attributes, Devices, Tombstones
from cyborg.conductor.inventory.function_owners import FunctionOwners
from cyborg.conductor.jobs.active_partitions import ActivePartitions
from cyborg.conductor.jobs.completion import JobResult
from cyborg.conductor.jobs.dispatcher import JobDispatcher
from cyborg.conductor.jobs.programming import Partitions, Programs
from cyborg.conductor.jobs.reboot import LostValues
from cyborg.conductor.maintenance.windows import MaintenanceWindows
from cyborg.conductor.notifications.notifications import ArqEventRecorder, NotificationBuilder
from cyborg.conductor.notifications.outbox import (
    DeadLetters,
    OutboxWorker,
    create_nova_worker,
    create_worker,
)
from cyborg.conductor.orphans.collector import OrphanCollector
from cyborg.conductor.orphans.release import OrphanCheck, OrphanReleaser
from cyborg.conductor.orphans.watcher import (
    BATCH_INTERVAL,
    SCAN_INTERVAL,
    DeletionScan,
    InstanceWatcher,
)
from cyborg.conductor.placement.compute_nodes import ComputeNodeWatch
from cyborg.conductor.placement.offers import GroupPlanner
from cyborg.conductor.placement.publisher import Publisher
from cyborg.conductor.placement.verifier import ProviderVerifier
from cyborg.core.placement import round_period
from cyborg.db.clock import INTERVAL
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.agent_api import AgentAPI
from cyborg.rpc.notifications import Notifier
from cyborg.telemetry.recorder import MetricRecorder
from cyborg.threads.periodic import PeriodicTask

# Seconds that an outbox message waits, so that a batch shares the cost of one lease, one call and
# one commit. Nova requests its ARQs before it waits for their events, so it is not delayed. Only a
# boot with host work, which takes longer, waits for the event.
BATCH_DELAY = 0.2

# Seconds between two searches for attachments whose work is due; a search is one statement.
ATTACHMENT_INTERVAL = 1.0


@dataclass(frozen=True, kw_only=True)
class Conductor:
    """Objects of a conductor; its creator starts and stops ``tasks``."""

    accelerators: Accelerators
    active_partitions: ActivePartitions
    arqs: Arqs
    attachments: Attachments
    attachment_runner: AttachmentRunner
    attributes: Attributes
    audits: AuditRunner
    audit_task: PeriodicTask
    custody_sealer: CustodySealer
    dead_letters: DeadLetters
    device_contexts: DeviceContexts
    context_leases: ContextLeases
    device_profiles: DeviceProfiles
    devices: Devices
    discoveries: Discoveries
    driver_lookup: DriverLookup
    drivers: Drivers
    failure_detector: FailureDetector
    function_owners: FunctionOwners
    guest_deliveries: GuestDeliveries
    hosts: Hosts
    instance_watcher: InstanceWatcher | None
    jobs: JobDispatcher
    limits: LimitLookup
    maintenance_windows: MaintenanceWindows
    orphan_collector: OrphanCollector
    outbox_workers: Sequence[OutboxWorker]
    partitions: Partitions
    programs: Programs
    publisher: Publisher
    provider_verifier: ProviderVerifier
    rollouts: RolloutController
    services: Services
    host_removal: HostRemoval
    tasks: Sequence[PeriodicTask]

    def stop(self) -> None:
        """End the running work of each object."""
        for stop in (
            self.arqs.stop,
            self.publisher.stop,
            self.provider_verifier.stop,
            self.discoveries.stop,
            self.driver_lookup.stop,
            self.jobs.stop,
            self.orphan_collector.stop,
            self.audits.stop,
            self.custody_sealer.stop,
            self.attachment_runner.stop,
            self.rollouts.stop,
            *(worker.stop for worker in self.outbox_workers),
            *(watcher.stop for watcher in [self.instance_watcher] if watcher is not None),
        ):
            stop()


def build_conductor(
    conf: cfg.ConfigOpts,
    uow: UnitOfWork,
    agents: AgentAPI,
    placement: Placement,
    nova: Nova,
    notifier: Notifier | None = None,
    limits: LimitSource | None = None,
    metrics: MetricRecorder | None = None,
    call_threads: int = 64,
) -> Conductor:
    """Return a conductor that answers so many calls at the same time.

    ``notifier`` is None if ``conf`` enables no notifications, ``limits`` if it enables no limits.
    ``metrics`` records binds and deliveries.
    """
    options, metrics = conf.conductor, metrics or MetricRecorder()
    notices = NotificationBuilder(conf, now=uow.clock)
    recorder = ArqEventRecorder(conf, notices)
    publishing = placement and placement.with_timeout(options.publish_timeout)
    publisher = Publisher(conf, uow, publishing)

    # A run ends after some seconds even if providers are left: it is woken again.
    def publish() -> None:
        publisher.run_once()
        if publisher.unfinished:
            publisher_task.wake()

    publisher_task = PeriodicTask("publisher", options.publish_interval, publish)
    verifier = ProviderVerifier(conf, uow, publishing, publisher_task.wake)
    # A worker for each destination: listeners that are away must not delay Nova.
    outbox_workers: list[OutboxWorker] = [create_nova_worker(conf, uow, nova, metrics=metrics)]
    outbox_task = _outbox_task("outbox", conf, outbox_workers[0])
    jobs = JobDispatcher(
        conf,
        uow,
        agents,
        recorder,
        lambda result: wake_tasks(result, jobs_task, outbox_task, publisher_task),
        metrics=metrics,
    )
    jobs_task = PeriodicTask("jobs", options.jobs_interval, jobs.run_once)
    # Without Nova there are no allocations, and a request keeps the project of its creation.
    instances = nova if conf.nova.send_events else None
    orphan_collector = OrphanCollector(
        conf,
        uow,
        placement,
        jobs_task.wake,
        notices,
        instances,
        wake_publisher=publisher_task.wake,
    )
    releaser = OrphanReleaser(uow, recorder, jobs_task.wake, uow.clock, publisher_task.wake)
    orphans = OrphanCheck(uow, placement, nova, releaser) if _releases_orphans(conf) else None
    repair = RepairExecutor(
        uow,
        placement,
        publisher_task.wake,
        jobs_task.wake,
        release_timeout=options.release_timeout,
    )
    audits = AuditRunner(conf, uow, agents, placement, instances, repair)
    audit_task = PeriodicTask("audits", options.hello_interval, audits.run_once)
    rollouts = RolloutController(
        conf,
        uow,
        agents,
        notices,
        lambda: rollout_task.wake(),  # noqa: PLW0108  the task is created below
        publisher_task.wake,
    )
    rollout_task = PeriodicTask("rollouts", options.jobs_interval, rollouts.run_once)
    discoveries = Discoveries(conf, uow, agents)
    hosts = Hosts(conf, uow, notices, publisher_task.wake, jobs_task.wake)
    failure_detector = FailureDetector(conf, uow, notices, publisher_task.wake)
    dead_letters = DeadLetters(conf, uow, outbox_task.wake)
    driver_lookup = DriverLookup(conf, uow, agents)
    custody_sealer = CustodySealer(conf, uow)
    partitions = Partitions(conf, uow, jobs_task.wake, publisher_task.wake)
    programs = Programs(conf, uow, notices, jobs_task.wake)
    arqs = Arqs(
        conf,
        uow,
        outbox_task.wake,
        jobs_task.wake,
        None if instances is None else OwnerResolver(placement),
        notices,
        orphans,
        limit_source=limits,
        wake_publisher=publisher_task.wake,
        metrics=metrics,
        call_threads=call_threads,
    )
    contexts = DeviceContexts(conf, uow, placement, notices, arqs=arqs, limit_source=limits)
    context_leases = ContextLeases(conf, uow, arqs, recorder)
    attached_devices = AttachedDevices(
        uow, arqs, limits, jobs_task.wake, outbox_task.wake, uow.clock, GuestPorts(agents)
    )
    attachment_runner = AttachmentRunner(conf, uow, placement, nova, attached_devices)
    attachment_task = PeriodicTask("attachments", ATTACHMENT_INTERVAL, attachment_runner.run_once)
    watcher = _make_watcher(
        conf,
        lambda: InstanceWatcher(uow, placement, nova, releaser, attachment_runner.end_lost),
    )
    windows = MaintenanceWindows(
        conf,
        uow,
        notices,
        publisher_task.wake,
        wake_attachments=attachment_task.wake,
        has_nova=instances is not None,
    )
    services = Services(conf, uow, notices, publisher_task.wake)
    sweep = functools.partial(
        sweeps.run_all,
        {
            "discoveries": discoveries.sweep,
            "hosts": hosts.sweep,
            "heartbeat interval": hosts.interval.sweep,
            "services": services.sweep,
            "failure detector": failure_detector.sweep,
            "tombstones": Tombstones(conf, uow).sweep,
            "device contexts": contexts.sweep,
            "leases of device contexts": context_leases.sweep,
            "call records": CallRecords(conf, uow).sweep,
            "jobs": jobs.sweep,
            "lost layouts and images": LostValues(uow, partitions, programs).sweep,
            "dead letters": dead_letters.sweep,
            "audits": audits.sweep,
            "custody records": custody_sealer.sweep,
            "custody anchors": CustodyAnchors(uow, notices, uow.clock).sweep,
            "attachments": attachment_runner.sweep,
            "maintenance windows": windows.sweep,
            "device sets": GroupPlanner(uow, publisher_task.wake).sweep,
        },
    )
    # A thread each: a task that waits for another service delays no other task.
    tasks = [
        publisher_task,
        PeriodicTask(
            "verification", round_period(options.placement_verify_interval), verifier.run_once
        ),
        outbox_task,
        jobs_task,
        PeriodicTask("sweep", options.hello_interval, sweep),
        audit_task,
        rollout_task,
        attachment_task,
        PeriodicTask("clock", INTERVAL, uow.clock.measure),
        PeriodicTask("custody", options.custody_seal_interval, custody_sealer.run_once),
        PeriodicTask("counts", counts.INTERVAL, counts.CountRecorder(uow).run_once),
        *_watcher_tasks(watcher, uow, nova),
        *_compute_node_tasks(conf, uow, placement, publisher_task.wake),
    ]
    if interval := options.orphan_scan_interval:
        tasks.append(PeriodicTask("orphan scan", interval, orphan_collector.run_once))
    if notifier is not None:
        outbox_workers.append(create_worker(conf, uow, notifier, metrics=metrics))
        tasks.append(_outbox_task("notifications", conf, outbox_workers[-1]))
    return Conductor(
        accelerators=Accelerators(uow),
        active_partitions=ActivePartitions(
            uow, publisher_task.wake, jobs_task.wake, options.release_timeout
        ),
        arqs=arqs,
        attachments=Attachments(
            conf, uow, instances and _shorten(instances, conf), placement, attachment_task.wake
        ),
        attachment_runner=attachment_runner,
        attributes=Attributes(uow),
        audits=audits,
        audit_task=audit_task,
        custody_sealer=custody_sealer,
        dead_letters=dead_letters,
        device_contexts=contexts,
        context_leases=context_leases,
        device_profiles=DeviceProfiles(uow, notices),
        devices=Devices(uow, notices, publisher_task.wake),
        discoveries=discoveries,
        driver_lookup=driver_lookup,
        drivers=Drivers(uow, rollout_task.wake, publisher_task.wake, find=driver_lookup.find),
        failure_detector=failure_detector,
        function_owners=FunctionOwners(uow),
        guest_deliveries=GuestDeliveries(uow, recorder, metrics),
        hosts=hosts,
        instance_watcher=watcher,
        jobs=jobs,
        limits=LimitLookup(conf, limits),
        maintenance_windows=windows,
        orphan_collector=orphan_collector,
        outbox_workers=outbox_workers,
        partitions=partitions,
        programs=programs,
        publisher=publisher,
        provider_verifier=verifier,
        rollouts=rollouts,
        services=services,
        host_removal=HostRemoval(conf, uow, arqs, notices, publisher_task.wake),
        tasks=tasks,
    )


def wake_tasks(
    result: JobResult, jobs: PeriodicTask, outbox: PeriodicTask, publisher: PeriodicTask
) -> None:
    """Wake the tasks that have new work after the end of a job."""
    for task, count in (
        (jobs, result.jobs),
        (outbox, result.events),
        (publisher, result.providers),
    ):
        if count:
            task.wake()


def _releases_orphans(conf: cfg.ConfigOpts) -> bool:
    """Return whether orphans are released; with orphan_grace = 0 they are only shown."""
    return bool(conf.nova.send_events and conf.conductor.orphan_grace != 0)


def _shorten(nova: Nova, conf: cfg.ConfigOpts) -> Nova:
    """Return a client whose two requests end within a call, with time for other work."""
    return nova.with_timeout(conf.rpc.timeout / 4)


def _make_watcher(
    conf: cfg.ConfigOpts, make: Callable[[], InstanceWatcher]
) -> InstanceWatcher | None:
    return make() if _releases_orphans(conf) else None


def _watcher_tasks(
    watcher: InstanceWatcher | None, uow: UnitOfWork, nova: Nova
) -> list[PeriodicTask]:
    if watcher is None:
        return []
    scan = DeletionScan(uow, nova, watcher.check)
    return [
        PeriodicTask("instances", BATCH_INTERVAL, watcher.run_once),
        PeriodicTask("deletion scan", SCAN_INTERVAL, scan.run_once),
    ]


def _compute_node_tasks(
    conf: cfg.ConfigOpts, uow: UnitOfWork, placement: Placement, wake_publisher: Callable[[], None]
) -> list[PeriodicTask]:
    interval = conf.conductor.compute_node_interval
    watch = ComputeNodeWatch(uow, placement, wake_publisher)
    return [PeriodicTask("compute nodes", interval, watch.run_once)] if interval else []


def _outbox_task(name: str, conf: cfg.ConfigOpts, worker: OutboxWorker) -> PeriodicTask:
    interval = conf.conductor.outbox_interval
    return PeriodicTask(name, interval, worker.run_once, batch_delay=BATCH_DELAY)
