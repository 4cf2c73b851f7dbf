# SPDX-License-Identifier: Apache-2.0
"""Counted kinds of providers are evaluated as the providers that they stand for."""

from collections import defaultdict
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cyborg.core.explain.capacity import compute_capacity, count_capacity
from cyborg.core.explain.explanation import GroupDemand, HandleCounts, ProviderState
from cyborg.core.explain.predicates import Predicate
from cyborg.core.explain.provider_counts import Census, ProviderCounts
from cyborg.core.explain.request_fit import evaluate_counts, evaluate_request
from cyborg.core.inventory.device import Layout
from cyborg.core.inventory.device_state import DeviceFacts
from cyborg.tests.fixtures.machine.tiers import scale

LAYOUTS = (Layout("one", {"FPGA": 1}), Layout("three", {"FPGA": 3}))

demand_values = st.builds(
    lambda name, units, traits: GroupDemand(0, {name: units}, traits),
    st.sampled_from(["FPGA", "FPGA", "PGPU"]),
    st.integers(1, 3),
    st.frozensets(st.just("CUSTOM_A"), max_size=1),
)
kind_values = st.builds(
    lambda name, traits, total, taken, facts, layout: ProviderState(
        *("", "", "", "", name),
        traits=traits,
        facts=facts,
        handles=HandleCounts(total=total, taken=min(taken, total)),
        layout=layout,
        layouts=LAYOUTS if layout else (),
    ),
    st.sampled_from(["FPGA", "FPGA", "PGPU"]),
    st.frozensets(st.just("CUSTOM_A"), max_size=1),
    st.integers(0, 4),
    st.integers(0, 2),
    st.sampled_from([DeviceFacts(), DeviceFacts(), DeviceFacts(draining=True)]),
    st.sampled_from([None, None, "one"]),
)
# Devices of a host: the numbers of the kinds of the providers of each one.
host_values = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), max_size=4)


@settings(max_examples=scale(300))
@given(
    st.lists(demand_values, min_size=1, max_size=3),
    st.lists(kind_values, min_size=3, max_size=3),
    st.lists(host_values, min_size=1, max_size=4),
)
def test_kinds_are_evaluated_as_their_providers(
    drawn: list[GroupDemand], kinds: list[ProviderState], hosts: list[list[list[int]]]
) -> None:
    demands = [replace(demand, number=number) for number, demand in enumerate(drawn)]
    census, listed = Census(), list[ProviderState]()
    for number, devices in enumerate(hosts):
        for device, numbers in enumerate(devices):
            name = f"{number}-{device}"
            # The layout is that of the device, so all its providers have the same.
            own = [k for k in numbers if kinds[k].layout == kinds[numbers[0]].layout]
            for kind in own:
                key = None if len(own) == 1 else name
                census.add(f"host-{number}", kind, device=key)
                uuid = f"{name}-{len(listed)}"
                state = replace(kinds[kind], host=f"host-{number}", uuid=uuid, device_uuid=name)
                listed.append(state)
    counts = ProviderCounts(kinds, census.compositions())
    expected, found = evaluate_request(demands, listed), evaluate_counts(demands, counts)
    assert found.summarize() == expected.summarize()
    assert found.fitting_hosts == expected.fitting_hosts
    assert [found.failures(each) for each in listed] == [expected.failures(each) for each in listed]
    assert count_capacity(demands, counts) == compute_capacity(demands, listed)


def test_census_counts_units_by_host() -> None:
    census = Census()
    census.add("b", 1)
    census.add("a", 0, 2)
    census.add("a", 0)
    for device in ("x", "y"):
        census.add("a", 1, device=device)
        census.add("a", 0, device=device)
    census.add("b", 1)
    assert census.compositions() == {"b": (((1,), 2),), "a": (((0,), 3), ((0, 1), 2))}


def test_equal_compositions_are_one_value() -> None:
    census = Census()
    for number in range(10):
        census.add(f"host-{number}", 0)
    by_id = defaultdict[int, int](int)
    for composition in census.compositions().values():
        by_id[id(composition)] += 1
    assert list(by_id.values()) == [10]


def test_other_providers_fail_at_the_resource_class() -> None:
    provider = ProviderState(*("p", "a", "d", "1", "FPGA"), handles=HandleCounts(total=2))
    counts = ProviderCounts([provider], {"a": (((0,), 1),)}, others=7, other_handles=100)
    demands = [GroupDemand(0, {"FPGA": 1}), GroupDemand(1, {"FPGA": 1})]
    fit = evaluate_counts(demands, counts)
    for summary in fit.summarize():
        assert (summary.fitting, summary.free) == (1, 2)
        assert summary.providers == {Predicate.RESOURCE_CLASS: 7}
        assert summary.handles == {Predicate.RESOURCE_CLASS: 100}
