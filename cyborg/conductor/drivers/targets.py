# SPDX-License-Identifier: Apache-2.0
"""Hosts where a driver is installed, and the backends that use it: the targets of a change.

Everything is read in a constant number of statements for any number of hosts. Requests are
validated here, and the errors of rejected ones built.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import sqlalchemy as sa

from cyborg.core.address import PciAddress
from cyborg.core.binding.arqs import describe_user
from cyborg.core.drivers import desired_state, registry
from cyborg.core.drivers.desired_state import DesiredStatus
from cyborg.core.drivers.rollout import StepKey, StepState
from cyborg.core.errors import Conflict, InUse, Invalid, NotFound
from cyborg.core.text import join_limited
from cyborg.core.validation import check_text
from cyborg.db.backends import desired as desired_backends
from cyborg.db.backends.desired import BackendKey
from cyborg.db.drivers import write as store
from cyborg.db.drivers.rollouts import HolderRow, NewStep

# Hosts of one request.
MAX_HOSTS = 10_000
# Characters of the options of a request, as JSON.
MAX_CONFIG = 65536
# Hosts, requests or reasons in an error.
MAX_NAMED = 20
# Backends of one host. The margin is for other driver jobs that run at the same time.
MAX_BACKENDS = desired_state.MAX_BACKENDS - 16


@dataclass(frozen=True, slots=True)
class BackendTarget:
    """Backend on one host.

    ``desired`` is its desired status, None if only the host's configuration file has the backend.
    ``previous`` is its desired state before the change (``DesiredBackend`` as plain values), None
    if there is none. ``applied`` is whether the agent has reported that the desired state is
    applied.
    """

    service_id: int
    host: str
    backend: str
    driver: str
    down: bool
    desired: DesiredStatus | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    previous: Mapping[str, Any] | None = None
    applied: bool = True

    @property
    def key(self) -> StepKey:
        """Return the key of the step of a job that changes this backend."""
        return StepKey(self.host, self.backend)

    def step(self) -> NewStep:
        """Return the step of a job that changes this backend."""
        return NewStep(self.host, self.backend, StepState.WAITING, self.previous)


@dataclass(frozen=True, slots=True)
class HostDriver:
    """Driver on one host.

    ``error`` is the reason if the driver cannot be imported on the host. ``installable`` is False
    if the host's configuration does not allow new backends of the driver.
    """

    service_id: int
    host: str
    down: bool
    installed: bool = False
    error: str | None = None
    options: tuple[registry.Option, ...] = ()
    installable: bool = True

    @property
    def usable(self) -> bool:
        """Return whether the driver can be imported on the host."""
        return self.installed and self.error is None

    @property
    def refusal(self) -> str | None:
        """Return why no backend of the driver can be added to the host, None if it is possible."""
        if not self.usable:
            return self.error or "it is not installed"
        if not self.installable:
            return "it is a reference driver, and [agent] allow_reference_drivers is false"
        return None

    def target(self, backend: str, *, driver: str) -> BackendTarget:
        """Return a backend of the host as if it had no desired state."""
        return BackendTarget(self.service_id, self.host, backend, driver, self.down)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A backend of which a host has only devices: the rows of the agents of these hosts.

    The driver of such a backend is not stored.
    """

    backend: str = ""
    agents: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TargetResolver:
    """Resolver of the hosts and backends of one driver, within one transaction.

    Create it with ``of_driver`` or ``of_backend``. ``driver`` is the name of the driver,
    ``host_drivers`` has the driver on each host, by the row id of the agent.
    """

    tx: sa.Connection
    driver: str
    host_drivers: Mapping[int, HostDriver]
    leftover: Leftover = Leftover()

    @classmethod
    def of_driver(
        cls,
        tx: sa.Connection,
        key: str,
        *,
        leftover: str | None = None,
        hosts: Collection[str] | None = None,
    ) -> Self:
        """Return the resolver for a driver by its name or uuid.

        ``leftover``, the name of a backend, adds this backend of those ``hosts`` where only devices
        of it remain: any ``key`` is accepted if there is one. Raise NotFound, with similar names.
        """
        names = store.names(tx)
        # The uuid of a driver follows from its name: no table has it.
        by_uuid = {registry.driver_uuid(name): name for name in names}
        name = key if key in names else by_uuid.get(key.lower())
        leftovers = Leftover()
        if leftover is not None and hosts is not None:
            agents = store.agents_with_leftovers(tx, leftover, hosts)
            leftovers = Leftover(leftover, frozenset(agents))
        # The driver of a leftover is not stored, so that its name cannot be checked.
        if name is None and leftovers.agents:
            name = key
        if name is None:
            raise NotFound(
                registry.describe_unknown(key, names), near=registry.closest_names(key, names)
            )
        return cls(tx, name, _read_host_drivers(tx, name), leftovers)

    @classmethod
    def of_backend(cls, tx: sa.Connection, host: str, backend: str) -> Self:
        """Return the resolver for the driver that a backend of a host uses. Raise NotFound."""
        agents = {row["host"]: row["id"] for row in store.agents(tx)}
        if host not in agents:
            raise _unknown_host([host], agents)
        key = BackendKey(agents[host], backend)
        reported = store.reported_backends(tx, backend=backend)
        stored = desired_backends.find(tx, backend=backend).get(key)
        name = reported.get(key)
        # A desired state has priority: the agent may not have applied it yet.
        if stored is not None and stored.desired.status is not DesiredStatus.ABSENT:
            name = stored.desired.driver
        if name is None:
            raise NotFound(f"host {host} has no backend {backend}", field="backend")
        return cls.of_driver(tx, name)

    def usable_hosts(
        self,
        hosts: Collection[str] | None,
        present: Mapping[BackendKey, BackendTarget],
        backend: str,
    ) -> list[HostDriver]:
        """Return the hosts where the driver can be enabled, among ``hosts`` or all hosts.

        A host that has the backend already (a key of ``present``) needs no permission for a new
        backend. Raise NotFound for a host without an agent. Raise Conflict, with the reasons, if
        the driver cannot be enabled on one of ``hosts``, or on any host.
        """
        usable, refused = list[HostDriver](), list[HostDriver]()
        for candidate in self._select_hosts(hosts):
            key = BackendKey(candidate.service_id, backend)
            exists = candidate.usable and key in present
            if exists or candidate.refusal is None:
                usable.append(candidate)
            else:
                refused.append(candidate)
        # Without a list of hosts, the hosts that cannot use the driver are left out; a named one is
        # an error.
        if (hosts is not None and refused) or not usable:
            reasons = [f"{item.host}: {item.refusal}" for item in refused]
            raise Conflict(
                f"driver {self.driver} cannot be used on {len(refused)} hosts: "
                f"{join_limited(reasons, MAX_NAMED, separator='; ', nouns='hosts')}",
                driver=self.driver,
                hosts=[item.host for item in refused[:MAX_NAMED]],
            )
        return usable

    def parse(
        self, target: HostDriver, config: Mapping[str, Any], *, unset: bool = False
    ) -> dict[str, Any]:
        """Parse options as the driver of a host declares them. Raise Invalid, Conflict.

        With ``unset``, the value None resets an option to the host's configuration file.
        """
        if not config:
            return {}
        if not target.usable:
            raise Conflict(
                f"the options of driver {self.driver} are unknown on host {target.host}: "
                f"{target.error or 'it is not installed there'}",
                host=target.host,
            )
        return registry.parse_values(target.options, config, unset=unset)

    def backends_by_key(
        self, *, driver: str | None = None, backend: str | None = None
    ) -> dict[BackendKey, BackendTarget]:
        """Return the reported and the desired backends.

        With ``driver``, also those that their agents report with it and whose desired state has
        another driver.
        """
        reported = store.reported_backends(self.tx, driver, backend)
        stored = desired_backends.find(self.tx, driver, backend)
        if driver is not None:
            # Without these rows, such a backend would look like one without a desired state.
            stored |= desired_backends.find_successors(self.tx, driver)
        targets: dict[BackendKey, BackendTarget] = {}
        for key in sorted({*reported, *stored}):
            host_driver = self.host_drivers.get(key.service_id)
            if host_driver is None:
                continue  # the agent was added after the hosts were read
            # Only in the configuration file of the host, unless there is a desired state.
            target = host_driver.target(key.backend, driver=reported.get(key, ""))
            if (row := stored.get(key)) is not None:
                target = replace(
                    target,
                    driver=row.desired.driver,
                    desired=row.desired.status,
                    config=row.desired.config,
                    previous=row.desired.to_dict(),
                    applied=row.applied,
                )
            targets[key] = target
        return targets

    def backends(self, hosts: Collection[str] | None, backend: str | None) -> list[BackendTarget]:
        """Return the driver's backends on hosts, sorted. Raise NotFound if there are none."""
        selected = {host_driver.service_id for host_driver in self._select_hosts(hosts)}
        # Of a backend that has got another driver, ``backends_by_key`` returns the new one.
        targets = [
            target
            for key, target in self.backends_by_key(driver=self.driver).items()
            if key.service_id in selected
            and backend in (None, key.backend)
            and target.desired is not DesiredStatus.ABSENT
            and target.driver == self.driver
        ]
        # Of a backend that the agents no longer report, only devices are left.
        targets += [
            host_driver.target(self.leftover.backend, driver=self.driver)
            for host_driver in self.host_drivers.values()
            if host_driver.service_id in self.leftover.agents & selected
        ]
        if not targets:
            suffix = "" if hosts is None else f" of {join_limited(sorted(hosts), MAX_NAMED)}"
            missing = "backend" if backend is None else f"backend {backend}"
            raise NotFound(f"driver {self.driver} has no {missing}{suffix}", driver=self.driver)
        return sorted(targets, key=lambda target: (target.host, target.backend))

    def check_capacity(
        self,
        backend: str,
        host_drivers: Sequence[HostDriver],
        present: Mapping[BackendKey, BackendTarget],
    ) -> None:
        """Raise Conflict if a host would have more backends than an agent accepts."""
        # Only new rows of desired states count: a backend that is only in the configuration file of
        # the host has none yet.
        hosts: dict[int, str] = {}
        for item in host_drivers:
            target = present.get(BackendKey(item.service_id, backend))
            if target is None or target.previous is None:
                hosts[item.service_id] = item.host
        if full := sorted(
            hosts[id_] for id_ in desired_backends.agents_at_limit(self.tx, hosts, MAX_BACKENDS)
        ):
            raise Conflict(
                f"{join_limited(full, MAX_NAMED)}: limit of {MAX_BACKENDS} backend names is "
                "reached; reuse a name of the host, such as that of an uninstalled backend",
                hosts=full[:MAX_NAMED],
            )

    def _select_hosts(self, hosts: Collection[str] | None) -> list[HostDriver]:
        all_hosts = sorted(self.host_drivers.values(), key=lambda item: item.host)
        if hosts is None:
            return all_hosts
        names = {item.host for item in all_hosts}
        if unknown := sorted(set(hosts) - names):
            raise _unknown_host(unknown, names)
        return [item for item in all_hosts if item.host in set(hosts)]


