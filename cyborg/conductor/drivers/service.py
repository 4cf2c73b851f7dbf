# SPDX-License-Identifier: Apache-2.0
"""Operations on drivers: each request is validated, then recorded as a job with its steps.

The rollout controller runs the job. An uninstallation also cordons the backends of the
driver in the same transaction, so that none of their handles is claimed from then on.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.conductor.drivers import targets
from cyborg.conductor.drivers.targets import BackendTarget, TargetResolver
from cyborg.core.drivers import desired_state
from cyborg.core.drivers.desired_state import DesiredStatus, ManagedOption
from cyborg.core.drivers.rollout import PENDING_STATES, Kind, StepKey
from cyborg.core.errors import Conflict, Invalid, NotFound
from cyborg.core.log import get_logger
from cyborg.core.text import join_limited
from cyborg.core.validation import check_text, parse_uuid
from cyborg.db.backends import desired as desired_backends
from cyborg.db.backends.desired import BackendKey
from cyborg.db.devices import write as devices
from cyborg.db.drivers import rollouts as store
from cyborg.db.jobs import write as job_store
from cyborg.db.providers import write as providers
from cyborg.db.unit_of_work import UnitOfWork

LOG = get_logger(__name__)

# Attempts to record a job while others change the same driver. A retry finds the job of the other
# request, so that a further one is seldom needed.
MAX_ATTEMPTS = 3

# The job of a request: a new one, or the one that is already open for the driver.
OpenJob = store.NewJob | job_store.JobRow


@dataclass(frozen=True)
class Drivers:
    """Operations on drivers and on the devices that they manage.

    ``wake`` is called after the commit of a job, to wake the rollout controller. ``find`` queries
    agents for a driver that their hosts have not reported yet: those of the given hosts, or all.
    """

    uow: UnitOfWork
    wake: Callable[[], None] = lambda: None
    wake_publisher: Callable[[], None] = lambda: None
    find: Callable[[str, Sequence[str] | None], Any] = lambda key, hosts: None

    def install(
        self,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        config: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Enable a driver on hosts; hosts that already have the backend are not changed.

        A request that equals the open job of the driver gets the uuid of this job. Raise Invalid
        and NotFound. Raise Conflict if the driver cannot be imported, if a backend of that name has
        another driver or configuration, and while another job for the driver is open.
        """
        key = check_text("driver", driver)
        name, host_names = targets.read_backend(backend), targets.read_hosts(hosts)
        values = targets.read_config(config)

        def write(tx: sa.Connection) -> str:
            resolver = TargetResolver.of_driver(tx, key)
            # The job first: its unique key excludes other jobs of the driver until the commit.
            job = self._acquire_job(tx, Kind.INSTALL, resolver.driver)
            new_name = name or resolver.driver  # a backend without a name is named as its driver
            present = resolver.backends_by_key(backend=new_name)
            usable = resolver.usable_hosts(host_names, present, new_name)
            options = {each.service_id: resolver.parse(each, values) for each in usable}
            resolver.check_capacity(new_name, usable, present)
            steps: list[store.NewStep] = []
            for host_driver in usable:
                host = host_driver.host
                existing = present.get(BackendKey(host_driver.service_id, new_name))
                state = targets.initial_step_state(
                    resolver.driver, new_name, host, existing, options
                )
                previous = existing.previous if existing else None
                steps.append(store.NewStep(host, new_name, state, previous))
            # Options are parsed alike on all hosts: the result of the first host is used for all.
            first_options = next(iter(options.values()), {})
            arguments = {"backend": new_name, "hosts": host_names, "config": first_options}
            return self._add(tx, job, Kind.INSTALL, resolver.driver, arguments, steps)

        # The package of the driver may have been installed since the last scan of the agents.
        self.find(key, host_names)
        return self._submit(write)

    def update(
        self,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        config: Mapping[str, Any] | None,
        status: str | None,
        reload: bool,
    ) -> dict[str, Any]:
        """Change a driver's backends, one host after another.

        Raise Invalid, NotFound if no host has such a backend, and Conflict while another job for
        the driver is open.
        """
        key = check_text("driver", driver)
        name, host_names = targets.read_backend(backend), targets.read_hosts(hosts)
        values = targets.read_config(config)
        if status not in (None, DesiredStatus.ENABLED, DesiredStatus.DISABLED):
            raise Invalid(
                f"status {str(status)[:40]!r} is neither {DesiredStatus.ENABLED} nor "
                f"{DesiredStatus.DISABLED}",
                field="status",
            )
        if not values and status is None and not reload:
            raise Invalid("nothing to change: expected config, status or reload", field="body")

        def write(tx: sa.Connection) -> str:
            resolver = TargetResolver.of_driver(tx, key)
            job = self._acquire_job(tx, Kind.UPDATE, resolver.driver)
            backends = resolver.backends(host_names, name)
            parsed: dict[str, Any] = {}
            # The driver of each host checks the options; the result is the same on all hosts.
            for service_id in sorted({target.service_id for target in backends}):
                parsed = resolver.parse(resolver.host_drivers[service_id], values, unset=True)
            arguments = {"config": parsed, "status": status, "reload": bool(reload)}
            steps = [target.step() for target in backends]
            return self._add(tx, job, Kind.UPDATE, resolver.driver, arguments, steps)

        return self._submit(write)

    def uninstall(
        self,
        driver: str,
        backend: str | None,
        hosts: Sequence[str] | None,
        drain: bool,
        force: bool,
    ) -> dict[str, Any]:
        """Remove a driver's backends from hosts.

        ``drain`` waits until bound handles are released. ``force`` does not wait for them, nor for
        agents that are down; with ``backend`` and ``hosts`` it also removes a backend of which only
        devices remain. Raise Invalid, NotFound, InUse with the blocking requests, and Conflict if
        an agent is down or while another job for the driver is open.
        """
        key = check_text("driver", driver)
        name, host_names = targets.read_backend(backend), targets.read_hosts(hosts)
        leftover = name if force else None

        def write(tx: sa.Connection) -> str:
            resolver = TargetResolver.of_driver(tx, key, leftover=leftover, hosts=host_names)
            job = self._acquire_job(tx, Kind.UNINSTALL, resolver.driver)
            backends = resolver.backends(host_names, name)
            if force and not isinstance(job, store.NewJob):
                # A second request with force changes the open job: the operator need not cancel it
                # first.
                explicit = host_names is not None or name is not None
                return self._force_removal(
                    tx, job["uuid"], resolver.driver, backends, explicit=explicit
                )
            down = sorted({target.host for target in backends if target.down})
            if down and not force:
                raise Conflict(
                    f"the agents of {join_limited(down, targets.MAX_NAMED)} are down: wait for "
                    "them, or use force to abandon the devices of these hosts",
                    hosts=down[: targets.MAX_NAMED],
                )
            keys = [target.key for target in backends]
            arguments = {"drain": bool(drain), "force": bool(force)}
            steps = [target.step() for target in backends]
            uuid = self._add(tx, job, Kind.UNINSTALL, resolver.driver, arguments, steps)
            # Cordoned before the handles are counted: none can be claimed in between. An error
            # undoes both.
            self._cordon(tx, resolver.driver, backends)
            # A job that drains waits for the handles in use, a forced one removes them.
            if drain or force:
                return uuid
            if in_use := store.count_handles_in_use(tx, keys):
                raise targets.driver_in_use(
                    resolver.driver, in_use, store.holders(tx, keys, targets.MAX_NAMED)
                )
            return uuid

        return self._submit(write, cordons=True)

    def _force_removal(
        self,
        tx: sa.Connection,
        uuid: str,
        driver: str,
        backends: Sequence[BackendTarget],
        *,
        explicit: bool,
    ) -> str:
        """Make an open uninstallation remove these backends without waiting for bound handles.

        Raise Conflict if the job waits for none of these backends. If the operator named the
        backends (``explicit``), also raise Conflict if the job does not wait for all of them.
        """
        job = job_store.lock(tx, uuid)
        if job is None or job["mutex_key"] is None or job["kind"] != Kind.UNINSTALL:
            raise targets.driver_busy(driver, uuid)
        requested = {target.key for target in backends}
        waiting = {
            StepKey(step["host"], step["backend"])
            for step in store.steps_of_job(tx, job["id"])
            if step["state"] in PENDING_STATES
        }
        waits_for_any = bool(requested & waiting)
        waits_for_all = requested <= waiting
        if not waits_for_any or (explicit and not waits_for_all):
            hosts = sorted({key.host for key in requested - waiting})
            others = join_limited(hosts, targets.MAX_NAMED)
            raise targets.driver_busy(
                driver, uuid, f", which does not wait for a backend of {others}"
            )
        # Added to the backends of an earlier request: an operator may force one host after another.
        forced = {StepKey(*pair) for pair in job["arguments"].get("forced", ())}
        arguments = {**job["arguments"], "forced": sorted(forced | (requested & waiting))}
        store.update_arguments(tx, job["id"], arguments, self.uow.clock())
        return uuid

    def adopt(self, host: str, address: str, backend: str, force: bool) -> dict[str, Any]:
        """Make a backend manage a device that its rules exclude.

        With ``force``, the uses of the device by the host are accepted that its driver finds then.
        Raise Invalid, NotFound, and Conflict if the driver has no options to adopt devices.
        """
        return self._manage(
            host=check_text("host", host),
            backend=check_text("backend", backend),
            address=targets.read_address(address),
            option=ManagedOption.ADOPT_IN_USE if force else ManagedOption.ADOPT,
        )

    def release(self, uuid: str) -> dict[str, Any]:
        """Exclude a device from the management of its backend.

        Raise Invalid, NotFound, Conflict, and InUse while a handle of the device is bound or being
        cleaned.
        """
        device = parse_uuid(uuid, "uuid")

        row = self.uow.run(lambda tx: devices.by_uuid(tx, device))
        if row is None:
            raise NotFound(f"no hardware {device}", uuid=device)
        return self._manage(
            host=row["host"],
            backend=row["backend"],
            address=row["address"],
            option=ManagedOption.RELEASE,
            device=device,
        )

    def _manage(
        self,
        host: str,
        backend: str,
        address: str,
        option: ManagedOption,
        device: str | None = None,
    ) -> dict[str, Any]:
        """Start a job that lists an address in an option of a backend; return ``{"uuid": of it}``.

        ``device`` is the uuid of a device that must be unused. Raise as ``adopt`` and ``release``.
        """

        def write(tx: sa.Connection) -> str:
            resolver = TargetResolver.of_backend(tx, host, backend)
            job = self._acquire_job(tx, Kind.UPDATE, resolver.driver)
            # A host has one backend of a name, which ``of_backend`` has found.
            (target,) = resolver.backends([host], backend)
            if device is not None:
                holders = devices.holders(tx, device)
                targets.ensure_unused(
                    holders, devices.count_dirty_handles(tx, device), address, host
                )
            host_driver = resolver.host_drivers[target.service_id]
            if option not in {known.name for known in host_driver.options}:
                raise Conflict(
                    f"driver {resolver.driver} cannot {option.description}: it has no option "
                    f"{option}",
                    driver=resolver.driver,
                )
            # Only a forced adoption has a time: repeating any other change must change nothing.
            is_forced = option is ManagedOption.ADOPT_IN_USE
            adopted_at = self.uow.clock().isoformat(timespec="seconds") if is_forced else ""
            config = desired_state.managed_options(target.config, address, option, adopted_at)
            config = resolver.parse(host_driver, config)
            arguments = {"config": config, "status": None, "reload": False}
            return self._add(tx, job, Kind.UPDATE, resolver.driver, arguments, [target.step()])

        return self._submit(write)

    def _submit(
        self, write: Callable[[sa.Connection], str], *, cordons: bool = False
    ) -> dict[str, Any]:
        """Run the transaction that adds a job, again if another job for the driver came first."""
        # No lock of a driver exists: the unique key of open jobs decides.
        for _ in range(MAX_ATTEMPTS):
            # Another job for the driver may be recorded concurrently; the retry sees it.
            with contextlib.suppress(db_exc.DBDuplicateEntry):
                uuid = self.uow.run_once(write, answer=lambda job: {"uuid": job})
                self.wake()
                if cordons:
                    self.wake_publisher()
                return {"uuid": uuid}
        raise Conflict("another job for the driver is being created, retry")

    def _acquire_job(self, tx: sa.Connection, kind: Kind, driver: str) -> OpenJob:
        """Create a job for a driver, or return the open job of the driver.

        Call this before reading the driver's backends: afterwards no other job can change them.
        """
        open_job = store.find_open(tx, driver)
        return open_job or store.enqueue(tx, kind, driver, {}, self.uow.clock())

    def _add(
        self,
        tx: sa.Connection,
        job: OpenJob,
        kind: Kind,
        driver: str,
        arguments: Mapping[str, Any],
        steps: Sequence[store.NewStep],
    ) -> str:
        """Add the steps to a new job; return the uuid of the job, or of an equal open installation.

        Raise Conflict for any other open job.
        """
        if not isinstance(job, store.NewJob):
            is_same = job["kind"] == kind and job["arguments"] == dict(arguments)
            if is_same and kind is Kind.INSTALL:
                return job["uuid"]
            raise targets.driver_busy(driver, job["uuid"], f" ({job['kind']})")
        store.set_steps(tx, job.id, arguments, steps)
        LOG.info(
            "Driver job (%s) started, %s backends", kind, len(steps), job=job.uuid, driver=driver
        )
        return job.uuid

    def _cordon(self, tx: sa.Connection, driver: str, backends: Sequence[BackendTarget]) -> None:
        keys = [BackendKey(target.service_id, target.backend) for target in backends]
        desired_backends.lock_agents(tx, {target.service_id for target in backends})
        desired_backends.cordon(tx, driver, desired_backends.find(tx, driver=driver), keys)
        hosts = sorted({target.host for target in backends})
        desired_backends.sync_cordon(tx, hosts, self.uow.clock())
        # A server in build gets none of these devices any more: nobody could prepare or clean it.
        devices.end_grace(tx, [target.key for target in backends])
        providers.mark_stale_of_hosts(tx, hosts, self.uow.clock())
