# SPDX-License-Identifier: Apache-2.0
"""Device sets as their host reports them, and why they cannot be offered."""

from dataclasses import dataclass, replace
from typing import Self

from cyborg.core.device_sets.offers import MAX_REASON, SetFacts
from cyborg.core.device_sets.pools import ConfiguredSet, SetOptions
from cyborg.core.inventory.device_set import DeviceSet, OfferState, SetMember
from cyborg.core.text import abbreviate


@dataclass(frozen=True, slots=True)
class Unit:
    """A member that the host has, the resource class of its deployable, and its condition.

    The condition excludes the member whatever it is used for; None if there is none.
    """

    member: SetMember
    resource_class: str
    condition: str | None = None

    @property
    def name(self) -> str:
        """Return the name, unique on the host: that of the handle if it is enough."""
        handle, deployable = self.member.handle, self.member.deployable
        return handle if handle == deployable else f"{handle} of {deployable}"


@dataclass(frozen=True, slots=True)
class ReportedSet:
    """A set, the units that are its present members, and the condition of its source.

    ``name`` is the address, and ``source`` that of the device that is the source. ``state`` is as
    in ``SetFacts``.
    """

    id: int
    name: str
    source: str
    device_set: DeviceSet
    units: tuple[Unit, ...]
    state: OfferState | None = None
    source_condition: str | None = None

    def configure(self) -> ConfiguredSet:
        """Return the set as the plan of the offers needs it."""
        reported = self.device_set
        wanted = {int(size): number for size, number in reported.wanted.items()}
        facts = SetFacts(
            id=self.id,
            name=self.name,
            # A set without present members has an obstacle, and here a unit that no other set has.
            units=frozenset(unit.name for unit in self.units) or frozenset({self.name}),
            # The plan knows from its units that a set is allocated.
            state=OfferState.OFFERED if self.state is OfferState.ALLOCATED else self.state,
            obstacle=self._find_obstacle(),
        )
        return ConfiguredSet(facts, SetOptions(self.source, reported.mode, reported.group, wanted))

    def has_device(self, device: str) -> bool:
        """Return whether the device with this address is a member, also if it is missing."""
        return any(member.device == device for member in self.device_set.members)

    def with_obstacle(self, obstacle: str | None) -> Self:
        """Return the set with an obstacle that its source reports, or without one."""
        return replace(self, device_set=replace(self.device_set, obstacle=obstacle))

    def _find_obstacle(self) -> str | None:
        """Return why the set cannot be offered, whatever its members are used for, or None."""
        if self.device_set.obstacle is not None:
            return self.device_set.obstacle
        if self.source_condition is not None:
            return f"its source is {self.source_condition}"[:MAX_REASON]
        present = {unit.member for unit in self.units}
        missing = [m.handle for m in self.device_set.members if m not in present]
        if missing:
            return abbreviate(
                f"device {', '.join(missing)} is not present or not offered", MAX_REASON
            )
        for unit in self.units:
            if unit.condition is not None:
                return abbreviate(f"device {unit.member.device} is {unit.condition}", MAX_REASON)
        return None
