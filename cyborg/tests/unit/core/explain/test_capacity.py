# SPDX-License-Identifier: Apache-2.0
"""The number of servers that fit on a host, compared with a search over all assignments."""

import functools
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import gcd
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyborg.core.binding.profile import AttachTarget
from cyborg.core.explain.capacity import compute_capacity
from cyborg.core.explain.explanation import GroupDemand, HandleCounts, ProviderState
from cyborg.core.explain.packing import Budget, Kind, _upper_bound, pack
from cyborg.core.explain.predicates import Predicate
from cyborg.core.inventory.device import Layout
from cyborg.core.inventory.device_state import DeviceFacts
from cyborg.tests.fixtures.machine.tiers import scale

VGPU = GroupDemand(0, {"VGPU": 1})


def provider(number: int = 0, total: int = 4, **values: Any) -> ProviderState:
    """Return a provider with free handles, alone on its device."""
    counts = {"handles": HandleCounts(total=total)}
    fields = {"host": "compute-1", "resource_class": "VGPU", **counts, **values}
    return ProviderState(uuid=f"p{number}", device_uuid=f"d{number}", device=f"{number}", **fields)


def brute_force(demands: Sequence[GroupDemand], providers: Sequence[ProviderState]) -> int:
    """Return the greatest number of servers, by trying all handles of all providers."""
    # A handle is (provider, number); the last free ones of a provider lack the info of a port.
    usable: dict[int, dict[int, list[int]]] = {}
    for d, demand in enumerate(demands):
        for p, state in enumerate(providers):
            same = demand.resource_class == state.resource_class
            same = same and state.set_size in (None, demand.count)
            if same and demand.required <= state.traits and not state.facts.draining:
                usable.setdefault(d, {})[p] = list(range(state.handles.fitting(demand.target)))

    @functools.cache
    def place(d: int, servers: int, used: frozenset[tuple[int, int]]) -> bool:
        if servers == 0:
            return True
        if d == len(demands):
            return place(0, servers - 1, used)
        for p, handles in usable.get(d, {}).items():
            free = [n for n in handles if (p, n) not in used]
            for chosen in combinations(free, demands[d].count):
                if place(d + 1, servers, used | {(p, n) for n in chosen}):
                    return True
        return False

    servers = 0
    while place(0, servers + 1, frozenset()):
        servers += 1
    return servers


demand_values = st.builds(
    GroupDemand,
    number=st.just(0),
    units=st.builds(dict, st.tuples(st.tuples(st.sampled_from("AB"), st.integers(1, 3)))),
    required=st.frozensets(st.just("CUSTOM_T"), max_size=1),
    target=st.sampled_from(AttachTarget),
)
provider_values = st.builds(
    lambda total, taken, info, **values: (
        replace(
            provider(**values),
            handles=HandleCounts(total, taken=min(taken, total), without_info=min(info, total)),
        )
        if taken == 0
        else replace(provider(**values), handles=HandleCounts(total, taken=min(taken, total)))
    ),
    total=st.integers(0, 5),
    taken=st.sampled_from([0, 0, 1, 2]),
    info=st.integers(0, 3),
    resource_class=st.sampled_from("AAB"),
    traits=st.frozensets(st.just("CUSTOM_T"), max_size=1),
    facts=st.sampled_from([DeviceFacts(), DeviceFacts(), DeviceFacts(draining=True)]),
).flatmap(
    # As it is, or as a device set of its handles.
    lambda state: st.sampled_from([state, replace(state, set_size=max(1, state.handles.total))])
)


@settings(max_examples=scale(600))
@given(
    st.lists(demand_values, min_size=1, max_size=3),
    st.lists(provider_values, min_size=1, max_size=3),
)
def test_capacity_equals_brute_force(
    demands: list[GroupDemand], states: list[ProviderState]
) -> None:
    numbered = [replace(s, uuid=f"p{n}", device_uuid=f"d{n}") for n, s in enumerate(states)]
    (found,) = compute_capacity(demands, numbered)
    assert found.exact
    assert found.servers == brute_force(demands, numbered)


@settings(max_examples=scale(200))
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=3),
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(0, 50),
)
def test_pack_without_effort_is_a_lower_bound(
    kinds: list[tuple[int, int]], bins: list[int], steps: int
) -> None:
    items = [Kind(size, count) for size, count in kinds]
    caps = [(cap,) * len(items) for cap in bins]
    best, exact = pack(items, caps, Budget(10**6))
    assert exact
    rough, sure = pack(items, caps, Budget(steps))
    assert rough <= best
    assert rough == best or not sure


