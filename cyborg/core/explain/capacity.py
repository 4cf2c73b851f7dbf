# SPDX-License-Identifier: Apache-2.0
"""How many more servers with given request groups fit on a host, and why handles are unusable.

A server needs all groups, on one host. Each group is served by one provider, and several groups may
share a provider that has enough handles: the rules of Placement with ``group_policy=none``.

The capacity is that of free handles in the database. Allocations in Placement without an ARQ, other
resources of the server (memory, processors) and the limits of Nova's scheduler are not known here.
A device set serves one group, with all its devices. Only offered sets count: with the offer mode
``all`` they may have devices in common, and fewer servers fit than the result.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cyborg.core.explain import explanation
from cyborg.core.explain.explanation import GroupDemand, ProviderState
from cyborg.core.explain.packing import Budget, Caps, Kind, Packing, pack
from cyborg.core.explain.predicates import MATCHING, Predicate, device_failures, find_trait_failure
from cyborg.core.explain.provider_counts import Composition, ProviderCounts, list_providers
from cyborg.core.inventory.device import Layout

# Steps of the exact searches in one computation: together they take a few seconds at most.
DEFAULT_EFFORT = 50_000


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """Number of servers that fit on a host; a lower bound unless ``exact``.

    ``free`` are the handles that at least one group could use now, ``total`` all handles of the
    providers that match a group. ``losses`` are the other handles, by the predicate that they fail.
    The handles of OTHER_LAYOUT are not part of ``total``: they are the additional handles that idle
    devices would have in another layout.
    """

    host: str
    servers: int
    exact: bool
    free: int
    total: int
    losses: Mapping[Predicate, int]


@dataclass(slots=True)
class _Tally:
    """Counts of the handles of a host; ``bins`` are the providers with free handles.

    A bin has the number of free handles that each demand could use, in the order of the demands.
    Equal bins are counted.
    """

    free: int = 0
    total: int = 0
    losses: Counter[Predicate] = field(default_factory=Counter)
    bins: Counter[Caps] = field(default_factory=Counter)


def compute_capacity(
    demands: Sequence[GroupDemand],
    providers: Iterable[ProviderState],
    effort: int = DEFAULT_EFFORT,
) -> list[HostCapacity]:
    """Return the capacity of each host that has one of the providers: see ``count_capacity``."""
    return count_capacity(demands, list_providers(providers), effort)


def count_capacity(
    demands: Sequence[GroupDemand], counts: ProviderCounts, effort: int = DEFAULT_EFFORT
) -> list[HostCapacity]:
    """Return the capacity of each host, ordered by host.

    The result is exact if the groups of each resource class request equal numbers of handles, which
    is the usual case. With different numbers it is exact on hosts with few handles.
    ``core.explain.packing`` says what is approximated; ``effort`` limits its searches and its
    bounds for all hosts together. When it is spent, the result for the remaining hosts is a lower
    bound. Hosts with equal free handles are computed once.
    """
    kinds = _make_kinds(demands)
    budget = Budget(effort)
    capacity_by_composition: dict[Composition, HostCapacity] = {}
    packings: dict[object, Packing] = {}  # by the bins
    capacities = []
    for host, composition in sorted(counts.hosts.items()):
        # Most hosts of a cloud are equal: each composition is computed once, and each combination
        # of free handles, which different compositions can have.
        if (capacity := capacity_by_composition.get(composition)) is None:
            tally = _count_handles(demands, counts.kinds, composition)
            key = tuple(sorted(tally.bins.items()))
            if key not in packings:
                bins = list(tally.bins.elements())
                packings[key] = _fit_servers(kinds, bins, budget)
            capacity = HostCapacity(
                host=host,
                servers=packings[key].sets,
                exact=packings[key].is_exact,
                free=tally.free,
                total=tally.total,
                losses=dict(tally.losses),
            )
            capacity_by_composition[composition] = capacity
        capacities.append(replace(capacity, host=host))
    return capacities


def _make_kinds(demands: Sequence[GroupDemand]) -> dict[str | None, dict[int, Kind]]:
    """Return the kinds of distinct demands by resource class and index of the first such demand."""
    kinds: dict[str | None, dict[int, Kind]] = {}
    for first, count in Counter(explanation.find_first_equals(demands)).items():
        demand = demands[first]
        kinds.setdefault(demand.resource_class, {})[first] = Kind(demand.count, count)
    return kinds


def _fit_servers(
    kinds: Mapping[str | None, Mapping[int, Kind]], bins: Sequence[Caps], budget: Budget
) -> Packing:
    """Return the number of servers that fit: a server is a set.

    ``kinds`` is the result of ``_make_kinds``; a bin has the capacities of a provider, by the index
    of the demand. A provider has one resource class, so that the classes are independent of each
    other.
    """
    results = []
    for members in kinds.values():
        caps = [tuple(bin_[index] for index in members) for bin_ in bins]
        results.append(pack(list(members.values()), [c for c in caps if any(c)], budget))
    # The class with the fewest sets decides; the precision of the others does not matter.
    servers = min(result.sets for result in results)
    return Packing(servers, any(r.is_exact for r in results if r.sets == servers))


def _count_handles(
    demands: Sequence[GroupDemand], kinds: Sequence[ProviderState], composition: Composition
) -> _Tally:
    """Count the handles of a host.

    A unit of the composition has the kinds of the providers of a device, as indexes of ``kinds``.
    """
    tally = _Tally()
    for unit, num_units in composition:
        states = [kinds[index] for index in unit]
        for state in states:
            _add_providers(tally, demands, state, num_units)
        if gain := _layout_gain(demands, states):
            tally.losses[Predicate.OTHER_LAYOUT] += num_units * gain
    return tally


def _add_providers(
    tally: _Tally, demands: Sequence[GroupDemand], provider: ProviderState, number: int
) -> None:
    """Add the handles of equal providers to the counts."""
    failures = [explanation.find_device_failure(demand, provider) for demand in demands]
    predicates = [failure.predicate for failure in failures if failure is not None]
    if len(predicates) == len(demands):
        # The group that came nearest decides. Devices that no group is meant for are not counted.
        nearest = max(predicates, key=lambda predicate: predicate.position)
        if nearest not in MATCHING:
            tally.total += number * provider.handles.total
            tally.losses[nearest] += number * provider.handles.total
        return
    handles = provider.handles
    caps = tuple(
        handles.fitting(demand.target) if failure is None else 0
        for demand, failure in zip(demands, failures, strict=True)
    )
    usable = max(caps)
    tally.total += number * handles.total
    tally.free += number * usable
    for predicate, count in (
        (Predicate.DRAINING, handles.draining),
        (Predicate.TAKEN, handles.taken),
        (Predicate.CLEANING, handles.cleaning),
        (Predicate.ATTACH_TARGET, handles.free - usable),
    ):
        if count:
            tally.losses[predicate] += number * count
    if usable:
        tally.bins[caps] += number


def _layout_gain(demands: Sequence[GroupDemand], providers: Sequence[ProviderState]) -> int:
    """Return how many more usable handles an idle device would have in its best layout.

    ``providers``, at least one, are all of the device. In another layout, a deployable has the
    traits of that layout, and those of its present traits that belong to no layout. The result is 0
    for a device with a condition that excludes it. A layout with fewer handles of a resource class
    that another group needs does not count.
    """
    first = providers[0]
    # The current layout is one of them: with a single one there is nothing to change to.
    if len(first.layouts) < 2:
        return 0
    if any(
        device_failures(state.facts) or state.handles.free < state.handles.total
        for state in providers
    ):
        return 0
    present = Counter[str]()
    for state in providers:
        if _is_usable(demands, state.resource_class, state.traits, state.handles.total):
            present[state.resource_class] += state.handles.total
    return max(
        (
            _count_gain(present, _count_offers(demands, providers, layout))
            for layout in first.layouts
            if layout.name != first.layout
        ),
        default=0,
    )


def _count_gain(present: Counter[str], offered: Counter[str]) -> int:
    """Return how many handles a change adds; 0 if it removes handles of some resource class."""
    return offered.total() - present.total() if present <= offered else 0


def _count_offers(
    demands: Sequence[GroupDemand], providers: Sequence[ProviderState], layout: Layout
) -> Counter[str]:
    """Return the numbers of usable handles in a layout by resource class."""
    # The deployables of the layout are not known yet: they have what all present ones would have.
    traits = frozenset.intersection(*(state.traits_in(layout) for state in providers))
    return Counter(
        {
            resource_class: count
            for resource_class, count in layout.offers.items()
            if _is_usable(demands, resource_class, traits, count)
        }
    )


def _is_usable(
    demands: Sequence[GroupDemand], resource_class: str, traits: frozenset[str], handles: int
) -> bool:
    """Return whether a provider with these handles could serve one of the groups."""
    return any(
        demand.resource_class == resource_class
        and demand.count <= handles
        and find_trait_failure(demand.required, demand.forbidden, traits) is None
        for demand in demands
    )
