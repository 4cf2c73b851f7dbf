# SPDX-License-Identifier: Apache-2.0
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given

from cyborg.core.device_sets.offers import (
    MAX_REASON,
    OVERLAPS,
    SPLIT,
    WAITS,
    Offer,
    SetFacts,
    UnitUse,
    find_owned_sets,
    plan_offers,
)
from cyborg.core.inventory.device_set import OfferMode, OfferState
from cyborg.tests.fixtures.device_sets.families import A100, B200, H100, Family, make_facts
from cyborg.tests.unit.core.device_sets.strategies import (
    Host,
    any_family,
    apply_plan,
    families,
    hosts,
    shortages,
)

OFFERED, WITHDRAWING, WITHHELD = (
    OfferState.OFFERED,
    OfferState.WITHDRAWING,
    OfferState.WITHHELD,
)
DISJOINT, ALL = OfferMode.DISJOINT, OfferMode.ALL
TRANSITIONS = {
    *((None, OFFERED), (None, WITHHELD), (WITHHELD, OFFERED), (WITHHELD, WITHHELD)),
    *((OFFERED, OFFERED), (OFFERED, WITHDRAWING)),
    *((WITHDRAWING, WITHDRAWING), (WITHDRAWING, OFFERED)),
}


def plan(
    sets: Sequence[SetFacts],
    uses: Mapping[str, UnitUse] | None = None,
    shortage: Mapping[int, int] | None = None,
    mode: OfferMode = DISJOINT,
) -> dict[str, Offer]:
    """Return the offers by the names of the sets."""
    found = plan_offers(sets, uses or {}, mode, shortage or {})
    return {fact.name: found[fact.id] for fact in sets}


def offered(offers: Mapping[str, Offer]) -> set[str]:
    return {name for name, offer in offers.items() if offer.state is OFFERED}


def facts(states: Mapping[str, OfferState | None], family: Family = H100) -> list[SetFacts]:
    """Return the sets of a family, withheld except these."""
    return [replace(s, state=states.get(s.name, WITHHELD)) for s in make_facts(family)]


def are_disjoint(sets: Iterable[SetFacts]) -> bool:
    return all(a.units.isdisjoint(b.units) for a, b in combinations(list(sets), 2))


def is_available(fact: SetFacts, host: Host) -> bool:
    """Return whether a set that no unit is allocated through can be offered."""
    cleaning = {unit for unit, use in host.uses.items() if use.cleaning}
    owned = find_owned_sets(host.uses)
    taken = host.uses.keys() - cleaning
    taken |= {unit for other in host.sets if other.id in owned for unit in other.units}
    kept = fact.state is OFFERED or cleaning.isdisjoint(fact.units)
    return fact.obstacle is None and kept and taken.isdisjoint(fact.units)


@given(hosts(any_family()), shortages())
def test_plan_offers_any_host_offers_disjoint_free_sets(
    host: Host, shortage: dict[int, int]
) -> None:
    offers = plan_offers(host.sets, host.uses, DISJOINT, shortage)
    chosen = [fact for fact in host.sets if offers[fact.id].state is OFFERED]
    assert are_disjoint(chosen)
    owned = find_owned_sets(host.uses)
    for fact in chosen:
        assert fact.id in owned or is_available(fact, host)
        assert fact.obstacle is None


@pytest.mark.parametrize("mode", OfferMode)
@given(hosts(any_family()), shortages())
def test_plan_offers_own_result_changes_nothing(
    mode: OfferMode, host: Host, shortage: dict[int, int]
) -> None:
    first = plan_offers(host.sets, host.uses, mode, shortage)
    sets = apply_plan(host.sets, first)
    second = plan_offers(sets, host.uses, mode, shortage)
    assert {n: offer.state for n, offer in second.items()} == {
        n: offer.state for n, offer in first.items()
    }


@pytest.mark.parametrize("mode", OfferMode)
@given(hosts(any_family()), shortages())
def test_plan_offers_any_host_makes_allowed_transitions_with_reasons(
    mode: OfferMode, host: Host, shortage: dict[int, int]
) -> None:
    offers = plan_offers(host.sets, host.uses, mode, shortage)
    assert offers.keys() == {fact.id for fact in host.sets}
    for fact in host.sets:
        offer = offers[fact.id]
        assert (fact.state, offer.state) in TRANSITIONS
        assert (offer.reason is None) == (offer.state is OFFERED)
        if offer.reason is not None:
            assert len(offer.reason) <= MAX_REASON
            blockers = [*fact.units, *(s.name for s in host.sets if s.units & fact.units)]
            assert fact.obstacle == offer.reason or any(name in offer.reason for name in blockers)