def _read_host_drivers(tx: sa.Connection, driver: str) -> dict[int, HostDriver]:
    """Return a driver on each host with an agent, by the row id of the agent."""
    installations = store.installations(tx, driver)
    host_drivers: dict[int, HostDriver] = {}
    for agent in store.agents(tx):
        id_ = agent["id"]
        host = agent["host"]
        down = agent["down_since"] is not None
        if (row := installations.get(id_)) is None:
            host_drivers[id_] = HostDriver(id_, host, down, installable=False)
            continue
        host_drivers[id_] = HostDriver(
            id_,
            host,
            down,
            installed=True,
            error=row["error"],
            options=tuple(registry.Option.from_dict(body) for body in row["options"]),
            installable=row["installable"],
        )
    return host_drivers


def _unknown_host(unknown: Sequence[str], names: Collection[str]) -> NotFound:
    near = registry.closest_names(unknown[0], names)
    message = f"no agent on host {unknown[0][:255]!r}{registry.format_hint(near)}"
    return NotFound(message, field="hosts", near=near)


def initial_step_state(
    driver: str, backend: str, host: str, existing: BackendTarget | None, parsed: Mapping[int, Any]
) -> StepState:
    """Return the first state of an installation step on a host. Raise Conflict.

    ``existing`` is the backend if the host has it; ``parsed`` is the requested configuration by
    the agent's row id. Options that are not requested may have any value.
    """
    if existing is None or existing.desired is DesiredStatus.ABSENT:
        return StepState.WAITING
    if existing.driver != driver:
        raise Conflict(
            f"backend {backend} of host {host} has driver {existing.driver}; choose another name",
            host=host,
            driver=existing.driver,
        )
    config, requested = existing.config, parsed[existing.service_id]
    if any(name not in config or config[name] != requested[name] for name in requested):
        raise Conflict(
            f"backend {backend} of host {host} already exists with another configuration; use "
            "update-driver to change it",
            host=host,
        )
    # A desired state that the agent could not apply, or has not received, is requested again.
    done = existing.applied and existing.desired is not DesiredStatus.DISABLED
    return StepState.DONE if done else StepState.WAITING


