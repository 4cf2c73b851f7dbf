# SPDX-License-Identifier: Apache-2.0
"""Findings of an audit, and the snapshots of the four sources of a host that it compares.

The sources are the hardware as the agent sees it, our database, Placement, and Nova's instances.
``core.audit.compare`` has the comparison. Each kind of finding has advice and, if there is one, a
safe repair.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Self

from cyborg.core.binding.states import ArqState
from cyborg.core.hosts import Instance
from cyborg.core.inventory.report import Hardware
from cyborg.core.placement import Provider


class State(StrEnum):
    """State of an audit."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"


OPEN = (State.PENDING, State.RUNNING)


class Source(StrEnum):
    """Sources that an audit compares."""

    HARDWARE = "hardware"
    DATABASE = "database"
    PLACEMENT = "placement"
    NOVA = "nova"


class Repair(StrEnum):
    """Repairs that an audit may do without an operator. No repair changes allocations or Nova."""

    REPORT = "report"  # have the host report again
    PUBLISH = "publish"  # have the publisher reconcile a provider
    DELETE_PROVIDER = "delete_provider"  # delete a provider of ours without allocations
    CLEAN = "clean"  # have the host clean a handle
    ACTIVATE = "activate"  # have the host activate a bound partition again
    DEACTIVATE = "deactivate"  # have the host deactivate a partition, and clean its devices
    RECONCILE = "reconcile"  # suspect an ARQ: it is released after the grace period


_REPORT = "Request a new report of the host; if the finding persists, read the agent's log."
_PUBLISH = "The publisher repairs it; if the finding persists, read the conductor's log."


class Kind(StrEnum):
    """Kinds of findings, each with advice for the operator.

    ``repair`` is the repair of each finding of the kind. If it is None, a finding may have its own
    repair.
    """

    advice: str
    repair: Repair | None

    def __new__(cls, value: str, advice: str, repair: Repair | None = None) -> Self:
        """Return the member of a value."""
        member = str.__new__(cls, value)
        # Without this the value would be the whole tuple.
        member._value_ = value
        member.advice, member.repair = advice, repair
        return member

    AGENT_UNREACHABLE = (
        "agent_unreachable",
        "Check that cyborg-agent runs and reaches the message broker.",
    )
    BACKEND_UNAVAILABLE = (
        "backend_unavailable",
        "Read the agent's log: this backend cannot discover its devices.",
    )
    DEVICE_UNRECORDED = "device_unrecorded", _REPORT, Repair.REPORT
    DEVICE_VANISHED = "device_vanished", _REPORT, Repair.REPORT
    DEVICE_RETURNED = "device_returned", _REPORT, Repair.REPORT
    DEPLOYABLE_UNRECORDED = "deployable_unrecorded", _REPORT, Repair.REPORT
    DEPLOYABLE_VANISHED = "deployable_vanished", _REPORT, Repair.REPORT
    DEPLOYABLE_DIFFERS = "deployable_differs", _REPORT, Repair.REPORT
    HANDLES_DIFFER = "handles_differ", _REPORT, Repair.REPORT
    DRAINED_NOT_REMOVED = "drained_not_removed", _REPORT, Repair.REPORT
    HANDLE_DIRTY = (
        "handle_dirty",
        "Have the host clean it; it is not allocated before that.",
        Repair.CLEAN,
    )
    HANDLE_WRONG_OWNER = "handle_wrong_owner", "Delete the ARQ; this frees its handle."
    PARTITION_INACTIVE = (
        "partition_inactive",
        "Activate it (repair does), then hard reboot the server, which has no NVLink before.",
        Repair.ACTIVATE,
    )
    PARTITION_UNUSED = (
        "partition_unused",
        "Stop the guest that uses it, if there is one, and deactivate it (fmpm -d ID).",
    )
    REQUEST_WITHOUT_HANDLE = "request_without_handle", "Delete the ARQ, or rebuild its server."
    REQUEST_MISPLACED = (
        "request_misplaced",
        "Migrate or rebuild the server: it has a device of another provider.",
    )
    NODE_MISSING = (
        "node_missing",
        "Start nova-compute, or set [agent] resource_provider to the provider's name.",
    )
    PROVIDER_UNTRACKED = "provider_untracked", _PUBLISH, Repair.PUBLISH
    PROVIDER_STALE = (
        "provider_stale",
        "Check that Placement answers and that a conductor runs.",
        Repair.PUBLISH,
    )
    PROVIDER_FAILING = (
        "provider_failing",
        "Fix the error that Placement reports; the publisher then retries.",
        Repair.PUBLISH,
    )
    PROVIDER_MISSING = "provider_missing", _PUBLISH, Repair.PUBLISH
    PROVIDER_MISPLACED = "provider_misplaced", _PUBLISH, Repair.PUBLISH
    PROVIDER_NOT_CORDONED = "provider_not_cordoned", _PUBLISH, Repair.PUBLISH
    PROVIDER_CORDONED = "provider_cordoned", _PUBLISH, Repair.PUBLISH
    INVENTORY_DIFFERS = "inventory_differs", _PUBLISH, Repair.PUBLISH
    TRAITS_DIFFER = "traits_differ", _PUBLISH, Repair.PUBLISH
    PROVIDER_LEFTOVER = "provider_leftover", "Delete it in Placement once it has no allocations."
    ALLOCATION_MISSING = (
        "allocation_missing",
        "If the server is there, shelve and unshelve it, which allocates again; "
        "if not, the ARQ is released after [conductor] orphan_grace.",
    )
    ALLOCATION_SHORT = (
        "allocation_short",
        "Shelve and unshelve the server, which allocates again.",
    )
    ALLOCATION_UNUSED = (
        "allocation_unused",
        "If no server or migration has this uuid, run 'nova-manage placement "
        "audit'; a server whose bind failed keeps its allocation until it is deleted.",
    )
    INSTANCE_GONE = "instance_gone", "Delete the ARQ if Nova lists the servers of the whole cloud."
    INSTANCE_ELSEWHERE = (
        "instance_elsewhere",
        "Hard reboot or rebuild the server; if it does not use the device, delete the ARQ.",
    )
    CUSTODY_BROKEN = (
        "custody_broken",
        "Find out who changed custody_records or custody_heads: compare them with a backup.",
    )
    CUSTODY_UNSEALED = (
        "custody_unsealed",
        "Check that a conductor runs, and read its log for errors about custody records.",
    )
    NOVA_UNAVAILABLE = (
        "nova_unavailable",
        "Check that Nova answers and the user of [nova] may list all servers.",
    )
    TOO_MANY = "too_many", "Repair the reported findings, then audit each host again."