@given(hosts(any_family()))
def test_plan_offers_mode_all_offers_each_available_set(host: Host) -> None:
    offers = plan_offers(host.sets, host.uses, ALL, {})
    owned = find_owned_sets(host.uses)
    for fact in host.sets:
        if fact.id not in owned:
            assert (offers[fact.id].state is OFFERED) == is_available(fact, host)


def score(
    sets: Sequence[SetFacts], chosen: Iterable[SetFacts], shortage: Mapping[int, int]
) -> tuple[object, ...]:
    """Return the criteria of a family in the order of their weights, the largest is the best."""
    chosen = list(chosen)
    sizes = Counter(fact.size for fact in chosen)
    served = [min(number, sizes[size]) for size, number in sorted(shortage.items())]
    squares = sum(fact.size**2 for fact in chosen)
    stable = sum(fact.state is OFFERED for fact in chosen)
    return served, squares, stable, [fact in chosen for fact in sets]


@given(hosts(families(6, 9)), shortages())
def test_plan_offers_small_host_chooses_best_family(host: Host, shortage: dict[int, int]) -> None:
    """All families are compared; a wanted size is missing only if it cannot be offered."""
    uses = {unit: use for unit, use in host.uses.items() if not use.cleaning}
    host = Host(host.sets, uses)
    free = [fact for fact in host.sets if is_available(fact, host)]
    all_families = (
        chosen
        for number in range(len(free) + 1)
        for chosen in combinations(free, number)
        if are_disjoint(chosen)
    )
    best = max(all_families, key=lambda chosen: score(host.sets, chosen, shortage))
    offers = plan_offers(host.sets, uses, DISJOINT, shortage)
    planned = [
        fact
        for fact in free
        if offers[fact.id].state is OFFERED or (offers[fact.id].reason or "").startswith(WAITS)
    ]
    assert planned == list(best)


@given(hosts(any_family(), consistent=True), shortages())
def test_plan_offers_new_offer_overlaps_no_published_set(
    host: Host, shortage: dict[int, int]
) -> None:
    offers = plan_offers(host.sets, host.uses, DISJOINT, shortage)
    owned = find_owned_sets(host.uses)
    published = [s for s in host.sets if s.state in (OFFERED, WITHDRAWING)]
    for fact in host.sets:
        new = fact.state is not OFFERED and offers[fact.id].state is OFFERED
        if new and fact.id not in owned:
            others = [s for s in published if s.id != fact.id]
            assert all(s.units.isdisjoint(fact.units) for s in others)


@pytest.mark.parametrize(
    ("family", "whole"), [(H100, "0"), (B200, "1"), (A100, "0")], ids=["H100", "B200", "A100"]
)
def test_plan_offers_free_board_offers_it_whole(family: Family, whole: str) -> None:
    assert offered(plan(make_facts(family))) == {whole}


@pytest.mark.parametrize(
    ("family", "shortage", "sizes"),
    [
        (H100, {1: 2}, [4, 2, 1, 1]),
        (H100, {2: 1}, [4, 2, 2]),
        (H100, {1: 2, 2: 2, 4: 1, 8: 1}, [2, 2, 2, 1, 1]),
        (B200, {4: 1, 8: 1}, [4, 4]),
        (A100, {8: 1}, [8, 8]),
        (A100, {1: 1, 8: 1}, [8, 4, 2, 1, 1]),
        (A100, {1: 9}, [4, 2] + [1] * 10),
    ],
)
def test_plan_offers_shortage_splits_the_least(
    family: Family, shortage: dict[int, int], sizes: list[int]
) -> None:
    chosen = offered(plan(make_facts(family), shortage=shortage))
    assert sorted((len(family[name]) for name in chosen), reverse=True) == sizes


def test_plan_offers_h100_single_in_use_offers_its_partner_and_the_rest() -> None:
    """GPU 1 is a pair with GPU 3, not with GPU 2."""
    offers = plan(facts({"7": OFFERED}), {"01": UnitUse(set_id=7)})
    assert offered(offers) == {"7", "9", "4", "2"}
    assert {len(H100[name]) for name in ("4", "2")} == {2, 4}
    reason = "device 01 is in 7, which is allocated: until its release"
    assert offers["3"] == Offer(WITHHELD, reason)


