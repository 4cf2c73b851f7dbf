# SPDX-License-Identifier: Apache-2.0
"""Whether the groups of a request fit on a host together."""

from collections import Counter
from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.binding.profile import AttachTarget
from cyborg.core.explain.explanation import (
    GroupDemand,
    HandleCounts,
    ProviderState,
    fail_quota,
    find_first_failure,
)
from cyborg.core.explain.predicates import Predicate
from cyborg.core.explain.request_fit import evaluate_request

NINE = {"FPGA": 9}


def provider(number: int = 0, total: int = 16, **values: Any) -> ProviderState:
    """Return a provider with free handles."""
    fields = {"host": "compute-1", "resource_class": "FPGA", **values}
    fields.setdefault("handles", HandleCounts(total=total))
    return ProviderState(uuid=f"p{number}", device_uuid=f"d{number}", device=f"{number}", **fields)


def codes(demands: list[GroupDemand], *providers: ProviderState) -> list[list[str | None]]:
    """Return the codes of each provider, by group."""
    fit = evaluate_request(demands, providers)
    return [[f.predicate.value if f else None for f in fit.failures(each)] for each in providers]


def test_groups_that_need_too_many_handles_together_compete() -> None:
    demands = [GroupDemand(0, NINE), GroupDemand(1, NINE)]
    fit = evaluate_request(demands, [provider()])
    assert fit.fitting_hosts == frozenset()
    (first, second) = fit.failures(provider())
    assert first == second
    assert first is not None
    assert first.predicate is Predicate.TAKEN_IN_CALL
    assert first.text == "groups 0 and 1 together need more handles than host compute-1 has"
    assert [summary.fitting for summary in fit.summarize()] == [0, 0]
    assert fit.summarize()[0].providers == {Predicate.TAKEN_IN_CALL: 1}
    both = [provider(), provider(1)]
    assert evaluate_request(demands, both).fitting_hosts == {"compute-1"}


def test_larger_group_than_the_provider_has_handles_needs_no_other_group() -> None:
    assert codes([GroupDemand(0, {"FPGA": 17})], provider()) == [["too_few_handles"]]


def test_group_gets_all_devices_of_a_set() -> None:
    demands = [GroupDemand(0, {"FPGA": 2}), GroupDemand(1, {"FPGA": 4})]
    states = [provider(0, 4, set_size=4), provider(1, 2, set_size=2)]
    assert codes(demands, *states) == [["set_size", None], [None, "set_size"]]
    two = [GroupDemand(0, {"FPGA": 2}), GroupDemand(1, {"FPGA": 2})]
    assert codes(two, *states) == [["set_size"] * 2, ["taken_in_call"] * 2]


def test_groups_that_share_no_provider_do_not_compete() -> None:
    small = frozenset({"CUSTOM_SMALL"})
    demands = [GroupDemand(0, NINE), GroupDemand(1, NINE), GroupDemand(2, {"FPGA": 1}, small)]
    states = [provider(), provider(1, resource_class="PGPU"), provider(2, 1, traits=small)]
    first, second, third = codes(demands, *states)
    assert first == ["taken_in_call", "taken_in_call", "trait_missing"]
    assert second == ["resource_class"] * 3
    assert third == ["too_few_handles", "too_few_handles", "other_group"]


def test_group_without_a_provider_on_the_host_is_named() -> None:
    demands = [GroupDemand(0, {"FPGA": 1}), GroupDemand(1, {"CUSTOM_NIC": 1})]
    states = [
        provider(),
        provider(1, host="b", resource_class="CUSTOM_NIC"),
        provider(2, host="c"),
        provider(3, host="c", resource_class="CUSTOM_NIC"),
    ]
    fit = evaluate_request(demands, states)
    assert fit.fitting_hosts == {"c"}
    assert [summary.fitting for summary in fit.summarize()] == [1, 1]
    (failure, _) = fit.failures(states[0])
    assert failure is not None
    assert failure.text == "the host cannot serve another group of the request: 1"


def test_check_of_the_caller_excludes_every_host() -> None:
    demands = [GroupDemand(0, {"FPGA": 1})]
    fit = evaluate_request(demands, [provider()], fail_quota)
    assert fit.fitting_hosts == frozenset()
    assert [failure and failure.predicate for failure in fit.failures(provider())] == [
        Predicate.QUOTA
    ]


def test_host_without_a_result_of_the_search_counts_as_one_that_fits() -> None:
    demands = [GroupDemand(n, {"FPGA": size}) for n, size in enumerate((3, 3, 4, 5, 5))]
    states = [provider(n, total) for n, total in enumerate((7, 7, 6))]
    assert evaluate_request(demands, states).fitting_hosts == frozenset()
    assert evaluate_request(demands, states, effort=0).fitting_hosts == {"compute-1"}


demand_values = st.builds(
    lambda units, name, required, target: GroupDemand(
        0, {name: units}, frozenset(required), target=target
    ),
    st.integers(1, 3),
    st.sampled_from(["FPGA", "FPGA", "PGPU"]),
    st.sampled_from([(), (), ("CUSTOM_A",)]),
    st.sampled_from([AttachTarget.INSTANCE, AttachTarget.INSTANCE, AttachTarget.PORT]),
)
provider_values = st.builds(
    lambda name, traits, total, taken, lacking, is_set: {
        "set_size": max(1, total) if is_set else None,
        "resource_class": name,
        "traits": frozenset(traits),
        "handles": HandleCounts(
            total=total,
            taken=min(taken, total),
            without_info=min(lacking, total - min(taken, total)),
        ),
    },
    st.sampled_from(["FPGA", "FPGA", "PGPU"]),
    st.sampled_from([(), ("CUSTOM_A",)]),
    st.integers(0, 5),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
)


def is_served(demands: list[GroupDemand], chosen: tuple[ProviderState, ...]) -> bool:
    """Return whether these providers serve the groups, as a bind claims their handles."""
    if any(find_first_failure(d, p) for d, p in zip(demands, chosen, strict=True)):
        return False
    total, ports = Counter[str](), Counter[str]()
    for demand, state in zip(demands, chosen, strict=True):
        total[state.uuid] += demand.count
        ports[state.uuid] += demand.count if demand.target is AttachTarget.PORT else 0
    return all(
        total[state.uuid] <= state.handles.free
        and ports[state.uuid] <= state.handles.fitting(AttachTarget.PORT)
        for state in chosen
    )


@given(
    st.lists(demand_values, min_size=1, max_size=3),
    st.lists(provider_values, min_size=1, max_size=3),
)
def test_fit_equals_brute_force(drawn: list[GroupDemand], values: list[dict[str, Any]]) -> None:
    demands = [GroupDemand(n, d.units, d.required, target=d.target) for n, d in enumerate(drawn)]
    states = [provider(n, **value) for n, value in enumerate(values)]
    fit = evaluate_request(demands, states)
    choices = product(states, repeat=len(demands))
    fits = any(is_served(demands, chosen) for chosen in choices)
    assert bool(fit.fitting_hosts) == fits
    failures = [fit.failures(state) for state in states]
    # A host serves a request exactly if a provider of it fits each group.
    assert fits == all(any(not f[n] for f in failures) for n in range(len(demands)))
    for state, found in zip(states, failures, strict=True):
        for demand, failure in zip(demands, found, strict=True):
            if own := find_first_failure(demand, state):
                assert failure == own
            else:
                assert (failure is None) == fits
