# SPDX-License-Identifier: Apache-2.0
"""What Placement should hold, and the way there."""

import uuid
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cyborg.core import names
from cyborg.core.provider_tree import (
    Call,
    CreateProvider,
    DeleteProvider,
    EnsureClasses,
    EnsureTraits,
    Part,
    Provider,
    SetInventories,
    SetTraits,
    difference,
    drift,
    wanted,
)
from cyborg.fixtures.strategies import CLASSES, TRAITS

ROOT = str(uuid.UUID(int=0))
IDS = [str(uuid.UUID(int=n)) for n in range(1, 6)]


@st.composite
def parts(draw: st.DrawFn) -> list[Part]:
    """The deployables of one host, some within others."""
    made: list[Part] = []
    for number in draw(st.lists(st.sampled_from(IDS), max_size=5, unique=True)):
        made.append(
            Part(
                uuid=number,
                name=f"h_{number}",
                resource_class=draw(st.sampled_from(CLASSES)),
                traits=draw(st.frozensets(st.sampled_from(TRAITS))),
                total=draw(st.integers(0, 4)),
                closed=draw(st.booleans()),
                parent_uuid=made[-1].uuid if made and draw(st.booleans()) else None,
            )
        )
    return made


def carry_out(actual: dict[str, Provider], calls: tuple[Call, ...]) -> dict[str, Provider]:
    """Do to a picture of Placement what the calls do, as strictly as Placement itself."""
    known, result = set(), dict(actual)
    for call in calls:
        match call:
            case EnsureClasses(custom) | EnsureTraits(custom):
                known |= custom
            case CreateProvider(new):
                assert new.uuid not in result
                assert new.parent_uuid in {ROOT, *result}
                result[new.uuid] = replace(new, inventories={}, traits=frozenset())
            case SetInventories(uuid_, inventories):
                assert {n for n in inventories if n.startswith("CUSTOM_")} <= known
                result[uuid_] = replace(result[uuid_], inventories=inventories)
            case SetTraits(uuid_, traits):
                assert {n for n in traits if n.startswith("CUSTOM_")} <= known
                result[uuid_] = replace(result[uuid_], traits=traits)
            case DeleteProvider(uuid_):
                assert uuid_ not in {p.parent_uuid for p in result.values()}
                del result[uuid_]
    return result


def under(parents: dict[str, Provider], other: dict[str, Provider]) -> dict[str, Provider]:
    """Give each provider the parent it has in the other tree, as a parent never changes here."""
    return {
        u: replace(p, parent_uuid=other[u].parent_uuid if u in other else p.parent_uuid)
        for u, p in parents.items()
    }


@given(parts())
def test_an_empty_placement_becomes_what_is_wanted(of: list[Part]) -> None:
    want = wanted(ROOT, of)
    assert carry_out({}, difference(want, {})) == want


@given(parts(), parts())
def test_a_second_pass_has_no_calls(before: list[Part], after: list[Part]) -> None:
    actual = wanted(ROOT, [replace(p, parent_uuid=None) for p in before])
    want = wanted(ROOT, [replace(p, parent_uuid=None) for p in after])
    goal = {**dict.fromkeys(actual), **want}
    result = carry_out(actual, difference(goal, actual))
    assert result == want
    assert difference(goal, result) == ()


@given(parts())
def test_children_go_before_their_parents(of: list[Part]) -> None:
    actual = wanted(ROOT, of)
    assert carry_out(actual, difference(dict.fromkeys(actual), actual)) == {}


@given(parts(), parts())
def test_what_is_not_named_is_not_touched(ours: list[Part], all_: list[Part]) -> None:
    actual = wanted(ROOT, all_)
    want = under(wanted(ROOT, ours), actual)
    foreign = set(actual) - set(want)
    for call in difference(want, actual):
        match call:
            case SetInventories(touched, _) | SetTraits(touched, _) | DeleteProvider(touched):
                assert touched not in foreign
            case CreateProvider(new):
                assert new.uuid not in foreign


@given(parts())
def test_a_closed_part_sells_nothing(of: list[Part]) -> None:
    want = wanted(ROOT, of)
    for part in of:
        provider = want[part.uuid]
        assert names.OWNER_TRAIT in provider.traits
        assert part.traits < provider.traits or names.OWNER_TRAIT in part.traits
        if part.total == 0:
            assert provider.inventories == {}
            continue
        inventory = provider.inventories[part.resource_class]
        assert inventory.total == part.total
        assert inventory.reserved == (part.total if part.closed else 0)


def test_a_new_provider_takes_three_calls_and_traits_come_first() -> None:
    part = Part(IDS[0], "h_x", "FPGA", frozenset({"HW_GPU_API_VULKAN"}), 4)
    kinds = [type(call) for call in difference(wanted(ROOT, [part]), {})]
    assert kinds == [CreateProvider, SetTraits, SetInventories]


def test_what_closes_is_closed_before_its_traits_change() -> None:
    part = Part(IDS[0], "h_x", "FPGA", frozenset({"HW_GPU_API_VULKAN"}), 4)
    closed = replace(part, traits=frozenset(), closed=True)
    for before, after, kinds in (
        (part, closed, [SetInventories, SetTraits]),
        (part, replace(closed, total=0), [SetInventories, SetTraits]),
        (closed, part, [SetTraits, SetInventories]),
    ):
        calls = difference(wanted(ROOT, [after]), wanted(ROOT, [before]))
        assert [type(call) for call in calls] == kinds


def test_a_loop_of_parents_does_not_hang() -> None:
    one, two = (Provider(i, i, j, {}, frozenset()) for i, j in (IDS[:2], IDS[1::-1]))
    assert len(difference({one.uuid: one, two.uuid: two}, {})) == 2


def one(part: Part) -> Provider:
    """Return the provider of a single part."""
    return wanted(ROOT, [part])[part.uuid]


@given(parts().filter(bool), parts().filter(bool))
def test_there_is_drift_where_there_is_a_difference(some: list[Part], others: list[Part]) -> None:
    ours, theirs = one(some[0]), one(others[0])
    told = drift(ours, theirs)
    calls = difference({ours.uuid: ours}, {ours.uuid: theirs})
    placed = (ours.name, ours.parent_uuid) == (theirs.name, theirs.parent_uuid)
    assert bool(told) is (bool(calls) or not placed)
    assert len(set(told)) == len(told)


@given(parts().filter(bool))
def test_nothing_drifts_by_itself(some: list[Part]) -> None:
    assert drift(one(some[0]), one(some[0])) == ()
    assert drift(one(some[0]), None) == ("it was missing",)
