# SPDX-License-Identifier: Apache-2.0
"""Desired providers, and the calls that reconcile the actual ones."""

import uuid
from dataclasses import replace

import pytest
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


@given(host_deployables())
def test_plan_calls_from_empty_placement_creates_desired_providers(
    of: list[DeployableState],
) -> None:
    want = build_providers(ROOT, of)
    result: dict[str, Provider] = {}
    for provider in want.values():  # parents first
        result = execute_calls(result, plan_calls(provider, None))
    assert result == want


@given(host_deployables(), host_deployables())
def test_plan_calls_second_run_is_empty(
    before: list[DeployableState], after: list[DeployableState]
) -> None:
    actual = build_providers(ROOT, [replace(p, parent_uuid=None) for p in before])
    want = build_providers(ROOT, [replace(p, parent_uuid=None) for p in after])
    result = actual
    for uuid_ in {**actual, **want}:
        result = execute_calls(result, plan_calls(want.get(uuid_), actual.get(uuid_)))
    assert result == want
    assert [plan_calls(want.get(uuid_), result.get(uuid_)) for uuid_ in {**actual, **want}] == [
        () for _ in {**actual, **want}
    ]


@given(host_deployables(), host_deployables())
def test_plan_calls_changes_only_its_provider(
    own: list[DeployableState], others: list[DeployableState]
) -> None:
    actual = build_providers(ROOT, others)
    for uuid_, desired in build_providers(ROOT, own).items():
        for call in plan_calls(desired, actual.get(uuid_)):
            match call:
                case SetInventories(touched, _) | SetTraits(touched, _) | DeleteProvider(touched):
                    assert touched == uuid_
                case CreateProvider(new):
                    assert new == desired


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
    kinds = [type(call) for call in plan_calls(single_provider(deployable), None)]
    assert kinds == [CreateProvider, SetTraits, SetInventories]


def test_plan_calls_cordoned_provider_sets_inventories_before_traits() -> None:
    deployable = DeployableState(IDS[0], "h_x", "FPGA", frozenset({"HW_GPU_API_VULKAN"}), 4)
    closed = replace(deployable, traits=frozenset(), cordoned=True)
    for before, after, kinds in (
        (deployable, closed, [SetInventories, SetTraits]),
        (deployable, replace(closed, total=0), [SetInventories, SetTraits]),
        (closed, deployable, [SetTraits, SetInventories]),
    ):
        calls = plan_calls(single_provider(after), single_provider(before))
        assert [type(call) for call in calls] == kinds


def single_provider(deployable: DeployableState) -> Provider:
    """Return the provider of a single deployable."""
    return build_providers(ROOT, [deployable])[deployable.uuid]


@pytest.mark.slow
@given(host_deployables().filter(bool), host_deployables().filter(bool))
def test_describe_drift_matches_plan_calls(
    left_deployables: list[DeployableState], right_deployables: list[DeployableState]
) -> None:
    desired, observed = single_provider(left_deployables[0]), single_provider(right_deployables[0])
    drift = describe_drift(desired, observed)
    calls = plan_calls(desired, observed)
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