def driver_busy(driver: str, job: str, details: str = "") -> Conflict:
    """Return the error for a driver that another job is changing."""
    return Conflict(f"driver {driver} is being changed: wait for job {job}{details}", job=job)


def driver_in_use(
    driver: str, in_use: Mapping[StepKey, int], holders: Sequence[HolderRow]
) -> InUse:
    """Return the error for a driver whose accelerators are in use.

    ``in_use`` counts the handles of each backend; ``holders`` are some of the ARQs that own them.
    """
    names = [f"{row['uuid']} ({describe_user(row['instance_uuid'])})" for row in holders]
    total = sum(in_use.values())
    users = f", by {join_limited(names, MAX_NAMED, total)}" if names else ""
    return InUse(
        f"driver {driver} cannot be uninstalled: {total} accelerators are in use or being cleaned"
        f"{users}; drain waits for them, force does not",
        requests=[row["uuid"] for row in holders],
    )


def ensure_unused(holders: Sequence[str], dirty: int, address: str, host: str) -> None:
    """Raise InUse if ARQs own handles of the device, or if handles of it are being cleaned.

    ``holders`` are the uuids of these ARQs, ``dirty`` is the number of handles to be cleaned.
    """
    if not holders and not dirty:
        return
    reason = f"{dirty} of its handles are being cleaned"
    if holders:
        reason = f"its holders are {join_limited(holders, MAX_NAMED)}"
    raise InUse(
        f"device {address} of {host} cannot be released: {reason}",
        requests=holders[:MAX_NAMED],
    )


