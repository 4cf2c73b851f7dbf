# SPDX-License-Identifier: Apache-2.0
"""Desired providers, and the calls that reconcile the actual ones."""

import uuid
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import naming
from cyborg.core.placement import (
    Call,
    CreateProvider,
    DeleteProvider,
    DeployableState,
    EnsureClasses,
    EnsureTraits,
    Provider,
    SetInventories,
    SetTraits,
    build_providers,
    describe_drift,
    plan_calls,
)
from cyborg.tests.fixtures.hosts.strategies import CLASSES, TRAITS

ROOT = str(uuid.UUID(int=0))
IDS = [str(uuid.UUID(int=n)) for n in range(1, 6)]


@st.composite
def host_deployables(draw: st.DrawFn) -> list[DeployableState]:
    """Draw the deployables of one host, some within others."""
    deployables: list[DeployableState] = []
    for number in draw(st.lists(st.sampled_from(IDS), max_size=5, unique=True)):
        # In a variable: within the call, mypy infers the type of its result from the list.
        nested = draw(st.booleans())
        deployables.append(
            DeployableState(
                uuid=number,
                name=f"h_{number}",
                resource_class=draw(st.sampled_from(CLASSES)),
                traits=draw(st.frozensets(st.sampled_from(TRAITS))),
                total=draw(st.integers(0, 4)),
                cordoned=draw(st.booleans()),
                parent_uuid=deployables[-1].uuid if deployables and nested else None,
            )
        )
    return deployables


def execute_calls(actual: dict[str, Provider], calls: tuple[Call, ...]) -> dict[str, Provider]:
    """Apply the calls to a model of Placement that is as strict as Placement."""
    created: set[str] = set()
    result = dict(actual)
    for call in calls:
        match call:
            case EnsureClasses(custom) | EnsureTraits(custom):
                created |= custom
            case CreateProvider(new):
                assert new.uuid not in result
                assert new.parent_uuid in {ROOT, *result}
                result[new.uuid] = replace(new, inventories={}, traits=frozenset())
            case SetInventories(uuid_, inventories):
                assert {n for n in inventories if n.startswith("CUSTOM_")} <= created
                result[uuid_] = replace(result[uuid_], inventories=inventories)
            case SetTraits(uuid_, traits):
                assert {n for n in traits if n.startswith("CUSTOM_")} <= created
                result[uuid_] = replace(result[uuid_], traits=traits)
            case DeleteProvider(uuid_):
                assert uuid_ not in {p.parent_uuid for p in result.values()}
                del result[uuid_]
    return result


def under(parents: dict[str, Provider], other: dict[str, Provider]) -> dict[str, Provider]:
    """Return the providers with their parents from ``other``: calls never change a parent."""
    return {
        u: replace(p, parent_uuid=other[u].parent_uuid if u in other else p.parent_uuid)
        for u, p in parents.items()
    }


@given(host_deployables())
def test_plan_calls_from_empty_placement_creates_desired_providers(
    of: list[DeployableState],
) -> None:
    want = build_providers(ROOT, of)
    assert execute_calls({}, plan_calls(want, {})) == want


@given(host_deployables(), host_deployables())
def test_plan_calls_second_run_is_empty(
    before: list[DeployableState], after: list[DeployableState]
) -> None:
    actual = build_providers(ROOT, [replace(p, parent_uuid=None) for p in before])
    want = build_providers(ROOT, [replace(p, parent_uuid=None) for p in after])
    goal = {**dict.fromkeys(actual), **want}
    result = execute_calls(actual, plan_calls(goal, actual))
    assert result == want
    assert plan_calls(goal, result) == ()


@given(host_deployables())
def test_plan_calls_deletes_children_before_parents(of: list[DeployableState]) -> None:
    actual = build_providers(ROOT, of)
    assert execute_calls(actual, plan_calls(dict.fromkeys(actual), actual)) == {}


@given(host_deployables(), host_deployables())
def test_plan_calls_foreign_provider_is_unchanged(
    own: list[DeployableState], all_: list[DeployableState]
) -> None:
    actual = build_providers(ROOT, all_)
    want = under(build_providers(ROOT, own), actual)
    foreign = set(actual) - set(want)
    for call in plan_calls(want, actual):
        match call:
            case SetInventories(touched, _) | SetTraits(touched, _) | DeleteProvider(touched):
                assert touched not in foreign
            case CreateProvider(new):
                assert new.uuid not in foreign


@given(host_deployables())
def test_build_providers_cordoned_deployable_is_reserved(of: list[DeployableState]) -> None:
    want = build_providers(ROOT, of)
    for deployable in of:
        provider = want[deployable.uuid]
        assert naming.OWNER_TRAIT in provider.traits
        assert deployable.traits < provider.traits or naming.OWNER_TRAIT in deployable.traits
        if deployable.total == 0:
            assert provider.inventories == {}
            continue
        inventory = provider.inventories[deployable.resource_class]
        assert inventory.total == deployable.total
        assert inventory.reserved == (deployable.total if deployable.cordoned else 0)


def test_plan_calls_new_provider_sets_traits_before_inventories() -> None:
    deployable = DeployableState(IDS[0], "h_x", "FPGA", frozenset({"HW_GPU_API_VULKAN"}), 4)
    kinds = [type(call) for call in plan_calls(build_providers(ROOT, [deployable]), {})]
    assert kinds == [CreateProvider, SetTraits, SetInventories]


def test_plan_calls_cordoned_provider_sets_inventories_before_traits() -> None:
    deployable = DeployableState(IDS[0], "h_x", "FPGA", frozenset({"HW_GPU_API_VULKAN"}), 4)
    closed = replace(deployable, traits=frozenset(), cordoned=True)
    for before, after, kinds in (
        (deployable, closed, [SetInventories, SetTraits]),
        (deployable, replace(closed, total=0), [SetInventories, SetTraits]),
        (closed, deployable, [SetTraits, SetInventories]),
    ):
        calls = plan_calls(build_providers(ROOT, [after]), build_providers(ROOT, [before]))
        assert [type(call) for call in calls] == kinds


def test_plan_calls_parent_loop_terminates() -> None:
    first, second = (Provider(i, i, j, {}, frozenset()) for i, j in (IDS[:2], IDS[1::-1]))
    assert len(plan_calls({first.uuid: first, second.uuid: second}, {})) == 2


def single_provider(deployable: DeployableState) -> Provider:
    """Return the provider of a single deployable."""
    return build_providers(ROOT, [deployable])[deployable.uuid]


@given(host_deployables().filter(bool), host_deployables().filter(bool))
def test_describe_drift_matches_plan_calls(
    left_deployables: list[DeployableState], right_deployables: list[DeployableState]
) -> None:
    desired, observed = single_provider(left_deployables[0]), single_provider(right_deployables[0])
    drift = describe_drift(desired, observed)
    calls = plan_calls({desired.uuid: desired}, {desired.uuid: observed})
    same_place = (desired.name, desired.parent_uuid) == (observed.name, observed.parent_uuid)
    assert bool(drift) is (bool(calls) or not same_place)
    assert len(set(drift)) == len(drift)


@given(host_deployables().filter(bool))
def test_describe_drift_equal_providers_gives_nothing(
    left_deployables: list[DeployableState],
) -> None:
    assert (
        describe_drift(single_provider(left_deployables[0]), single_provider(left_deployables[0]))
        == ()
    )
    assert describe_drift(single_provider(left_deployables[0]), None) == ("it was missing",)
