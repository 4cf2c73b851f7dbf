# SPDX-License-Identifier: Apache-2.0
"""The first predicate that a provider fails for a group."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cyborg
from cyborg.core.binding.profile import AttachTarget, parse_groups
from cyborg.core.explain.explanation import (
    GroupDemand,
    HandleCounts,
    Holder,
    ProviderState,
    describe_holders,
    find_first_failure,
    find_room,
    make_demands,
)
from cyborg.core.explain.predicates import (
    Failure,
    Predicate,
    device_failures,
    find_trait_failure,
    trait_failures,
)
from cyborg.core.explain.request_fit import evaluate_request
from cyborg.core.inventory.device import Health, Layout
from cyborg.core.inventory.device_state import DeviceCondition, DeviceFacts, evaluate
from cyborg.core.naming import OWNER_TRAIT

NODE_1 = "CUSTOM_NUMA_NODE_1"
DEMAND = GroupDemand(
    0, {"VGPU": 2}, required=frozenset({"CUSTOM_A", NODE_1}), forbidden=frozenset({"CUSTOM_B"})
)
FITTING = ProviderState(
    "p",
    "compute-1",
    "d",
    "0000:3b:00.0",
    "VGPU",
    traits=frozenset({"CUSTOM_A", NODE_1}),
    handles=HandleCounts(total=4, taken=2),
    numa_node=1,
)
WORST: dict[Predicate, tuple[dict[str, Any], str]] = {
    Predicate.RESOURCE_CLASS: ({"resource_class": "FPGA"}, "resource class differs: FPGA"),
    Predicate.TRAIT_MISSING: ({"traits": frozenset()}, "trait missing: CUSTOM_A"),
    Predicate.TRAIT_FORBIDDEN: (
        {"traits": frozenset({"CUSTOM_A", "CUSTOM_B", NODE_1})},
        "trait forbidden: CUSTOM_B",
    ),
    Predicate.NUMA_NODE: (
        {"traits": frozenset({"CUSTOM_A", "CUSTOM_NUMA_NODE_0"}), "numa_node": 0},
        "NUMA node differs: device has 0, the group requires 1",
    ),
    Predicate.SET_SIZE: (
        {"set_size": 4},
        "device set has another number of devices: 4, group 0 requests 2",
    ),
    Predicate.IN_DEVICE_SETS: (
        {"in_sets": True, "handles": HandleCounts()},
        "device is allocated in device sets only",
    ),
    Predicate.TOO_FEW_HANDLES: (
        {"handles": HandleCounts(total=1)},
        "provider has too few handles: 1, group 0 requests 2",
    ),
    Predicate.UNPUBLISHED: ({"published": False}, "Placement does not have the provider"),
    Predicate.TAKEN: (
        {"handles": HandleCounts(total=4, taken=3, cleaning=1)},
        "handle is taken (3 of 4 handles)",
    ),
    Predicate.CLEANING: (
        {"handles": HandleCounts(total=4, cleaning=3)},
        "handle is being cleaned (3 of 4 handles)",
    ),
}
FACTS: dict[Predicate, dict[str, Any]] = {
    Predicate.HOST_DOWN: {"host_down": True},
    Predicate.UNDELIVERABLE: {"deliverable": False},
    Predicate.MAINTAINING: {"status": "maintaining"},
    Predicate.BACKEND_DISABLED: {"cordoned": True},
    Predicate.UNHEALTHY: {"health": Health.UNHEALTHY},
    Predicate.SETUP_REQUIRED: {"setup_required": True},
    Predicate.REBOOT_REQUIRED: {"reboot_required": True},
    Predicate.RESTORE_FAILED: {"restore_failed": True},
    Predicate.FAILING: {"failing": True},
    Predicate.PROGRAMMING: {"programming": True},
    Predicate.DRAINING: {"draining": True},
    Predicate.WITHHELD: {"withheld": True},
}


def test_provider_that_fits_has_no_failure() -> None:
    assert find_first_failure(DEMAND, FITTING) is None


@pytest.mark.parametrize("predicate", WORST)
def test_each_predicate_of_provider_is_found(predicate: Predicate) -> None:
    change, text = WORST[predicate]
    assert find_first_failure(DEMAND, replace(FITTING, **change)) == Failure(predicate, text)


def test_name_of_openstack_cyborg_has_its_counterpart_in_the_reason() -> None:
    demand = GroupDemand(0, {"CUSTOM_QAT": 1}, frozenset({"CUSTOM_NVIDIA_1EB8"}), frozenset())
    provider = replace(FITTING, resource_class="CUSTOM_CRYPTO")
    assert find_first_failure(demand, provider) == Failure(
        Predicate.RESOURCE_CLASS,
        "resource class differs: CUSTOM_CRYPTO (CUSTOM_QAT of OpenStack Cyborg)",
    )
    demand = replace(demand, units={"VGPU": 1})
    assert find_first_failure(demand, FITTING) == Failure(
        Predicate.TRAIT_MISSING,
        "trait missing: CUSTOM_NVIDIA_1EB8 (of OpenStack Cyborg, here "
        "CUSTOM_PCI_PRODUCT_10DE_1EB8)",
    )


@pytest.mark.parametrize("predicate", FACTS)
def test_each_condition_of_device_is_found(predicate: Predicate) -> None:
    provider = replace(FITTING, facts=DeviceFacts(**FACTS[predicate]))
    assert find_first_failure(DEMAND, provider) == Failure(predicate, predicate.description)
    remarked = replace(provider, remarks={predicate: "the reason"})
    assert find_first_failure(DEMAND, remarked) == Failure(
        predicate, f"{predicate.description}: the reason"
    )


def test_every_predicate_is_tested_and_has_a_remedy() -> None:
    elsewhere = {
        Predicate.OTHER_LAYOUT,
        Predicate.TAKEN_IN_CALL,
        Predicate.ATTACH_TARGET,
        Predicate.QUOTA,
        Predicate.OTHER_GROUP,
    }
    assert WORST.keys() | FACTS.keys() | elsewhere == set(Predicate)
    assert all(predicate.remedy for predicate in Predicate)


@given(st.sets(st.sampled_from([*WORST, *FACTS])))
def test_first_failure_is_first_in_order(failing: set[Predicate]) -> None:
    # Each of these replaces one value; of two for the same value the later one remains.
    provider, applied = FITTING, dict[str, Predicate]()
    for predicate in sorted(failing & WORST.keys(), key=lambda p: p.position):
        change, _ = WORST[predicate]
        provider = replace(provider, **change)
        applied |= dict.fromkeys(change, predicate)
    facts = {k: v for predicate in failing & FACTS.keys() for k, v in FACTS[predicate].items()}
    provider = replace(provider, facts=DeviceFacts(**facts))
    expected = {*applied.values(), *(failing & FACTS.keys())}
    found = find_first_failure(DEMAND, provider)
    if not expected:
        assert found is None
    else:
        assert found is not None
        assert found.predicate is min(expected, key=lambda p: p.position)


@given(st.builds(DeviceFacts, draining=st.booleans(), failing=st.booleans()))
def test_device_failures_are_the_conditions_of_the_device(facts: DeviceFacts) -> None:
    reasons = {reason.value for reason in evaluate(facts).reasons}
    assert {predicate.value for predicate in device_failures(facts)} == reasons
    for condition in set(DeviceCondition) - {DeviceCondition.READY}:
        assert Predicate(condition.value)


@pytest.mark.parametrize(
    ("units", "trait", "predicate"),
    [
        (7, "CUSTOM_A", Predicate.OTHER_LAYOUT),
        (8, "CUSTOM_A", Predicate.RESOURCE_CLASS),
        (7, "CUSTOM_SMALL", Predicate.OTHER_LAYOUT),
        (7, "CUSTOM_WHOLE", Predicate.RESOURCE_CLASS),
    ],
)
def test_other_layout_is_named_only_if_it_could_serve(
    units: int, trait: str, predicate: Predicate
) -> None:
    whole = Layout("whole", {"PGPU": 1}, frozenset({"CUSTOM_WHOLE"}))
    layouts = (whole, Layout("small", {"VGPU": 7}, frozenset({"CUSTOM_SMALL"})))
    traits = frozenset({"CUSTOM_A", "CUSTOM_WHOLE"})
    provider = replace(
        FITTING, resource_class="PGPU", traits=traits, layout="whole", layouts=layouts
    )
    demand = GroupDemand(0, {"VGPU": units}, required=frozenset({trait}))
    failure = find_first_failure(demand, provider)
    assert failure is not None
    assert failure.predicate is predicate


def test_other_layout_is_named() -> None:
    layouts = (Layout("whole", {"PGPU": 1}), Layout("small", {"VGPU": 7}), Layout("none", {}))
    provider = replace(FITTING, resource_class="PGPU", layout="whole", layouts=layouts)
    failure = find_first_failure(DEMAND, provider)
    assert failure == Failure(
        Predicate.OTHER_LAYOUT, "device has another layout: of VGPU, small has 7"
    )
    present = replace(provider, layout="small")
    assert find_first_failure(DEMAND, present) == Failure(
        Predicate.RESOURCE_CLASS, "resource class differs: PGPU"
    )


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (HandleCounts(total=16, draining=1, taken=15), "handle is taken (15 of 16 handles)"),
        (HandleCounts(total=16, draining=15, taken=1), "device is draining (15 of 16 handles)"),
        (HandleCounts(total=4, draining=1, cleaning=2), "handle is being cleaned (2 of 4 handles)"),
        (HandleCounts(total=4, taken=2, cleaning=1), "handle is being cleaned (1 of 4 handles)"),
        (HandleCounts(total=4, draining=1, taken=1), None),
    ],
)
def test_predicate_that_leaves_too_few_handles_is_named(
    counts: HandleCounts, text: str | None
) -> None:
    failure = find_first_failure(DEMAND, replace(FITTING, handles=counts))
    assert (failure.text if failure else None) == text


def test_port_needs_handles_with_network() -> None:
    port = replace(DEMAND, target=AttachTarget.PORT)
    counts = HandleCounts(total=4, without_info=3)
    provider = replace(FITTING, handles=counts)
    assert find_first_failure(DEMAND, provider) is None
    failure = find_first_failure(port, provider)
    assert failure is not None
    assert failure.predicate is Predicate.ATTACH_TARGET
    assert "(3 of 4 handles)" in failure.text
    assert find_first_failure(replace(DEMAND, target=None), FITTING) is not None


def test_predicate_of_the_caller_is_last() -> None:
    exceeded = Failure(Predicate.QUOTA, "quota of the project is exceeded: 2 of 2")
    assert find_first_failure(DEMAND, FITTING, lambda *_: exceeded) == exceeded
    down = replace(FITTING, facts=DeviceFacts(host_down=True))
    failure = find_first_failure(DEMAND, down, lambda *_: exceeded)
    assert failure is not None
    assert failure.predicate is Predicate.HOST_DOWN


@pytest.mark.parametrize(
    ("arq_limit", "limits", "used", "servers"),
    [
        (-1, {}, {"FPGA": 9}, None),
        (-1, {"PGPU": 0, "FPGA": -1}, {}, None),
        (-1, {"FPGA": 8}, {"FPGA": 2}, 3),
        (-1, {"FPGA": 8, "VGPU": 1}, {"FPGA": 2}, 1),
        (10, {"FPGA": 8}, {"FPGA": 2, "PGPU": 4}, 1),
        (10, {"FPGA": 8}, {"FPGA": 9}, 0),
        (0, {}, {}, 0),
    ],
)
def test_room_of_a_project_is_counted_in_servers(
    arq_limit: int, limits: dict[str, int], used: dict[str, int], servers: int | None
) -> None:
    demands = [GroupDemand(0, {"FPGA": 2}), GroupDemand(1, {"VGPU": 1})]
    assert find_room(arq_limit, limits, used).count_servers(demands) == servers


def test_owner_trait_is_provided_by_every_provider() -> None:
    owned = replace(DEMAND, required=frozenset({"CUSTOM_A", "OWNER_CYBORG"}))
    assert find_first_failure(owned, FITTING) is None
    without = replace(DEMAND, forbidden=frozenset({"OWNER_CYBORG"}))
    failure = find_first_failure(without, FITTING)
    assert failure == Failure(Predicate.TRAIT_FORBIDDEN, "trait forbidden: OWNER_CYBORG")


@pytest.mark.parametrize(
    ("required", "forbidden", "traits", "node", "failures"),
    [
        (
            {NODE_1},
            set(),
            set(),
            None,
            [(Predicate.NUMA_NODE, "the node of the device is unknown, the group requires 1")],
        ),
        # The driver of the device does not report its node as a trait.
        ({NODE_1}, set(), set(), 1, [(Predicate.TRAIT_MISSING, NODE_1)]),
        (
            set(),
            {NODE_1},
            {NODE_1},
            1,
            [(Predicate.NUMA_NODE, "device has 1, which the group forbids")],
        ),
        (set(), {NODE_1}, {NODE_1}, None, [(Predicate.TRAIT_FORBIDDEN, NODE_1)]),
        # What the device is comes before its place.
        (
            {NODE_1, "CUSTOM_Z"},
            {"CUSTOM_B"},
            {"CUSTOM_B"},
            0,
            [
                (Predicate.TRAIT_MISSING, "CUSTOM_Z"),
                (Predicate.TRAIT_FORBIDDEN, "CUSTOM_B"),
                (Predicate.NUMA_NODE, "device has 0, the group requires 1"),
            ],
        ),
        (
            {NODE_1, "CUSTOM_NUMA_NODE_0"},
            set(),
            {NODE_1},
            1,
            [(Predicate.NUMA_NODE, "device has 1, the group requires 0")],
        ),
        (
            {"CUSTOM_NUMA_NODE_X"},
            set(),
            set(),
            1,
            [(Predicate.TRAIT_MISSING, "CUSTOM_NUMA_NODE_X")],
        ),
    ],
)
def test_trait_of_a_numa_node_fails_as_numa_node(
    required: set[str],
    forbidden: set[str],
    traits: set[str],
    node: int | None,
    failures: list[tuple[Predicate, str]],
) -> None:
    sets = frozenset(required), frozenset(forbidden), frozenset(traits)
    expected = [Failure(p, f"{p.description}: {detail}") for p, detail in failures]
    assert trait_failures(*sets, node) == expected
    assert find_trait_failure(*sets, node) == expected[0]


def test_make_demands_counts_handles_of_each_group() -> None:
    groups = parse_groups(
        [
            {"resources:FPGA": "2", "trait:CUSTOM_FPGA_XILINX": "required"},
            {"resources:VGPU": "1", "resources:PGPU": "1", "accel:attach_target": "moon"},
            {"resources:CUSTOM_NIC": "1", "accel:attach_target": "port"},
        ]
    )
    fpga, both, nic = make_demands(groups)
    assert (fpga.resource_class, fpga.count) == ("FPGA", 4)
    assert (both.resource_class, both.target) == (None, None)
    assert (nic.number, nic.target) == (2, AttachTarget.PORT)
    failure = find_first_failure(both, FITTING)
    assert failure is not None
    assert failure.text.endswith("group 1 requests several classes of one provider: PGPU, VGPU")


def test_summarize_counts_providers_and_handles() -> None:
    down = replace(FITTING, facts=DeviceFacts(host_down=True))
    other = replace(FITTING, resource_class="FPGA")
    (summary,) = evaluate_request([DEMAND], [FITTING, down, other, down]).summarize()
    assert (summary.fitting, summary.free) == (1, 2)
    assert summary.providers == {Predicate.HOST_DOWN: 2, Predicate.RESOURCE_CLASS: 1}
    assert summary.handles == {Predicate.HOST_DOWN: 8, Predicate.RESOURCE_CLASS: 4}


def test_summarize_counts_equal_groups_alike() -> None:
    equal = replace(DEMAND, number=DEMAND.number + 1)
    none = replace(DEMAND, number=DEMAND.number + 2, required=frozenset({"CUSTOM_B", "CUSTOM_A"}))
    first, second, third = evaluate_request([DEMAND, equal, none], [FITTING]).summarize()
    assert second == replace(first, demand=equal)
    # Each fits alone.
    assert first.providers == {Predicate.TAKEN_IN_CALL: 1}
    assert (first.fitting, third.fitting) == (0, 0)
    assert third.providers == {Predicate.TRAIT_MISSING: 1}


@pytest.mark.parametrize(
    ("required", "forbidden", "traits"),
    [
        ({"C", "B", "A"}, {"X"}, {"B"}),
        ({"A"}, {"Y", "X"}, {"A", "X", "Y"}),
        ({"A", OWNER_TRAIT}, {"X"}, {"A"}),
        (set(), {OWNER_TRAIT}, set()),
        (set(), set(), {"A"}),
    ],
)
def test_find_trait_failure_is_the_first_of_all(
    required: set[str], forbidden: set[str], traits: set[str]
) -> None:
    sets = frozenset(required), frozenset(forbidden), frozenset(traits)
    assert find_trait_failure(*sets) == next(iter(trait_failures(*sets)), None)


@pytest.mark.static
@pytest.mark.parametrize("predicate", Predicate)
def test_documentation_has_every_predicate(predicate: Predicate) -> None:
    page = (Path(cyborg.__file__).parents[1] / "doc/source/admin/explanations.rst").read_text()
    row = next(row for row in page.split("   * - ") if f"``{predicate.value}``" in row)
    assert predicate.description in " ".join(row.split())


def test_describe_holders_reveals_what_the_caller_may_know() -> None:
    holders = [Holder("r1", "i1", "mine"), Holder("r2", "i2", "theirs"), Holder("r3", "i3", "x")]
    assert describe_holders(holders, "mine") == (
        "taken by your project: instance i1; taken by another project"
    )
    assert "taken by ARQ r2, instance i2, project theirs" in describe_holders(holders, None)
    assert describe_holders([], None) == ""
    unbound = [Holder("r4", None, "mine")]
    assert describe_holders(unbound, "mine") == "taken by your project: ARQ r4 without an instance"
