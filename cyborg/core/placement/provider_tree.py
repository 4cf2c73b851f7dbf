# SPDX-License-Identifier: Apache-2.0
"""Desired resource providers of a host, and the Placement calls that create this state.

Each deployable is one nested resource provider, below the compute node's provider or below the
provider of the deployable that contains it. Providers that are not in the desired state are never
changed.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from cyborg.core import naming
from cyborg.core.text import format_number


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

    ``uncleanable`` counts the units that cannot be cleaned at present: they are reserved.
    """

    uuid: str
    name: str
    resource_class: str
    traits: frozenset[str]
    total: int
    cordoned: bool = False
    parent_uuid: str | None = None
    uncleanable: int = 0


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


def plan_calls(
    desired: Mapping[str, Provider | None], actual: Mapping[str, Provider]
) -> tuple[Call, ...]:
    """Return the calls that change the actual to the desired providers; none if equal.

    A ``desired`` value of None means that the provider must be deleted. Parents are created before
    their children and deleted after them. Providers that are not in ``desired`` are ignored.
    """
    classes: set[str] = set()
    traits: set[str] = set()
    writes: list[Call] = []
    for uuid in _parents_first(desired):
        new = desired[uuid]
        if new is None:
            continue
        old = actual.get(uuid)
        if old is None:
            writes.append(CreateProvider(new))
        changes: list[Call] = []
        if new.traits != (old.traits if old else frozenset()):
            traits |= {name for name in new.traits if name.startswith("CUSTOM_")}
            changes.append(SetTraits(uuid, new.traits))
        if new.inventories != (old.inventories if old else {}):
            classes |= {name for name in new.inventories if name.startswith("CUSTOM_")}
            changes.append(SetInventories(uuid, new.inventories))
        # Traits first: inventory without them could be allocated to a request that forbids one. A
        # cordoned provider gets its inventory first: a refused trait must not keep it schedulable.
        writes += reversed(changes) if new.cordoned else changes
    removed = {
        uuid: actual[uuid] for uuid, new in desired.items() if new is None and uuid in actual
    }
    ensure: list[Call] = []
    if classes:
        ensure.append(EnsureClasses(frozenset(classes)))
    if traits:
        ensure.append(EnsureTraits(frozenset(traits)))
    deletes = [DeleteProvider(uuid) for uuid in reversed(_parents_first(removed))]
    return (*ensure, *writes, *deletes)


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
    inventories: dict[str, Inventory] = {}
    total = deployable.total
    if total > 0:
        inventories[deployable.resource_class] = Inventory(
            total=total,
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


def _parents_first(providers: Mapping[str, Provider | None]) -> list[str]:
    """Return the uuids in order of depth within ``providers``, also if parents form a cycle."""

    def depth(uuid: str) -> int:
        steps, at = 0, providers[uuid]
        while at and at.parent_uuid and at.parent_uuid in providers and steps < len(providers):
            steps, at = steps + 1, providers[at.parent_uuid]
        return steps

    return sorted(providers, key=lambda uuid: (depth(uuid), uuid))
