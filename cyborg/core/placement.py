# SPDX-License-Identifier: Apache-2.0
"""Resource providers: their desired state, the schedule of its verification, and their parents.

Each deployable is one nested resource provider, below the compute node's provider or below the
provider of the deployable that contains it. Providers that are not in the desired state are never
changed.

The verification compares Placement with the desired state. A cloud at rest costs one call to
Placement for each host, once in DUE intervals. Every write of inventories or traits raises the
generation of a provider, so a provider with the generation of its last comparison has not drifted,
and only others are read. A name and a parent change without a generation, but the list of a tree
has both. A restored database may reach an old generation again with other contents, so each
provider is also read once in FULL_INTERVAL.

The parents are the providers of compute nodes. Two listings of them show which hosts have changed.
"""

import math
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from cyborg.core import naming
from cyborg.core.errors import Invalid
from cyborg.core.hosts import Identity, matching_nodes, name_variants
from cyborg.core.text import format_number
from cyborg.core.validation import parse_uuid


@dataclass(frozen=True, slots=True)
class Inventory:
    """Inventory of one resource class; the ``reserved`` units cannot be allocated."""

    total: int
    reserved: int = 0
    min_unit: int = 1
    max_unit: int = 1
    step_size: int = 1
    allocation_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Provider:
    """A resource provider with the inventories and traits that this service sets."""

    uuid: str
    name: str
    parent_uuid: str | None
    inventories: Mapping[str, Inventory]
    traits: frozenset[str]

    @property
    def cordoned(self) -> bool:
        """Return whether all units of the provider are reserved."""
        return all(inv.reserved >= inv.total for inv in self.inventories.values())


@dataclass(frozen=True, slots=True)
class DeployableState:
    """Values of a deployable in the database, from which its provider is made.

    ``uncleanable`` counts the units that cannot be cleaned at present: they are reserved. The units
    of a device set, which has ``set_size`` members, are allocated together or not at all.
    """

    uuid: str
    name: str
    resource_class: str
    traits: frozenset[str]
    total: int
    cordoned: bool = False
    parent_uuid: str | None = None
    uncleanable: int = 0
    set_size: int | None = None


@dataclass(frozen=True, slots=True)
class EnsureClasses:
    """Create these CUSTOM_ resource classes in Placement if they are missing."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class EnsureTraits:
    """Create these CUSTOM_ traits in Placement if they are missing."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class CreateProvider:
    """Create the provider below its parent, without inventories and traits."""

    provider: Provider


@dataclass(frozen=True, slots=True)
class SetInventories:
    """Replace all inventories of a provider."""

    uuid: str
    inventories: Mapping[str, Inventory]


@dataclass(frozen=True, slots=True)
class SetTraits:
    """Replace all traits of a provider."""

    uuid: str
    traits: frozenset[str]


@dataclass(frozen=True, slots=True)
class DeleteProvider:
    """Delete a provider whose deployable was removed."""

    uuid: str


Call = EnsureClasses | EnsureTraits | CreateProvider | SetInventories | SetTraits | DeleteProvider


def build_providers(
    root_uuid: str, deployables: Collection[DeployableState]
) -> dict[str, Provider]:
    """Return the desired providers of one host's deployables, by uuid.

    ``root_uuid`` is the compute node's provider. A cordoned deployable keeps its total and has all
    of it reserved: allocations stay valid and new allocations are impossible. A deployable with a
    total of 0 has no inventory, because Placement rejects that total.
    """
    return {deployable.uuid: _build_provider(root_uuid, deployable) for deployable in deployables}


def plan_calls(desired: Provider | None, actual: Provider | None) -> tuple[Call, ...]:
    """Return the calls that change the actual to the desired provider; none if they are equal.

    ``desired`` is None for a provider to delete, ``actual`` for one that Placement does not have.
    The caller has parents before their children, and deletes children before their parents.
    """
    if desired is None:
        return () if actual is None else (DeleteProvider(actual.uuid),)
    ensure: list[Call] = []
    changes: list[Call] = []
    if desired.inventories != (actual.inventories if actual else {}):
        if names := _custom(desired.inventories):
            ensure.append(EnsureClasses(names))
        changes.append(SetInventories(desired.uuid, desired.inventories))
    if desired.traits != (actual.traits if actual else frozenset()):
        if names := _custom(desired.traits):
            ensure.append(EnsureTraits(names))
        changes.append(SetTraits(desired.uuid, desired.traits))
    # Traits first: inventory without them could be allocated to a request that forbids one. A
    # cordoned provider gets its inventory first: a refused trait must not keep it schedulable.
    if not desired.cordoned:
        changes.reverse()
    create = [CreateProvider(desired)] if actual is None else []
    return (*ensure, *create, *changes)


