# SPDX-License-Identifier: Apache-2.0
"""What another layout of a device changes in the offers of the device sets of its host.

A set of kind FABRIC or NVLINK has devices with one handle each: a GPU with several vGPUs leaves its
sets. A set of another kind has handles: of each resource class, the layout keeps as many as it has,
the first ones. Sets that the source would form of the remaining handles are not known.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from cyborg.core.device_sets.groups import SizeSummary, count_offered, is_offered, share_shortage
from cyborg.core.device_sets.offers import Offer, UnitUse, find_owned_sets, plan_offers
from cyborg.core.device_sets.pools import make_pools
from cyborg.core.device_sets.reported import ReportedSet, Unit
from cyborg.core.inventory.device import Layout
from cyborg.core.inventory.device_set import OfferState, SetKind, is_removed_by_layout

_OF_WHOLE_DEVICES = (SetKind.FABRIC, SetKind.NVLINK)


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """Another layout of a device, which has the address ``device``, of a host.

    ``condition`` is that of the device, which excludes it in any layout; None if there is none.
    """

    host: str
    device: str
    layout: Layout
    condition: str | None = None


@dataclass(frozen=True, slots=True)
class SetChange:
    """The offer of a set before and after a change: OFFERED, ALLOCATED or WITHHELD.

    ``reason`` says why the set is not offered afterwards, None if it is.
    """

    id: int
    before: OfferState
    after: OfferState
    reason: str | None


def preview_layout(
    change: LayoutChange,
    sets: Sequence[ReportedSet],
    uses: Mapping[str, UnitUse],
    groups: Mapping[str, Sequence[SizeSummary]],
) -> list[SetChange]:
    """Return the sets that the layout closes, and those that are offered instead.

    ``sets`` are all sets of the host, ``uses`` has the units that are not free, and ``groups`` the
    summaries of the groups of the sets. A set that has the device now, and cannot have it then, is
    closed, also if it is not offered now. Other sets change because the offers are planned again.
    The layout is applied when no server has the device.
    """
    units = {unit for each in sets for unit in each.units if unit.member.device == change.device}
    changed = [_apply(change, each, sets, units) for each in sets]
    own_sets = {each.id for each in sets if each.has_device(change.device)}
    own_units = {unit.name for unit in units}
    later_uses = {
        name: use
        for name, use in uses.items()
        if name not in own_units and use.set_id not in own_sets
    }
    before = _plan(change.host, sets, uses, groups)
    after = _plan(change.host, changed, later_uses, groups)
    return [
        SetChange(old.id, before[old.id].state, after[old.id].state, after[old.id].reason)
        for old, new in zip(sets, changed, strict=True)
        if before[old.id].state is not after[old.id].state or _is_left(old, new)
    ]


def _is_left(old: ReportedSet, new: ReportedSet) -> bool:
    """Return whether the device leaves a set."""
    return new is not old and new.device_set.obstacle is not None


def _apply(
    change: LayoutChange,
    each: ReportedSet,
    sets: Sequence[ReportedSet],
    units: AbstractSet[Unit],
) -> ReportedSet:
    """Return a set as its source will report it.

    ``sets`` are all sets of the host, ``units`` are those of the device in any of them.
    """
    if not each.has_device(change.device):
        return each
    if own := units & set(each.units):
        if all(_remains(change.layout, each, unit, units) for unit in own):
            return each
        reason = f"device {change.device} leaves it with the layout {change.layout.name}"
        return each.with_obstacle(reason)
    return _restore(change, each, sets)


def _remains(layout: Layout, each: ReportedSet, unit: Unit, units: AbstractSet[Unit]) -> bool:
    """Return whether a unit of the device is a member in a layout, too."""
    number = layout.offers.get(unit.resource_class, 0)
    if each.device_set.kind in _OF_WHOLE_DEVICES:
        return number == sum(layout.offers.values()) == 1
    same = sorted(u.member for u in units if u.resource_class == unit.resource_class)
    return same.index(unit.member) < number


def _restore(change: LayoutChange, each: ReportedSet, sets: Sequence[ReportedSet]) -> ReportedSet:
    """Return a set without a unit of the device; if the layout has this unit, with it."""
    obstacle, offers = each.device_set.obstacle, change.layout.offers
    if (
        each.device_set.kind not in _OF_WHOLE_DEVICES
        or not (obstacle is None or is_removed_by_layout(obstacle, change.device))
        or sum(offers.values()) != 1
    ):
        return each
    (resource_class,) = (name for name, number in offers.items() if number)
    others = each.units or [
        unit for other in sets if other.source == each.source for unit in other.units
    ]
    # Such as a vGPU and a set of whole GPUs.
    if any(unit.resource_class != resource_class for unit in others):
        return each
    restored = tuple(
        Unit(member, resource_class, change.condition)
        for member in each.device_set.members
        if member.device == change.device
    )
    return replace(each.with_obstacle(None), units=(*each.units, *restored))


def _plan(
    host: str,
    sets: Sequence[ReportedSet],
    uses: Mapping[str, UnitUse],
    groups: Mapping[str, Sequence[SizeSummary]],
) -> dict[int, Offer]:
    """Return the offer of each set of a host by its id; one that waits counts as offered."""
    plan: dict[int, Offer] = {}
    for pool in make_pools(each.configure() for each in sets):
        shortage = pool.wanted
        if pool.group:
            summaries = groups.get(pool.group, ())
            local = count_offered(summary for summary in summaries if summary.host == host)
            shortage = share_shortage(pool.wanted, count_offered(summaries), local)
        pool_uses = pool.select_uses(uses)
        owned = find_owned_sets(pool_uses)
        for id_, offer in plan_offers(pool.sets, pool_uses, pool.mode, shortage).items():
            if is_offered(offer):
                plan[id_] = Offer(OfferState.ALLOCATED if id_ in owned else OfferState.OFFERED)
            else:
                plan[id_] = Offer(OfferState.WITHHELD, offer.reason)
    return plan