def test_plan_offers_a100_four_in_use_offers_a_crossed_eight() -> None:
    """With GPUs 1 to 4 in use, 5 to 8 are an eight with 9 to 12 or with 13 to 16."""
    uses = dict.fromkeys(A100["7"], UnitUse(set_id=7))
    offers = plan(facts({"7": OFFERED}, A100), uses)
    # The eight of GPUs 9 to 16 is the first of three; the other two have GPUs 5 to 8.
    assert offered(offers) == {"7", "2", "8"}
    offers = plan(facts({"7": OFFERED, "6": OFFERED, "9": OFFERED}, A100), uses)
    assert A100["6"] == A100["8"] | A100["10"]
    assert offered(offers) == {"7", "6", "9"}


def test_plan_offers_equal_families_keeps_the_offered_one() -> None:
    pairs = {"left": frozenset("ab"), "right": frozenset("bc")}
    assert offered(plan(make_facts(pairs))) == {"left"}
    sets = [replace(s, state=OFFERED if s.name == "right" else WITHHELD) for s in make_facts(pairs)]
    assert offered(plan(sets)) == {"right"}


def test_plan_offers_split_waits_until_the_larger_set_is_withdrawn() -> None:
    first = plan(facts({"0": OFFERED}), shortage={4: 1})
    assert first["0"].state is WITHDRAWING
    assert first["0"].reason == "is split into 1, 2: until enough smaller sets are offered"
    assert first["1"] == first["2"] == Offer(WITHHELD, "waits until 0 is withdrawn")
    second = plan(facts({"0": WITHHELD}), shortage={4: 1})
    assert offered(second) == {"1", "2"}
    assert (second["0"].reason or "").startswith(SPLIT)
    assert second["7"].reason == "overlaps 1, which is offered: until sets of 1 are short"
    assert second["7"].reason.startswith(OVERLAPS)


def test_plan_offers_shortage_ends_offers_withdrawing_set_again() -> None:
    assert offered(plan(facts({"0": WITHDRAWING}))) == {"0"}


def test_plan_offers_withdrawing_set_is_allocated_offers_it_alone() -> None:
    uses = dict.fromkeys(H100["0"], UnitUse(set_id=0))
    offers = plan(facts({"0": WITHDRAWING}), uses, {1: 2})
    assert offered(offers) == {"0"}


def test_plan_offers_obstacle_withdraws_an_allocated_set() -> None:
    """The next server must not be allocated it in the moment of the release."""
    sets = [
        replace(s, obstacle="GPU 1 is unhealthy") if s.name == "7" else s
        for s in facts({"7": OFFERED})
    ]
    assert plan(sets, {"01": UnitUse(set_id=7)})["7"] == Offer(WITHDRAWING, "GPU 1 is unhealthy")


def test_plan_offers_cleaning_keeps_only_the_offered_set() -> None:
    uses = {"01": UnitUse(set_id=7, cleaning=True)}
    offers = plan(facts({"7": OFFERED, "9": OFFERED, "4": OFFERED, "2": OFFERED}), uses)
    assert offered(offers) == {"7", "9", "4", "2"}
    assert offers["3"].reason == "device 01 is being cleaned: until the end of that work"
    # A set that is not offered waits for the end of the cleaning.
    assert offered(plan(facts({}), uses)) == {"9", "4", "2"}


def test_plan_offers_unit_allocated_alone_names_it() -> None:
    offers = plan(make_facts(H100), {"02": UnitUse()})
    assert offers["8"].reason == "device 02 is allocated: until its release"
    assert offered(offers) == {"3", "10", "2"}


def test_plan_offers_part_of_set_released_keeps_it_for_itself() -> None:
    """GPU 3 of the pair was released by force: the partition of the pair is still active."""
    offers = plan(facts({"3": OFFERED}), {"01": UnitUse(set_id=3)})
    assert offers["3"].state is OFFERED
    assert offers["9"].reason == "device 03 is in 3, which is allocated: until its release"


def test_plan_offers_long_names_cuts_reasons() -> None:
    long = {"x" * 300: frozenset("ab"), "y" * 300: frozenset("a"), "z" * 300: frozenset("b")}
    sets = [replace(s, state=OFFERED if s.size == 2 else WITHHELD) for s in make_facts(long)]
    offers = plan(sets, shortage={1: 1})
    assert {len(offer.reason or "") for offer in offers.values()} == {MAX_REASON}


@pytest.mark.parametrize(
    ("family", "limit"), [(H100, 0.05), (B200, 0.05), (A100, 0.3)], ids=["H100", "B200", "A100"]
)
def test_plan_offers_board_takes_limited_time(family: Family, limit: float) -> None:
    """The CPU time of the best of three runs, in seconds; it is about 1 ms."""
    shortage = {1: 3, 2: 3, 4: 3, 8: 3, 16: 1}
    sets = make_facts(family)
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        plan_offers(sets, {}, DISJOINT, shortage)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < limit
