# SPDX-License-Identifier: Apache-2.0
"""Pools: the device sets of a host that are planned together.

Sets with a unit in common are in one pool: only one of them can be offered. So are sets that count
for the same wanted numbers: those of one source, or of one group. Otherwise each part of a source,
such as the devices below each of two PCIe switches, would keep the wanted sets for itself.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cyborg.core.device_sets.offers import MAX_REASON, SetFacts, UnitUse, join
from cyborg.core.inventory.device_set import OfferMode
from cyborg.core.text import abbreviate


@dataclass(frozen=True, slots=True)
class SetOptions:
    """How the source of a set offers its sets: see ``DeviceSet``. ``source`` is its name."""

    source: str
    mode: OfferMode = OfferMode.DISJOINT
    group: str = ""
    wanted: Mapping[int, int] | None = None


class ConfiguredSet(NamedTuple):
    """A set with the options of its source."""

    facts: SetFacts
    options: SetOptions


@dataclass(frozen=True, slots=True)
class Pool:
    """Sets that are planned together; ``wanted`` is for all of them, or for their ``group``."""

    sets: Sequence[SetFacts]
    mode: OfferMode
    group: str
    wanted: Mapping[int, int]

    def select_uses(self, uses: Mapping[str, UnitUse]) -> dict[str, UnitUse]:
        """Return the uses of the units of the pool, from those of a host."""
        units = {unit for facts in self.sets for unit in facts.units}
        return {unit: uses[unit] for unit in sorted(units & uses.keys())}


def make_pools(sets: Iterable[ConfiguredSet]) -> list[Pool]:
    """Return the pools of the sets of a host.

    Of sources with common devices, DISJOINT is the mode of all if one has it, and of each size the
    largest number is wanted. They must have one group: with two, the sets of the source whose name
    is the first in the alphabet are offered, and the others have an obstacle.
    """
    parts = [_make_part(part) for part in join(sets, lambda each: each.facts.units)]
    return [_merge([pool for pool, _ in joined]) for joined in join(parts, lambda part: part[1])]


def _make_part(sets: Sequence[ConfiguredSet]) -> tuple[Pool, set[Hashable]]:
    """Return sets with common units as a pool, and the keys that it shares with others."""
    # A set with an obstacle, which may be one that its source no longer has, decides nothing.
    usable = [each for each in sets if each.facts.obstacle is None] or sets
    first = min(usable, key=lambda each: (each.options.source, each.facts.id))
    group = first.options.group
    group_options = [each.options for each in usable if each.options.group == group]
    modes = {options.mode for options in group_options}
    mode = OfferMode.DISJOINT if OfferMode.DISJOINT in modes else OfferMode.ALL
    facts = [_with_group_obstacle(each, first) for each in sets]
    wanted = _find_largest(options.wanted or {} for options in group_options)
    pool = Pool(facts, mode, group, wanted)
    # ``bool(group)``: a group and a source may have one name.
    sources = {group} if group else {options.source for options in group_options}
    return pool, {(mode, bool(group), name) for name in sources}


def _with_group_obstacle(each: ConfiguredSet, first: ConfiguredSet) -> SetFacts:
    """Return the facts of a set, with an obstacle if its group is another one."""
    facts, group, other = each.facts, each.options.group, first.options.group
    if facts.obstacle is not None or group == other:
        return facts
    reason = (
        f"source {each.options.source} has the group {group or 'none'}, and source "
        f"{first.options.source}, which has devices in common, the group {other or 'none'}: "
        "configure the same group for both"
    )
    return replace(facts, obstacle=abbreviate(reason, MAX_REASON))


def _merge(pools: Sequence[Pool]) -> Pool:
    """Return pools of one mode, and of one group or source, as one."""
    sets = sorted((facts for pool in pools for facts in pool.sets), key=lambda facts: facts.id)
    return replace(pools[0], sets=sets, wanted=_find_largest(pool.wanted for pool in pools))


def _find_largest(numbers: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Return the largest number of each size."""
    largest: dict[int, int] = {}
    for by_size in numbers:
        for size, number in by_size.items():
            largest[size] = max(number, largest.get(size, 0))
    return largest
