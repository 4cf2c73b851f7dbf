# SPDX-License-Identifier: Apache-2.0
import time
from collections.abc import Mapping
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.device_sets.offers import SetFacts, join, plan_offers
from cyborg.core.device_sets.pools import ConfiguredSet, Pool, SetOptions, make_pools
from cyborg.core.inventory.device_set import OfferMode, OfferState
from cyborg.tests.fixtures.device_sets.families import A100, H100, Family

GROUPS = st.sampled_from(["", "g", "h"])
MODES = st.sampled_from(list(OfferMode))


def configure(
    *families: tuple[Family, SetOptions], prefix: bool = True, start: int = 0
) -> list[ConfiguredSet]:
    """Return the sets of sources; with ``prefix``, two sources have no common unit."""
    found: list[ConfiguredSet] = []
    for number, (family, options) in enumerate(families):
        for name, units in family.items():
            own = {f"{number}-{unit}" for unit in units} if prefix else units
            facts = SetFacts(start + len(found), f"{options.source}:{name}", frozenset(own))
            found.append(ConfiguredSet(facts, options))
    return found


def offered_sizes(pools: list[Pool], wanted: Mapping[int, int] | None = None) -> list[int]:
    """Return the sizes of the sets that the plans of pools offer, largest first."""
    sizes = []
    for pool in pools:
        plan = plan_offers(pool.sets, {}, pool.mode, pool.wanted if wanted is None else wanted)
        sizes += [s.size for s in pool.sets if plan[s.id].state is OfferState.OFFERED]
    return sorted(sizes, reverse=True)


def test_parts_of_one_source_serve_its_wanted_sets_together() -> None:
    options = SetOptions("pairs", wanted={1: 2})
    (pool,) = pools = make_pools(configure((H100, options), (H100, options)))
    assert len(pool.sets) == 2 * len(H100)
    # One board is split for both single devices, the other one stays whole.
    assert offered_sizes(pools) == [8, 4, 2, 1, 1]


def test_sources_without_group_and_common_devices_count_apart() -> None:
    wanted = {1: 2}
    sets = configure((H100, SetOptions("a", wanted=wanted)), (H100, SetOptions("b", wanted=wanted)))
    pools = make_pools(sets)
    assert [pool.wanted for pool in pools] == [wanted, wanted]
    assert offered_sizes(pools) == [4, 4, 2, 2, 1, 1, 1, 1]


def test_sources_of_one_group_count_together() -> None:
    sets = configure(
        (H100, SetOptions("a", group="g", wanted={1: 2})),
        (H100, SetOptions("b", group="g", wanted={1: 2})),
    )
    (pool,) = make_pools(sets)
    assert pool.group == "g"
    assert offered_sizes([pool]) == [8, 4, 2, 1, 1]


def test_sources_of_one_group_with_two_modes_are_planned_apart() -> None:
    sets = configure(
        (H100, SetOptions("a", group="g")), (H100, SetOptions("b", OfferMode.ALL, "g"))
    )
    assert {pool.mode: len(pool.sets) for pool in make_pools(sets)} == {
        OfferMode.DISJOINT: len(H100),
        OfferMode.ALL: len(H100),
    }


def test_sources_with_common_devices_are_disjoint_and_want_the_largest_numbers() -> None:
    pairs, fours = {"p": frozenset("ab")}, {"f": frozenset("abcd")}
    sets = configure(
        (pairs, SetOptions("a", OfferMode.ALL, wanted={2: 1, 4: 2})),
        (fours, SetOptions("b", wanted={2: 3, 4: 1})),
        prefix=False,
    )
    (pool,) = make_pools(sets)
    assert (pool.mode, pool.wanted) == (OfferMode.DISJOINT, {2: 3, 4: 2})


@pytest.mark.parametrize(("first", "second"), [("g", "h"), ("g", ""), ("", "h")])
def test_sources_with_common_devices_and_two_groups_refuses_the_second(
    first: str, second: str
) -> None:
    pairs, fours = {"p": frozenset("ab")}, {"f": frozenset("abcd")}
    # Whatever the order in which a host reports them.
    sets = configure(
        (fours, SetOptions("b", group=second, wanted={4: 1})),
        (pairs, SetOptions("a", group=first, wanted={2: 1})),
        prefix=False,
    )
    (pool,) = make_pools(sets)
    assert (pool.group, pool.wanted) == (first, {2: 1})
    reasons = {facts.name: facts.obstacle for facts in pool.sets}
    assert reasons["a:p"] is None
    assert reasons["b:f"] == (
        f"source b has the group {second or 'none'}, and source a, which has devices in common, "
        f"the group {first or 'none'}: configure the same group for both"
    )


def test_set_with_an_obstacle_decides_no_options() -> None:
    """A set that a server still has, although its source no longer finds it."""
    old = SetFacts(0, "a:old", frozenset("ab"), obstacle="device ab is draining")
    new = SetFacts(1, "a:new", frozenset("bc"))
    sets = [
        ConfiguredSet(old, SetOptions("a", group="g", wanted={2: 5})),
        ConfiguredSet(new, SetOptions("a", group="h", wanted={2: 1})),
    ]
    (pool,) = make_pools(sets)
    assert (pool.group, pool.wanted) == ("h", {2: 1})
    assert pool.sets == [old, new]


@st.composite
def configured(draw: st.DrawFn) -> list[ConfiguredSet]:
    options = [
        SetOptions(name, draw(MODES), draw(GROUPS), {1: draw(st.integers(0, 3))}) for name in "abc"
    ]
    units = st.frozensets(st.sampled_from("stuvwxyz"), min_size=1, max_size=4)
    members = draw(st.lists(st.tuples(units, st.sampled_from(options)), max_size=8))
    return [
        ConfiguredSet(SetFacts(n, f"s{n}", found), each) for n, (found, each) in enumerate(members)
    ]


@given(configured())
def test_pools_have_each_set_once_and_no_common_units(sets: list[ConfiguredSet]) -> None:
    pools = make_pools(sets)
    assert sorted(facts.id for pool in pools for facts in pool.sets) == list(range(len(sets)))
    units = [frozenset().union(*(facts.units for facts in pool.sets)) for pool in pools]
    assert all(a.isdisjoint(b) for a, b in combinations(units, 2))
    options = {each.facts.id: each.options for each in sets}
    for pool in pools:
        usable = [facts for facts in pool.sets if facts.obstacle is None]
        assert {options[facts.id].group for facts in usable} == {pool.group}
        if pool.group:
            others = [each for each in pools if (each.group, each.mode) == (pool.group, pool.mode)]
            assert others == [pool]


def test_join_finds_chains_in_order() -> None:
    assert join(["ab", "x", "cd", "bc", "y"], set) == [["x"], ["ab", "cd", "bc"], ["y"]]
    assert join([], set) == []


@pytest.mark.parametrize("number", [2, 4])
def test_plan_of_a_pool_with_several_boards_takes_limited_time(number: int) -> None:
    """The CPU time of the best of three runs, in seconds, with units in turns."""
    shortage = {1: 3, 2: 3, 4: 3, 8: 3, 16: 1}
    sets = [
        SetFacts(board * 1000 + n, f"{board}:{name}", frozenset(f"{u}-{board}" for u in units))
        for board in range(number)
        for n, (name, units) in enumerate(A100.items())
    ]
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        plan_offers(sets, {}, OfferMode.DISJOINT, shortage)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.3 * number
