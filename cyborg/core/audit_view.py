# SPDX-License-Identifier: Apache-2.0
"""What each of the four sides says of one host, as values that an audit can compare."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cyborg.core.hardware import Hardware
from cyborg.core.provider_tree import Provider
from cyborg.core.states import RequestState

SETTLE = timedelta(seconds=60)
"""What changed within this time is on its way and is passed over."""

_BUSY = frozenset({"BUILD", "MIGRATING", "REBUILD", "RESIZE", "REVERT_RESIZE", "VERIFY_RESIZE"})
_DELETED = frozenset({"DELETED"})


@dataclass(frozen=True, slots=True)
class HandleRecord:
    """An attach handle of the database; ``owner`` is its request, ``cleaning`` has an open job."""

    id: int
    address: str
    draining: bool = False
    prepared: bool = False
    cleaning: bool = False
    owner: str | None = None
    owner_state: RequestState | None = None
    owner_provider: str | None = None

    @property
    def held(self) -> bool:
        """Tell whether somebody has it or had it and left it dirty."""
        return self.owner is not None or self.prepared


@dataclass(frozen=True, slots=True)
class PartRecord:
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
    parts: tuple[PartRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class ProviderRecord:
    """How far the publisher is with a resource provider."""

    uuid: str
    name: str
    stale_since: datetime | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that holds, or should hold, a handle. ``touched`` is its last change."""

    id: int
    uuid: str
    state: RequestState
    hostname: str
    provider: str
    instance: str
    touched: datetime
    has_handle: bool = True
    orphan_since: datetime | None = None

    def settled(self, now: datetime) -> bool:
        """Tell whether nothing about it is on its way."""
        return self.state is RequestState.BOUND and now - self.touched >= SETTLE


@dataclass(frozen=True, slots=True)
class Records:
    """The database's side; ``providers`` are by uuid."""

    devices: tuple[DeviceRecord, ...] = ()
    providers: Mapping[str, ProviderRecord] = field(default_factory=dict)
    requests: tuple[RequestRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """Placement's side: our providers below the compute node, and their consumers' units.

    ``missing`` is why there is no compute node. ``actual`` and ``consumers`` are by provider uuid;
    a provider without an entry in ``consumers`` was not asked about.
    """

    missing: str | None = None
    actual: Mapping[str, Provider] = field(default_factory=dict)
    consumers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Instance:
    """A server as Nova shows it.

    ``host`` and ``node`` are None for one that is on none; ``told`` is False where Nova does not
    tell us hosts. ``task`` is what Nova is doing with it.
    """

    uuid: str
    status: str
    host: str | None = None
    node: str | None = None
    task: str | None = None
    told: bool = True

    @property
    def busy(self) -> bool:
        """Tell whether Nova is moving, making or deleting it."""
        return self.task is not None or self.status in _BUSY

    @property
    def deleted(self) -> bool:
        """Tell whether it is there no longer."""
        return self.status in _DELETED

    def is_on(self, hostname: str) -> bool:
        """Tell whether it is on a host, in whatever case that is written."""
        names = {name.casefold() for name in (self.host, self.node) if name}
        return hostname.casefold() in names


@dataclass(frozen=True, slots=True)
class Instances:
    """Nova's side: what it lists on the host, and what it says of others that were asked about."""

    here: frozenset[str] = frozenset()
    asked: Mapping[str, Instance | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """All four sides of one host.

    ``hardware`` is None when the agent is silent, and ``silence`` says why, unless it was not
    asked at all. ``wanted`` is the rendering of the database, by provider uuid. ``instances`` is
    None without Nova. ``allocates`` tells whether somebody makes allocations for what is bound.
    """

    host: str
    now: datetime
    hardware: Hardware | None = None
    silence: str | None = None
    records: Records = field(default_factory=Records)
    wanted: Mapping[str, Provider] = field(default_factory=dict)
    placed: Placed = field(default_factory=Placed)
    instances: Instances | None = None
    allocates: bool = True
