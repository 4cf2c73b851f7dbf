# SPDX-License-Identifier: Apache-2.0
"""Construction of the objects of a conductor and of its periodic tasks."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

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
from cyborg.conductor.common import sweeps
from cyborg.conductor.common.idempotency import CallRecords
from cyborg.conductor.custody.sealer import CustodySealer
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
from cyborg.conductor.jobs.partitioning import Partitions
from cyborg.conductor.jobs.programming import Programs
from cyborg.conductor.jobs.reapply import LostValues
from cyborg.conductor.notifications.arq_events import ArqEventRecorder
from cyborg.conductor.notifications.notifications import NotificationBuilder, create_worker
from cyborg.conductor.notifications.outbox import DeadLetters, create_nova_worker
from cyborg.conductor.notifications.outbox_worker import OutboxWorker
from cyborg.conductor.placement.compute_node_watch import ComputeNodeWatch
from cyborg.conductor.placement.publisher import Publisher
from cyborg.db.clock import INTERVAL
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.contract import AgentAPI
from cyborg.rpc.notifier import Notifier
from cyborg.threads.periodic import PeriodicTask

BATCH_DELAY = 0.05
"""Seconds that an outbox message waits, so that a batch shares the cost of one lease, one call and
one commit. Nova requests its ARQs before it waits for their events, so it is not delayed."""


@dataclass(frozen=True, kw_only=True)
class Conductor:
    """Objects of a conductor; its creator starts and stops ``tasks``."""

    accelerators: Accelerators
    arqs: Arqs
    attributes: Attributes
    audits: AuditRunner
    audit_task: PeriodicTask
    custody_sealer: CustodySealer
    dead_letters: DeadLetters
    device_profiles: DeviceProfiles
    devices: Devices
    discoveries: Discoveries
    driver_lookup: DriverLookup
    drivers: Drivers
    failure_detector: FailureDetector
    hosts: Hosts
    jobs: JobDispatcher
    orphan_collector: OrphanCollector
    outbox_workers: Sequence[OutboxWorker]
    partitions: Partitions
    programs: Programs
    publisher: Publisher
    rollouts: RolloutController
    services: Services
    tasks: Sequence[PeriodicTask]

    def stop(self) -> None:
        """End the running work of each object."""
        for stop in (
            self.publisher.stop,
            self.discoveries.stop,
            self.driver_lookup.stop,
            self.jobs.stop,
            self.orphan_collector.stop,
            self.audits.stop,
            self.custody_sealer.stop,
            self.rollouts.stop,
            *(worker.stop for worker in self.outbox_workers),
        ):
            stop()


def build_conductor(
    conf: cfg.ConfigOpts,
    uow: UnitOfWork,
    agents: AgentAPI,
    placement: Placement,
    nova: Nova,
    notifier: Notifier | None = None,
) -> Conductor:
    """Return a conductor; ``notifier`` is None if ``conf`` enables no notifications."""
    options = conf.conductor
    notices = NotificationBuilder(conf, now=uow.clock)
    publisher = Publisher(conf, uow, placement and placement.with_timeout(options.publish_timeout))

    def publish() -> None:
        publisher.run_once()
        if publisher.unfinished:
            publisher_task.wake()

    publisher_task = PeriodicTask("publisher", options.publish_interval, publish)
    outbox_workers: list[OutboxWorker] = [create_nova_worker(conf, uow, nova)]
    outbox_task = _outbox_task("outbox", conf, outbox_workers[0])
    jobs = JobDispatcher(
        conf,
        uow,
        agents,
        lambda result: wake_tasks(result, jobs_task, outbox_task, publisher_task),
        notices,
    )
    jobs_task = PeriodicTask("jobs", options.jobs_interval, jobs.run_once)
    # Without Nova there are no allocations, and a request keeps the project of its creation.
    instances = nova if conf.nova.send_events else None
    orphan_collector = OrphanCollector(conf, uow, placement, jobs_task.wake, notices, instances)
    orphans = None
    if instances is not None and options.orphan_grace != 0:
        recorder = ArqEventRecorder(conf, notices)
        releaser = OrphanReleaser(uow, recorder, jobs_task.wake, uow.clock)
        orphans = OrphanCheck(uow, placement, instances, releaser)
    repair = RepairExecutor(
        uow,
        placement,
        publisher_task.wake,
        jobs_task.wake,
        now=uow.clock,
        release_timeout=options.release_timeout,
    )
    audits = AuditRunner(conf, uow, agents, placement, instances, repair)
    audit_task = PeriodicTask("audits", options.hello_interval, audits.run_once)
    rollouts = RolloutController(
        conf,
        uow,
        agents,
        lambda: rollout_task.wake(),  # noqa: PLW0108  the task is created below
        publisher_task.wake,
        notices,
    )
    rollout_task = PeriodicTask("rollouts", options.jobs_interval, rollouts.run_once)
    discoveries = Discoveries(conf, uow, agents)
    hosts = Hosts(conf, uow, publisher_task.wake, jobs_task.wake, notices)
    failure_detector = FailureDetector(conf, uow, publisher_task.wake, notices)
    dead_letters = DeadLetters(conf, uow, outbox_task.wake)
    driver_lookup = DriverLookup(conf, uow, agents)
    custody_sealer = CustodySealer(conf, uow)
    partitions = Partitions(conf, uow, jobs_task.wake, publisher_task.wake)
    programs = Programs(conf, uow, jobs_task.wake, notices)
    sweep = functools.partial(
        sweeps.run_all,
        {
            "discoveries": discoveries.sweep,
            "hosts": hosts.sweep,
            "failure detector": failure_detector.sweep,
            "tombstones": Tombstones(conf, uow).sweep,
            "call records": CallRecords(conf, uow).sweep,
            "jobs": jobs.sweep,
            "lost layouts and images": LostValues(uow, partitions, programs).sweep,
            "dead letters": dead_letters.sweep,
            "audits": audits.sweep,
            "custody records": custody_sealer.sweep,
        },
    )
    tasks = [
        publisher_task,
        outbox_task,
        jobs_task,
        PeriodicTask("sweep", options.hello_interval, sweep),
        audit_task,
        rollout_task,
        PeriodicTask("clock", INTERVAL, uow.clock.measure),
        PeriodicTask("custody", options.custody_seal_interval, custody_sealer.run_once),
    ]
    if interval := options.orphan_scan_interval:
        tasks.append(PeriodicTask("orphan scan", interval, orphan_collector.run_once))
    if interval := options.compute_node_interval:
        watch = ComputeNodeWatch(uow, placement, publisher_task.wake)
        tasks.append(PeriodicTask("compute nodes", interval, watch.run_once))
    if notifier is not None:
        outbox_workers.append(create_worker(conf, uow, notifier))
        tasks.append(_outbox_task("notifications", conf, outbox_workers[-1]))
    return Conductor(
        accelerators=Accelerators(uow),
        arqs=Arqs(
            conf,
            uow,
            outbox_task.wake,
            jobs_task.wake,
            None if instances is None else OwnerResolver(placement),
            notices,
            orphans,
        ),
        attributes=Attributes(uow),
        audits=audits,
        audit_task=audit_task,
        custody_sealer=custody_sealer,
        dead_letters=dead_letters,
        device_profiles=DeviceProfiles(uow, notices),
        devices=Devices(uow, publisher_task.wake, notices),
        discoveries=discoveries,
        driver_lookup=driver_lookup,
        drivers=Drivers(conf, uow, rollout_task.wake, publisher_task.wake, find=driver_lookup.find),
        failure_detector=failure_detector,
        hosts=hosts,
        jobs=jobs,
        orphan_collector=orphan_collector,
        outbox_workers=outbox_workers,
        partitions=partitions,
        programs=programs,
        publisher=publisher,
        rollouts=rollouts,
        services=Services(conf, uow, publisher_task.wake, notices),
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


def _outbox_task(name: str, conf: cfg.ConfigOpts, worker: OutboxWorker) -> PeriodicTask:
    interval = conf.conductor.outbox_interval
    return PeriodicTask(name, interval, worker.run_once, batch_delay=BATCH_DELAY)