def test_server_needs_all_groups_on_one_host() -> None:
    demands = [VGPU, GroupDemand(1, {"PGPU": 1})]
    states = [
        provider(0, 4, host="a"),
        provider(1, 1, host="a", resource_class="PGPU"),
        provider(2, 4, host="b"),
    ]
    found = compute_capacity(demands, states)
    assert [(each.host, each.servers, each.free) for each in found] == [("a", 1, 5), ("b", 0, 4)]


def test_group_is_served_by_one_provider() -> None:
    demands = [GroupDemand(0, {"VGPU": 3})]
    (found,) = compute_capacity(demands, [provider(0, 2), provider(1, 4)])
    assert (found.servers, found.exact) == (1, True)
    assert found.losses == {Predicate.TOO_FEW_HANDLES: 2}


def test_set_serves_all_its_devices_or_none() -> None:
    states = [provider(n, size, set_size=size) for n, size in enumerate((4, 2, 2, 1))]
    states.append(provider(4, 2, set_size=2, facts=DeviceFacts(withheld=True)))
    (pairs,) = compute_capacity([GroupDemand(0, {"VGPU": 2})], states)
    assert (pairs.servers, pairs.free, pairs.total) == (2, 4, 6)
    assert pairs.losses == {Predicate.WITHHELD: 2}
    (triples,) = compute_capacity([GroupDemand(0, {"VGPU": 3})], states)
    assert (triples.servers, triples.total, triples.losses) == (0, 0, {})
    demands = [GroupDemand(0, {"VGPU": 1}), GroupDemand(1, {"VGPU": 4})]
    assert compute_capacity(demands, states)[0].servers == 1


def test_group_with_several_classes_fits_nowhere() -> None:
    (found,) = compute_capacity([GroupDemand(0, {"VGPU": 1, "PGPU": 1})], [provider()])
    assert (found.servers, found.exact, found.free) == (0, True, 0)


def test_losses_count_each_handle_once() -> None:
    counts = HandleCounts(total=16, draining=1, taken=9, cleaning=2)
    states = [
        provider(0, handles=counts),
        provider(1, facts=DeviceFacts(health="unhealthy", host_down=True)),
        provider(2, published=False),
        provider(3, resource_class="FPGA"),
    ]
    (found,) = compute_capacity([VGPU], states)
    assert (found.servers, found.free, found.total) == (4, 4, 24)
    assert found.losses == {
        Predicate.DRAINING: 1,
        Predicate.TAKEN: 9,
        Predicate.CLEANING: 2,
        Predicate.HOST_DOWN: 4,
        Predicate.UNPUBLISHED: 4,
    }
    assert found.free + sum(found.losses.values()) == found.total


def test_other_trait_is_no_loss() -> None:
    demand = replace(VGPU, required=frozenset({"CUSTOM_A"}))
    (found,) = compute_capacity([demand], [provider()])
    assert (found.total, found.losses) == (0, {})


def test_other_numa_node_is_a_loss() -> None:
    demand = replace(VGPU, required=frozenset({"CUSTOM_NUMA_NODE_0"}))
    (found,) = compute_capacity([demand], [provider(numa_node=1)])
    assert (found.total, found.losses) == (4, {Predicate.NUMA_NODE: 4})


LAYOUTS = (
    Layout("whole", {"PGPU": 1}),
    Layout("seven", {"VGPU": 7}, frozenset({"CUSTOM_SMALL"})),
    Layout("two", {"VGPU": 2}, frozenset({"CUSTOM_LARGE"})),
)


@pytest.mark.parametrize(
    ("change", "required", "gain"),
    [
        ({}, [], 7),
        ({}, ["CUSTOM_LARGE"], 2),
        ({}, ["CUSTOM_VENDOR"], 7),
        ({}, ["CUSTOM_OTHER"], 0),
        ({"handles": HandleCounts(total=1, taken=1)}, [], 0),
        ({"facts": DeviceFacts(status="maintaining")}, [], 0),
    ],
)
def test_other_layout_of_idle_device_is_counted(
    change: dict[str, Any], required: list[str], gain: int
) -> None:
    traits = frozenset({"CUSTOM_VENDOR"})
    whole = provider(total=1, resource_class="PGPU", traits=traits, layout="whole", layouts=LAYOUTS)
    demand = replace(VGPU, required=frozenset(required))
    (found,) = compute_capacity([demand], [replace(whole, **change)])
    assert found.losses.get(Predicate.OTHER_LAYOUT, 0) == gain
    assert found.servers == 0


