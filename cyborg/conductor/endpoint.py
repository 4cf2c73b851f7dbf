# SPDX-License-Identifier: Apache-2.0
"""The conductor's side of the bus: one method for each message, each the matter of one room.

Arguments are plain values that may hold anything; the rooms check them. What a method raises of
``cyborg.core.errors`` travels back to the caller. This is version 1.0 of the internal contract.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from oslo_config import cfg
from oslo_utils import timeutils

from cyborg.clients.nova import Nova
from cyborg.clients.placement import Placement
from cyborg.conductor.accelerators import Accelerators
from cyborg.conductor.attributes import Attributes
from cyborg.conductor.audit_repairs import Repairs
from cyborg.conductor.audit_sides import Agents as Seers
from cyborg.conductor.audits import Audits
from cyborg.conductor.delivery import Delivery
from cyborg.conductor.departed import Departed
from cyborg.conductor.device_profiles import DeviceProfiles
from cyborg.conductor.devices import Devices
from cyborg.conductor.discoveries import Agents, Discoveries
from cyborg.conductor.drivers import Drivers
from cyborg.conductor.hosts import Hosts
from cyborg.conductor.jobs import Agents as Workers
from cyborg.conductor.jobs import Jobs
from cyborg.conductor.liveness import Watch
from cyborg.conductor.notices import Notices, delivery
from cyborg.conductor.nudges import Agents as Changers
from cyborg.conductor.outbox import DeadLetters, Outbox
from cyborg.conductor.outcomes import Settled
from cyborg.conductor.owners import Owners
from cyborg.conductor.periodic import Loop
from cyborg.conductor.programs import Programs
from cyborg.conductor.publisher import Publisher
from cyborg.conductor.reconciler import Reconciler
from cyborg.conductor.requests import Requests
from cyborg.conductor.rollouts import Rollouts
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.rpc.notifier import Notifier

Plain = Mapping[str, Any]

LINGER = 0.05
"""Seconds that a message waits for others to leave with it: what one lease, one call and one commit
cost is shared. Nova asks for its ARQs before it waits for their events, so nobody is held up."""


class AllAgents(Agents, Workers, Seers, Changers, Protocol):
    """What the rooms ask agents: ``cyborg.rpc.agent.AgentClient``."""


class Conductor:
    """All rooms of the conductor, and the loops that do what these have promised.

    The loops are not running: whoever builds a conductor starts and stops them. ``ctxt`` is the
    request context of the caller; it says who asked, for the log.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        uow: UnitOfWork,
        agents: AllAgents,
        placement: Placement,
        nova: Nova,
        notifier: Notifier | None = None,
    ) -> None:
        """``notifier`` is what the notifications leave by that ``conf`` asks for."""
        self.publisher = Publisher(conf, uow, placement)
        self.outbox = Outbox(conf, uow, nova)
        publishing = Loop("publisher", conf.conductor.publish_interval, self.publisher.run_once)
        delivering = Loop(
            "outbox", conf.conductor.outbox_interval, self.outbox.run_once, linger=LINGER
        )
        sweeping = Loop("sweep", conf.conductor.hello_interval, self.sweep)
        self.notices = Notices(conf)
        self.jobs = Jobs(conf, uow, agents, self._settled, self.notices)
        self._working = Loop("jobs", conf.conductor.jobs_interval, self.jobs.run_once)
        self._publishing, self._delivering = publishing, delivering
        self.loops: Sequence[Loop] = (publishing, delivering, self._working, sweeping)
        self.reconciler = Reconciler(conf, uow, placement, self._working.wake, self.notices)
        if interval := conf.conductor.reconcile_interval:
            self.loops = (*self.loops, Loop("reconciler", interval, self.reconciler.run_once))
        self.notices = Notices(conf)
        self.deliveries: list[Delivery] = [self.outbox]
        if notifier is not None:
            told = delivery(conf, uow, notifier)
            self.deliveries.append(told)
            telling = Loop("notices", conf.conductor.outbox_interval, told.run_once, linger=LINGER)
            self.loops = (*self.loops, telling)
        self.dead_letters = DeadLetters(conf, uow, delivering.wake)
        self.hosts = Hosts(conf, uow, publishing.wake, self._working.wake, self.notices)
        self.watch = Watch(conf, uow, publishing.wake, self.notices)
        self.departed = Departed(conf, uow)
        self.devices = Devices(uow, publishing.wake, self.notices)
        self.discoveries = Discoveries(conf, uow, agents)
        self.accelerators = Accelerators(uow)
        self.attributes = Attributes(uow)
        self.device_profiles = DeviceProfiles(uow, self.notices)
        # Without Nova nobody allocates, and a request stays with whom it was made for.
        owners = Owners(placement) if conf.nova.notify else None
        self.requests = Requests(
            conf, uow, delivering.wake, self._working.wake, owners, self.notices
        )
        self.programs = Programs(conf, uow, self._working.wake, self.notices)
        self.audits = Audits(
            conf,
            uow,
            agents,
            placement,
            nova if conf.nova.notify else None,
            Repairs(uow, placement, publishing.wake, self._working.wake, now=timeutils.utcnow),
        )
        self.rollouts = Rollouts(conf, uow, agents, self._next_turn, publishing.wake, self.notices)
        self._rolling = Loop("rollouts", conf.conductor.jobs_interval, self.rollouts.run_once)
        self.drivers = Drivers(conf, uow, self._rolling.wake, publishing.wake)
        self._auditing = Loop("audits", conf.conductor.hello_interval, self.audits.run_once)
        self.loops = (*self.loops, self._auditing, self._rolling)

    def sweep(self) -> None:
        """Finish what nobody else would: open discoveries, drained things that are free, jobs.

        See also who has fallen silent.
        """
        failures: list[Exception] = []
        for room in (
            self.discoveries,
            self.hosts,
            self.watch,
            self.departed,
            self.jobs,
            self.dead_letters,
            self.audits,
        ):
            try:
                room.sweep()
            except Exception as bad:  # noqa: BLE001  one room that fails keeps no other from its work
                failures.append(bad)
        if failures:
            raise failures[0]

    def _next_turn(self) -> None:
        self._rolling.wake()

    def _settled(self, settled: Settled) -> None:
        """Have done what the outcome of a job calls for."""
        for loop, work in (
            (self._working, settled.jobs),
            (self._delivering, settled.events),
            (self._publishing, settled.providers),
        ):
            if work:
                loop.wake()

    def hello(
        self,
        ctxt: Any,
        host: str,
        epoch: str,
        endpoint: str | None,
        status: str,
        drivers: Sequence[Plain],
        digest: str | None,
        versions: Plain | None,
        wanted: int | None = None,
    ) -> dict[str, Any]:
        """An agent is alive; the answer says when to come again and whether to report."""
        return self.hosts.hello(host, epoch, endpoint, status, drivers, digest, versions, wanted)

    def report(self, ctxt: Any, report: Plain) -> dict[str, Any]:
        """An agent tells everything its host has."""
        return self.hosts.report(report)

    def service_hello(
        self, ctxt: Any, binary: str, host: str, epoch: str, versions: Plain | None
    ) -> dict[str, Any]:
        """A daemon other than an agent is alive; the answer says when to come again."""
        return self.hosts.service_hello(binary, host, epoch, versions)

    def device_profile_create(self, ctxt: Any, profile: Plain) -> dict[str, Any]:
        """Make a device profile; the answer is its row."""
        return self.device_profiles.create(profile)

    def device_profile_delete(self, ctxt: Any, keys: Sequence[str]) -> None:
        """Delete device profiles by uuid or name, all or none."""
        self.device_profiles.delete(keys)

    def accelerator_update(
        self, ctxt: Any, uuid: str, label: Plain, scope: str | None
    ) -> dict[str, Any]:
        """Label an accelerator; the answer is its row."""
        return self.accelerators.update(uuid, label, scope)

    def attribute_create(self, ctxt: Any, deployable: str, key: str, value: str) -> dict[str, Any]:
        """Give an attribute to a deployable; the answer is its row."""
        return self.attributes.create(deployable, key, value)

    def attribute_delete(self, ctxt: Any, uuid: str) -> None:
        """Take an operator's attribute away."""
        self.attributes.delete(uuid)

    def arq_create(
        self, ctxt: Any, device_profile_name: str, project_id: str | None
    ) -> dict[str, Any]:
        """Make the accelerator requests of a profile; the answer holds their rows as ``arqs``."""
        return self.requests.create(device_profile_name, project_id)

    def arq_patch(
        self,
        ctxt: Any,
        wishes: Sequence[Plain],
        verb: str,
        scope: str | None,
        project: str | None = None,
    ) -> None:
        """Bind or unbind accelerator requests, all or none."""
        self.requests.patch(wishes, verb, scope, project)

    def arq_delete(
        self,
        ctxt: Any,
        uuids: Sequence[str] | None,
        instance: str | None,
        scope: str | None,
        bound_too: bool,
    ) -> None:
        """Delete accelerator requests by uuid or by instance."""
        self.requests.delete(uuids, instance, scope, bound_too)

    def device_set_status(self, ctxt: Any, uuid: str, status: str) -> None:
        """Open a device to new requests, or close it."""
        self.devices.set_status(uuid, status)

    def deployable_program(self, ctxt: Any, uuid: str, image_uuid: str) -> None:
        """Have an image loaded into a deployable."""
        self.programs.start(uuid, image_uuid)

    def outbox_retry(self, ctxt: Any, uuid: str) -> None:
        """Have a dead message of the outbox delivered after all."""
        self.dead_letters.retry(uuid)

    def outbox_delete(self, ctxt: Any, uuid: str) -> None:
        """Forget a dead message of the outbox."""
        self.dead_letters.delete(uuid)

    def audit_create(self, ctxt: Any, host: str | None, repair: bool) -> dict[str, Any]:
        """Have a host or all be audited; the answer is the audit's uuid."""
        made = self.audits.create(host, repair)
        self._auditing.wake()
        return made

    def discovery_create(
        self, ctxt: Any, host: str | None = None, driver: str | None = None
    ) -> dict[str, Any]:
        """Have backends look again; the answer is the discovery's uuid."""
        return self.discoveries.create(host, driver)

    def discovery_done(
        self, ctxt: Any, discovery_id: str, host: str, drivers: Sequence[Plain]
    ) -> None:
        """An agent tells how a discovery ended."""
        self.discoveries.done(discovery_id, host, drivers)

    def driver_install(
        self,
        ctxt: Any,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        config: Plain | None,
    ) -> dict[str, Any]:
        """Enable a driver on hosts; the answer is the job's uuid."""
        return self.drivers.install(driver, backend, hosts, config)

    def driver_uninstall(
        self,
        ctxt: Any,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        drain: bool,
        force: bool,
    ) -> dict[str, Any]:
        """Have hosts give up a driver's backends; the answer is the job's uuid."""
        return self.drivers.uninstall(driver, backend, hosts, drain, force)

    def driver_update(
        self,
        ctxt: Any,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        config: Plain | None,
        wish: str | None,
        reload: bool,
    ) -> dict[str, Any]:
        """Change a driver's backends, one host after another; the answer is the job's uuid."""
        return self.drivers.update(driver, backend, hosts, config, wish, reload)

    def hardware_adopt(self, ctxt: Any, host: str, address: str, backend: str) -> dict[str, Any]:
        """Have a backend manage a device; the answer is the job's uuid."""
        return self.drivers.adopt(host, address, backend)

    def hardware_release(self, ctxt: Any, uuid: str) -> dict[str, Any]:
        """Have a device's backend leave it alone; the answer is the job's uuid."""
        return self.drivers.release(uuid)

    def job_cancel(self, ctxt: Any, uuid: str) -> None:
        """Have a job about a driver begin nothing more."""
        self.rollouts.cancel(uuid)

    def backends_wanted(self, ctxt: Any, host: str, epoch: str) -> dict[str, Any]:
        """An agent asks what is wanted of its host."""
        return self.rollouts.wanted(host, epoch)

    def backends_applied(
        self, ctxt: Any, host: str, epoch: str, revision: int, outcomes: Sequence[Plain]
    ) -> None:
        """An agent tells what became of what was wanted."""
        self.rollouts.applied(host, epoch, revision, outcomes)

    def job_done(self, ctxt: Any, job: str, host: str, state: str, error: str | None) -> None:
        """An agent tells how a job ended."""
        self.jobs.done(job, host, state, error)
