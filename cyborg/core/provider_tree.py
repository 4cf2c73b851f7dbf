# SPDX-License-Identifier: Apache-2.0
"""What Placement should hold for a host, and the calls that bring it there.

Each deployable is one nested resource provider below the compute node's, or below the provider of
the deployable it lies within. Only providers named here are ever touched.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from cyborg.core import names


@dataclass(frozen=True, slots=True)
class Inventory:
    """How much of one resource class a provider has; ``reserved`` of it is not for sale."""

    total: int
    reserved: int = 0
    min_unit: int = 1
    max_unit: int = 1
    step_size: int = 1
    allocation_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Provider:
    """A resource provider with all that we say of it."""

    uuid: str
    name: str
    parent_uuid: str | None
    inventories: Mapping[str, Inventory]
    traits: frozenset[str]

    @property
    def closed(self) -> bool:
        """Whether nothing of it is for sale."""
        return all(some.reserved >= some.total for some in self.inventories.values())


@dataclass(frozen=True, slots=True)
class Part:
    """A deployable as the database knows it; ``closed`` for whatever reason it must not be sold.

    ``stuck`` counts the units that cannot be cleaned at present: they are reserved.
    """

    uuid: str
    name: str
    resource_class: str
    traits: frozenset[str]
    total: int
    closed: bool = False
    parent_uuid: str | None = None
    stuck: int = 0


@dataclass(frozen=True, slots=True)
class EnsureClasses:
    """Make these CUSTOM_ resource classes known to Placement."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class EnsureTraits:
    """Make these CUSTOM_ traits known to Placement."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class CreateProvider:
    """Create the provider, below its parent, still empty."""

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
    """Delete a provider that the host does not have any longer."""

    uuid: str


Call = EnsureClasses | EnsureTraits | CreateProvider | SetInventories | SetTraits | DeleteProvider


def wanted(root_uuid: str, parts: Collection[Part]) -> dict[str, Provider]:
    """Render the parts of one host below its compute node's provider, by uuid.

    A closed part keeps its total and has all of it reserved: what is allocated stays valid and
    nothing more is sold. A part of no units has no inventory, which Placement would refuse.
    """
    return {part.uuid: _render(root_uuid, part) for part in parts}


def difference(
    wanted: Mapping[str, Provider | None], actual: Mapping[str, Provider]
) -> tuple[Call, ...]:
    """Return the calls that make the actual providers the wanted ones; none when they are.

    ``wanted`` None means that the provider must go. Parents are created before their children and
    deleted after them. A provider that neither names is nobody's business here.
    """
    classes: set[str] = set()
    traits: set[str] = set()
    writes: list[Call] = []
    for uuid in _parents_first(wanted):
        new = wanted[uuid]
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
        # Traits first: inventory without them could be sold to whoever forbids one. What closes is
        # closed first: a trait that Placement refuses must not keep it open.
        writes += reversed(changes) if new.closed else changes
    going = {uuid: actual[uuid] for uuid, new in wanted.items() if new is None and uuid in actual}
    ensure: list[Call] = []
    if classes:
        ensure.append(EnsureClasses(frozenset(classes)))
    if traits:
        ensure.append(EnsureTraits(frozenset(traits)))
    deletes = [DeleteProvider(uuid) for uuid in reversed(_parents_first(going))]
    return (*ensure, *writes, *deletes)


def drift(wanted: Provider, actual: Provider | None) -> tuple[str, ...]:
    """Return in words what Placement has otherwise than it was told; nothing when it has not.

    None is a provider that Placement does not have.
    """
    if actual is None:
        return ("it was missing",)
    told: list[str] = []
    if actual.name != wanted.name:
        told.append(f"its name was {actual.name!r}")
    if actual.parent_uuid != wanted.parent_uuid:
        told.append(f"its parent was {actual.parent_uuid}")
    for name in sorted(wanted.inventories.keys() | actual.inventories.keys()):
        told += _moved(name, wanted.inventories.get(name), actual.inventories.get(name))
    for traits, what in (
        (wanted.traits - actual.traits, "traits were missing"),
        (actual.traits - wanted.traits, "traits were not ours"),
    ):
        if traits:
            told.append(f"{what}: {', '.join(sorted(traits))}")
    return tuple(told)


def _moved(name: str, wanted: Inventory | None, actual: Inventory | None) -> list[str]:
    if wanted is None or actual is None:
        return [f"inventory of {name} was {'missing' if actual is None else 'not ours'}"]
    return [
        f"{name} had {field.name} {getattr(actual, field.name):g}, "
        f"not {getattr(wanted, field.name):g}"
        for field in fields(Inventory)
        if getattr(actual, field.name) != getattr(wanted, field.name)
    ]


def _render(root_uuid: str, part: Part) -> Provider:
    inventories: dict[str, Inventory] = {}
    if part.total > 0:
        inventories[part.resource_class] = Inventory(
            total=part.total,
            reserved=part.total if part.closed else min(part.stuck, part.total),
            max_unit=part.total,
        )
    return Provider(
        uuid=part.uuid,
        name=part.name,
        parent_uuid=part.parent_uuid or root_uuid,
        inventories=inventories,
        traits=part.traits | {names.OWNER_TRAIT},
    )


def _parents_first(providers: Mapping[str, Provider | None]) -> list[str]:
    """Order by depth among the providers given; a loop, which cannot be, does not hang this."""

    def depth(uuid: str) -> int:
        steps, at = 0, providers[uuid]
        while at and at.parent_uuid and at.parent_uuid in providers and steps < len(providers):
            steps, at = steps + 1, providers[at.parent_uuid]
        return steps

    return sorted(providers, key=lambda uuid: (depth(uuid), uuid))