def _custom(names: Iterable[str]) -> frozenset[str]:
    """Return the names that Placement does not have by itself."""
    return frozenset(name for name in names if name.startswith("CUSTOM_"))


def describe_drift(desired: Provider, actual: Provider | None) -> tuple[str, ...]:
    """Return a text for each difference of Placement from the desired provider; none if equal.

    ``actual`` is None for a provider that Placement does not have.
    """
    if actual is None:
        return ("it was missing",)
    differences: list[str] = []
    if actual.name != desired.name:
        differences.append(f"its name was {actual.name!r}")
    if actual.parent_uuid != desired.parent_uuid:
        differences.append(f"its parent was {actual.parent_uuid}")
    for name in sorted(desired.inventories.keys() | actual.inventories.keys()):
        differences += _describe_inventory_drift(
            name, desired.inventories.get(name), actual.inventories.get(name)
        )
    for traits, problem in (
        (desired.traits - actual.traits, "traits were missing"),
        (actual.traits - desired.traits, "traits were unexpected"),
    ):
        if traits:
            differences.append(f"{problem}: {', '.join(sorted(traits))}")
    return tuple(differences)


def _describe_inventory_drift(
    name: str, desired: Inventory | None, actual: Inventory | None
) -> list[str]:
    if desired is None or actual is None:
        return [f"inventory of {name} was {'missing' if actual is None else 'unexpected'}"]
    return [
        f"{name} had {field.name} {format_number(getattr(actual, field.name))}, "
        f"not {format_number(getattr(desired, field.name))}"
        for field in fields(Inventory)
        if getattr(actual, field.name) != getattr(desired, field.name)
    ]


def _build_provider(root_uuid: str, deployable: DeployableState) -> Provider:
    """Return the provider that a deployable needs; without handles it has no inventory."""
    inventories: dict[str, Inventory] = {}
    total = deployable.total
    if (size := deployable.set_size) is not None:
        # The numbers are those of all members, present or not: a request for n units is served by
        # one provider, so that only a set of n devices can serve it.
        is_complete = total == size and not deployable.uncleanable
        inventories[deployable.resource_class] = Inventory(
            total=size,
            reserved=0 if is_complete and not deployable.cordoned else size,
            min_unit=size,
            max_unit=size,
            step_size=size,
        )
    # Placement refuses a total of 0.
    elif total > 0:
        inventories[deployable.resource_class] = Inventory(
            total=total,
            # Reserved, and not removed: the allocations of running servers need the inventory.
            reserved=total if deployable.cordoned else min(deployable.uncleanable, total),
            max_unit=total,
        )
    return Provider(
        uuid=deployable.uuid,
        name=deployable.name,
        parent_uuid=deployable.parent_uuid or root_uuid,
        inventories=inventories,
        traits=deployable.traits | {naming.OWNER_TRAIT},
    )


