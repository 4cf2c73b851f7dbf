# SPDX-License-Identifier: Apache-2.0
"""Snapshots of the four sources of one host, as values that an audit compares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cyborg.core.binding.states import ArqState
from cyborg.core.placement.provider_tree import Provider
from cyborg.core.wire.hardware import Hardware

SETTLE_TIME = timedelta(seconds=60)
"""A change within this time may be in flight and is skipped."""

_BUSY = frozenset({"BUILD", "MIGRATING", "REBUILD", "RESIZE", "REVERT_RESIZE", "VERIFY_RESIZE"})
_DELETED = frozenset({"DELETED"})


@dataclass(frozen=True, slots=True)
class HandleRecord:
    """An attach handle of the database; ``owner`` is the uuid of its ARQ.

    ``cleaning`` is set if an open job cleans the handle.
    """

    id: int
    address: str
    draining: bool = False
    needs_cleaning: bool = False
    cleaning: bool = False
    owner: str | None = None
    owner_state: ArqState | None = None
    owner_provider: str | None = None

    @property
    def in_use(self) -> bool:
        """Return whether the handle has an owner, or must be cleaned after the last owner."""
        return self.owner is not None or self.needs_cleaning


@dataclass(frozen=True, slots=True)
class DeployableRecord:
    """A deployable of the database; ``provider`` is its resource provider's uuid."""

    address: str
    resource_class: str
    provider: str
    name: str
    draining: bool = False
    programming: bool = False
    handles: tuple[HandleRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """A device of the database."""

    address: str
    backend: str
    draining: bool = False
    deployables: tuple[DeployableRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class ProviderRecord:
    """State of a resource provider in the publisher."""

    uuid: str
    name: str
    stale_since: datetime | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ArqRecord:
    """An ARQ that owns, or should own, a handle. ``updated_at`` is its last change.

    ``instance`` is empty under the lease of a device context, and for a host; in this case
    ``attachment`` is the uuid of the attachment to the host.
    """

    id: int
    uuid: str
    state: ArqState
    hostname: str
    provider: str
    instance: str
    updated_at: datetime
    has_handle: bool = True
    orphan_since: datetime | None = None
    attachment: str = ""

    @property
    def consumer(self) -> str:
        """Return the consumer of the ARQ's allocation; empty under a lease."""
        return self.instance or self.attachment

    def is_settled(self, now: datetime) -> bool:
        """Return whether the ARQ is bound and did not change within SETTLE_TIME."""
        return self.state is ArqState.BOUND and now - self.updated_at >= SETTLE_TIME


@dataclass(frozen=True, slots=True)
class DatabaseSnapshot:
    """Records of the database; ``providers`` by uuid."""

    devices: tuple[DeviceRecord, ...] = ()
    providers: Mapping[str, ProviderRecord] = field(default_factory=dict)
    arqs: tuple[ArqRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacementSnapshot:
    """Providers of this service in Placement, below one compute node, and their allocated units.

    ``missing`` is the reason why there is no compute node. ``actual`` and ``consumers`` are by
    provider uuid. Allocations of a provider that is not in ``consumers`` were not read.
    """

    missing: str | None = None
    actual: Mapping[str, Provider] = field(default_factory=dict)
    consumers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Instance:
    """A server as Nova shows it.

    ``host`` and ``node`` are None for a server without a host. ``host_visible`` is False if Nova
    does not show hosts to our user. ``task`` is Nova's task state.
    """

    uuid: str
    status: str
    host: str | None = None
    node: str | None = None
    task: str | None = None
    host_visible: bool = True

    @property
    def busy(self) -> bool:
        """Return whether Nova is creating, moving or deleting the server."""
        return self.task is not None or self.status in _BUSY

    @property
    def deleted(self) -> bool:
        """Return whether the server is deleted."""
        return self.status in _DELETED

    @property
    def offloaded(self) -> bool:
        """Return whether the server is shelved, on no host, and not being unshelved."""
        return self.status == "SHELVED_OFFLOADED" and self.task is None and self.host is None

    def is_on(self, hostname: str) -> bool:
        """Return whether the server is on a host; the case of the name does not matter."""
        names = {name.casefold() for name in (self.host, self.node) if name}
        return hostname.casefold() in names


@dataclass(frozen=True, slots=True)
class NovaSnapshot:
    """Instances in Nova: uuids ``listed`` on the host, and instances ``queried`` one by one.

    The value of a queried instance is None if Nova does not have it.
    """

    listed: frozenset[str] = frozenset()
    queried: Mapping[str, Instance | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """All four sources of one host.

    ``hardware`` is None if the agent was not queried, or did not answer; ``unreachable_reason`` is
    then the error. ``desired`` has the providers that the database implies, by uuid. ``instances``
    is None without Nova. ``allocations_expected`` is set if bound ARQs must have allocations.
    """

    host: str
    now: datetime
    hardware: Hardware | None = None
    unreachable_reason: str | None = None
    database: DatabaseSnapshot = field(default_factory=DatabaseSnapshot)
    desired: Mapping[str, Provider] = field(default_factory=dict)
    placement: PlacementSnapshot = field(default_factory=PlacementSnapshot)
    instances: NovaSnapshot | None = None
    allocations_expected: bool = True