@dataclass(frozen=True, slots=True)
class Finding:
    """One disagreement of the sources about an object; ``explanation`` has the text of each source.

    ``provider`` and ``name`` are uuid and name of the resource provider concerned, ``instance`` is
    the consumer, and ``ids`` are the ids of the rows that the repair changes.
    """

    host: str
    kind: Kind
    object: str
    explanation: str
    repair: Repair | None = None
    provider: str | None = None
    name: str | None = None
    instance: str | None = None
    ids: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[Kind, str]:
        """Return the key of the finding, by which a second comparison confirms it."""
        return self.kind, self.object

    def to_dict(self, *, repaired: bool = False, error: str | None = None) -> dict[str, Any]:
        """Return plain values for display; ``error`` is the reason why the repair failed."""
        return {
            "host": self.host,
            "kind": str(self.kind),
            "object": self.object,
            "explanation": self.explanation,
            "advice": self.kind.advice,
            "repair": None if self.repair is None else str(self.repair),
            "repaired": repaired,
            "error": error,
        }


def confirmed(first: Collection[Finding], second: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings of the second comparison whose keys the first comparison also has.

    Changes that were in progress at the first comparison are complete at the second. New findings
    of the second comparison are dropped, because it reads only the objects of the first findings.
    """
    keys = {finding.key for finding in first}
    return tuple(finding for finding in second if finding.key in keys)


# Kinds that only the answer of the agent can confirm, besides those with the repair REPORT.
OBSERVED_KINDS = frozenset(
    {Kind.BACKEND_UNAVAILABLE, Kind.PARTITION_INACTIVE, Kind.PARTITION_UNUSED}
)

# A change within this time may be in flight and is skipped.
SETTLE_TIME = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class HandleRecord:
    """An attach handle of the database; ``owner`` is the uuid of its ARQ.

    ``cleaning`` is set if an open job cleans the handle. ``set_provider`` is the provider of the
    device set through which it was claimed, None if it was claimed alone.
    """

    id: int
    address: str
    draining: bool = False
    needs_cleaning: bool = False
    cleaning: bool = False
    owner: str | None = None
    owner_state: ArqState | None = None
    owner_provider: str | None = None
    set_provider: str | None = None

    @property
    def in_use(self) -> bool:
        """Return whether the handle has an owner, or must be cleaned after the last owner."""
        return self.owner is not None or self.needs_cleaning


@dataclass(frozen=True, slots=True)
class DeployableRecord:
    """A deployable of the database; ``provider`` is its resource provider's uuid.

    ``members`` are the row ids of the handles of a device set.
    """

    address: str
    resource_class: str
    provider: str
    name: str
    draining: bool = False
    programming: bool = False
    handles: tuple[HandleRecord, ...] = ()
    members: frozenset[int] = frozenset()


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

    @property
    def used_handles(self) -> list[HandleRecord]:
        """Return the handles that have an owner or are not clean."""
        return [
            handle
            for device in self.devices
            for deployable in device.deployables
            for handle in deployable.handles
            if handle.in_use
        ]


@dataclass(frozen=True, slots=True)
class PlacementSnapshot:
    """Providers of this service in Placement, below one compute node, and their allocated units.

    ``missing_reason`` is why there is no compute node. ``actual`` and ``consumers`` are by
    provider uuid. Allocations of a provider that is not in ``consumers`` were not read.
    """

    missing_reason: str | None = None
    actual: Mapping[str, Provider] = field(default_factory=dict)
    consumers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


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

    def finding(
        self, kind: Kind, subject: str, text: str, repair: Repair | None = None, **concerned: Any
    ) -> Finding:
        """Return a finding about an object of the host, with the repair of its kind, or its own.

        ``concerned`` are the other fields of a finding.
        """
        return Finding(self.host, kind, subject, text, kind.repair or repair, **concerned)