# Share of the interval after which a provider may be verified, to spread the calls evenly.
EARLIEST = 0.75
# Share of the interval after which a provider is due.
DUE = 0.85
# Share of the interval in which all providers are verified if all are due at once.
DRAIN = 0.1
# Rounds of an interval at least: DUE, DRAIN and the wait for a round are one interval.
ROUNDS = 20
# Seconds between two rounds at most.
MAX_PERIOD = 10.0
# Time after which the contents of a provider are read although its generation is the same.
FULL_INTERVAL = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Numbers of providers that one round verifies at most: before they are due, and in all."""

    interval: float
    early: int
    total: int

    def next_batch(self, taken: int) -> tuple[timedelta, int] | None:
        """Return the minimum age and the maximum number of the next providers of the round.

        ``taken`` is the number of providers that the round has verified. Return None at its end.
        """
        if taken < self.early:
            return timedelta(seconds=EARLIEST * self.interval), self.early - taken
        if taken < self.total:
            return timedelta(seconds=DUE * self.interval), self.total - taken
        return None


def round_period(interval: float) -> float:
    """Return the seconds between two rounds for an interval of verification in seconds."""
    return min(MAX_PERIOD, interval / ROUNDS)


def plan_round(count: int, interval: float, elapsed: float) -> RoundPlan:
    """Return the plan of a round that starts ``elapsed`` seconds after the previous one.

    ``count`` is the number of providers. If each conductor follows its plans and Placement answers
    in time, no provider is older than ``interval`` seconds at any number of providers.
    """
    share = max(elapsed, round_period(interval)) / interval
    return RoundPlan(
        interval=interval,
        early=math.ceil(count * share / DUE),
        total=math.ceil(count * share / DRAIN),
    )


def is_comparison_due(uuid: str, compared_at: datetime | None, now: datetime) -> bool:
    """Return whether the contents of a provider must be read although nothing seems to change.

    The time differs between providers, so that those of one publication are not due at once.
    """
    if compared_at is None:
        return True
    # Not hash(): it differs between processes, so that two conductors would never agree.
    spread = zlib.crc32(uuid.encode()) / 2**32
    return now - compared_at >= FULL_INTERVAL * (0.5 + 0.5 * spread)


@dataclass(frozen=True, slots=True)
class ComputeNode:
    """Resource provider of a compute node, as Placement lists it."""

    name: str
    generation: int


def changed_nodes(
    previous: Mapping[str, ComputeNode], current: Mapping[str, ComputeNode]
) -> dict[str, ComputeNode]:
    """Return the removed, added, renamed and recreated compute nodes, by uuid.

    A lower generation than before means that the provider was recreated with the same uuid, which
    nova-compute keeps in a file: the generation of one provider only rises.
    """
    # A removed compute node took the providers below it along.
    removed = {uuid: node for uuid, node in previous.items() if uuid not in current}
    # A higher generation alone is no change: Nova raises it with each update of its inventory.
    return removed | {
        uuid: node
        for uuid, node in current.items()
        if (old := previous.get(uuid)) is None
        or old.name != node.name
        or node.generation < old.generation
    }


def may_belong_to(host: str, identity: Identity, uuid: str, node: ComputeNode) -> bool:
    """Return whether a compute node may belong to a host.

    The result can be True for several hosts.
    """
    # A false positive costs a few calls; a false negative would leave a host unpublished.
    if identity.provider is not None:
        return identity.provider.casefold() in (uuid, node.name.casefold())
    if uuid == identity.compute_id or node.name == host:
        return True
    return bool(matching_nodes([host, *identity.names], [node.name]))


def is_certain(host: str, identity: Identity, uuid: str, name: str) -> bool:
    """Return whether a root provider is certainly the compute node of a host.

    False means that only a search in Placement can tell: it has other names and spellings.
    """
    if identity.provider is not None:
        try:
            return uuid == parse_uuid(identity.provider, "resource_provider")
        except Invalid:
            return name == identity.provider
    return uuid == identity.compute_id if identity.compute_id is not None else name == host


def affected_hosts(
    changed: Mapping[str, ComputeNode], identities: Mapping[str, Identity]
) -> list[str]:
    """Return the hosts of ``identities`` to which one of the changed compute nodes may belong."""
    # Indexed by name, so that the work grows with the two numbers and not with their product: all
    # compute nodes change at once when Placement has another database.
    by_name: dict[str, dict[str, ComputeNode]] = {}
    for uuid, node in changed.items():
        for name in {uuid, node.name.casefold(), *name_variants([node.name])}:
            by_name.setdefault(name, {})[uuid] = node

    def candidates(host: str, identity: Identity) -> dict[str, ComputeNode]:
        """Return the changed compute nodes that have a name or a uuid of a host."""
        names = {host.casefold(), *name_variants([host, *identity.names])}
        names |= {(identity.provider or "").casefold(), identity.compute_id or ""}
        return {uuid: node for name in names for uuid, node in by_name.get(name, {}).items()}

    return [
        host
        for host, identity in identities.items()
        if any(
            may_belong_to(host, identity, uuid, node)
            for uuid, node in candidates(host, identity).items()
        )
    ]