def read_backend(backend: Any) -> str | None:
    """Return the name of a backend, or None. Raise Invalid."""
    return None if backend is None else desired_state.parse_backend_name(backend)


def read_hosts(hosts: Any) -> list[str] | None:
    """Return the sorted unique names of hosts, None for all hosts. Raise Invalid."""
    if hosts is None:
        return None
    if not isinstance(hosts, list | tuple) or not 1 <= len(hosts) <= MAX_HOSTS:
        raise Invalid(f"hosts must be a list of 1 to {MAX_HOSTS} names", field="hosts")
    return sorted({check_text("hosts", host) for host in hosts})


def read_config(config: Any) -> Mapping[str, Any]:
    """Return options and their values, which only a driver can validate. Raise Invalid."""
    if config is None:
        return {}
    # Only the size is checked here: what a value may be is known to the drivers of the hosts.
    if not isinstance(config, Mapping) or len(str(config)) > MAX_CONFIG:
        raise Invalid(
            f"config must be an object of at most {MAX_CONFIG} characters", field="config"
        )
    return config


def read_address(address: Any) -> str:
    """Return the address of a device as drivers write it. Raise Invalid."""
    text = check_text("address", address, 120)
    try:
        return str(PciAddress.parse(text))
    except Invalid:
        return text  # the address of a device on another bus