def test_other_layout_counts_only_additional_handles() -> None:
    large = provider(
        total=2,
        traits=frozenset({"CUSTOM_LARGE"}),
        layout="two",
        layouts=LAYOUTS,
    )
    (found,) = compute_capacity([VGPU], [large])
    assert found.losses == {Predicate.OTHER_LAYOUT: 5}


@pytest.mark.parametrize(
    ("demands", "gain"),
    [
        # The other layout has too few handles for the group.
        ([{"VGPU": 7}], 7),
        ([{"VGPU": 8}], 0),
        # The change would remove the handle that the other group needs.
        ([{"VGPU": 1}, {"PGPU": 1}], 0),
        ([{"VGPU": 1}, {"FPGA": 1}], 7),
    ],
)
def test_other_layout_counts_only_handles_that_serve(
    demands: list[dict[str, int]], gain: int
) -> None:
    whole = provider(total=1, resource_class="PGPU", layout="whole", layouts=LAYOUTS)
    groups = [GroupDemand(number, units) for number, units in enumerate(demands)]
    (found,) = compute_capacity(groups, [whole])
    assert found.losses.get(Predicate.OTHER_LAYOUT, 0) == gain


def test_other_layout_replaces_handles_that_are_too_few() -> None:
    two = provider(total=2, traits=frozenset({"CUSTOM_LARGE"}), layout="two", layouts=LAYOUTS)
    (found,) = compute_capacity([GroupDemand(0, {"VGPU": 3})], [two])
    assert found.losses[Predicate.OTHER_LAYOUT] == 7


def test_hard_packing_ends_and_says_that_it_is_not_exact() -> None:
    demands = [GroupDemand(n, {"VGPU": size}) for n, size in enumerate((3, 5, 7, 11, 13, 17))]
    states = [provider(n, 30 + 7 * n) for n in range(30)]
    start = time.process_time()  # other work on this machine does not count
    (found,) = compute_capacity(demands, states, effort=2000)
    assert time.process_time() - start < 20
    assert found.servers > 0
    assert found.servers * 56 <= sum(30 + 7 * n for n in range(30))


@pytest.mark.slow
def test_equal_hosts_are_computed_once() -> None:
    demands = [GroupDemand(0, {"VGPU": 2}), GroupDemand(1, {"VGPU": 3})]
    states = [provider(n, 16, host=f"h{n // 8:04}") for n in range(8000)]
    start = time.process_time()
    found = compute_capacity(demands, states)
    assert time.process_time() - start < 10
    assert {(each.servers, each.exact) for each in found} == {(25, True)}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 30, 10**5])
def test_bounds_of_different_hosts_end_with_their_budget(steps: int) -> None:
    demands = [GroupDemand(n, {"VGPU": n + 1}) for n in range(8)]
    numbers = random.Random(1)
    states = [
        provider(16 * host + n, numbers.randrange(40, 140), host=f"h{host:04}")
        for host in range(500)
        for n in range(16)
    ]
    start = time.process_time()
    found = compute_capacity(demands, states, effort=steps)
    assert time.process_time() - start < 8
    assert any(each.exact for each in found) == (steps > 30)
    # What single bins hold is found without any budget.
    assert all(each.servers >= 1 for each in found)


def test_equal_kinds_are_merged() -> None:
    """Groups that differ in traits that all providers have are one kind: the result is exact."""
    kinds = [Kind(size=2, count=1)] * 12
    assert pack(kinds, [(48,) * 12, (31,) * 12], Budget(0)) == (3, True)


@settings(max_examples=scale(200))
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 3))), max_size=6),
)
def test_subset_bounds_are_as_tight_as_hall(
    values: list[tuple[int, int]], bins: list[tuple[int, set[int]]]
) -> None:
    kinds = [Kind(size, count) for size, count in values]
    caps = [tuple(0 if n in without else cap for n in range(len(kinds))) for cap, without in bins]
    expected = min(
        sum(max(bin_[n] for n in subset) // gcd(*sizes) * gcd(*sizes) for bin_ in caps)
        // sum(kinds[n].size * kinds[n].count for n in subset)
        for size in range(1, len(kinds) + 1)
        for subset in combinations(range(len(kinds)), size)
        for sizes in [[kinds[n].size for n in subset]]
    )
    assert _upper_bound(kinds, caps, Budget(10**6)) == (expected, True)


def test_pack_takes_smaller_capacity_as_part_of_the_larger() -> None:
    kinds = [Kind(size=2, count=1), Kind(size=1, count=1)]
    assert pack(kinds, [(4, 1)], Budget(100)) == (1, True)
    assert pack(kinds, [(6, 2)], Budget(100)) == (2, True)
    assert pack(kinds, [(4, 2)], Budget(100)) == (1, True)
