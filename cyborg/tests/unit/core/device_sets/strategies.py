# SPDX-License-Identifier: Apache-2.0
"""Random hosts with device sets, for property tests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from cyborg.core.device_sets.offers import Offer, SetFacts, UnitUse
from cyborg.core.inventory.device_set import OfferState
from cyborg.tests.fixtures.device_sets.families import A100, B200, H100, Family


class Host(NamedTuple):
    """The sets of a host, and its units that are not free."""

    sets: list[SetFacts]
    uses: dict[str, UnitUse]


@st.composite
def families(draw: st.DrawFn, max_units: int, max_sets: int) -> Family:
    """Return a family of different sets, of any form."""
    units = [f"u{number}" for number in range(draw(st.integers(1, max_units)))]
    sets = st.frozensets(st.sampled_from(units), min_size=1)
    found = draw(st.lists(sets, min_size=1, max_size=max_sets, unique=True))
    return {f"s{number}": members for number, members in enumerate(found)}


def any_family() -> st.SearchStrategy[Family]:
    """Return a strategy of small and large random families, and of the HGX tables."""
    return st.one_of(families(6, 10), families(16, 64), st.sampled_from([H100, B200, A100]))


@st.composite
def hosts(draw: st.DrawFn, family: st.SearchStrategy[Family], *, consistent: bool = False) -> Host:
    """Return a host in any state; ``consistent``: in one that plans alone can lead to."""
    members = draw(family)
    # The plan takes an allocated set as an offered one: its units say that it has an owner.
    states = st.sampled_from([None, *(s for s in OfferState if s is not OfferState.ALLOCATED)])
    obstacles = st.sampled_from([None, None, None, "device d1 is unhealthy: replace it"])
    sets: list[SetFacts] = []
    blocked: set[str] = set()
    for number, (name, units) in enumerate(members.items()):
        state = draw(states)
        # Only disjoint sets are offered or were offered when they were withdrawn.
        if consistent and state in (OfferState.OFFERED, OfferState.WITHDRAWING):
            state = state if blocked.isdisjoint(units) else OfferState.WITHHELD
            blocked |= units if state is not OfferState.WITHHELD else set()
        sets.append(SetFacts(number, name, units, state, draw(obstacles)))
    uses: dict[str, UnitUse] = {}
    for fact in draw(st.lists(st.sampled_from(sets), max_size=4)):
        if uses.keys().isdisjoint(fact.units):
            use = UnitUse(fact.id, cleaning=draw(st.booleans()))
            # A part of a set is in use after a part of its units was released by force, or cleaned.
            part = draw(st.sampled_from([fact.units, frozenset([min(fact.units)])]))
            uses |= dict.fromkeys(part, use)
    everything = sorted(frozenset().union(*members.values()))
    for unit in draw(st.lists(st.sampled_from(everything), max_size=2)):
        uses.setdefault(unit, UnitUse())
    return Host(sets, uses)


def apply_plan(sets: Sequence[SetFacts], plan: Mapping[int, Offer]) -> list[SetFacts]:
    """Return the sets with the states of a plan."""
    return [replace(fact, state=plan[fact.id].state) for fact in sets]


def shortages() -> st.SearchStrategy[dict[int, int]]:
    """Return a strategy of shortages by size."""
    return st.dictionaries(st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(1, 4), max_size=4)
