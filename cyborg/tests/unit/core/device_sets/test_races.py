# SPDX-License-Identifier: Apache-2.0
"""Plans, Placement and servers that act at any time: no unit is allocated twice.

The plan decides from the database alone. Placement gets the states later, servers are allocated
sets before they claim them, and their allocations are deleted before or after the release.
"""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cyborg.core.device_sets.offers import SetFacts, UnitUse, plan_offers
from cyborg.core.inventory.device_set import OfferMode, OfferState
from cyborg.tests.fixtures.device_sets.families import A100, B200, H100, Family, make_facts
from cyborg.tests.unit.core.device_sets.strategies import apply_plan, families, shortages

NUMBER = st.integers(0, 10**6)


class Races(RuleBasedStateMachine):
    """One host, its providers in Placement, and servers."""

    def __init__(self) -> None:
        super().__init__()
        self.sets: list[SetFacts] = []
        self.uses: dict[str, UnitUse] = {}
        self.published: set[int] = set()  # not reserved in Placement
        self.allocated: set[int] = set()

    @initialize(family=st.one_of(families(8, 20), st.sampled_from([H100, B200, A100])))
    def create(self, family: Family) -> None:
        self.sets = make_facts(family)

    def select(self, number: int) -> SetFacts:
        return self.sets[number % len(self.sets)]

    def change(self, fact: SetFacts) -> None:
        self.sets[fact.id] = fact

    @rule(shortage=shortages())
    def plan(self, shortage: dict[int, int]) -> None:
        offers = plan_offers(self.sets, self.uses, OfferMode.DISJOINT, shortage)
        self.sets = apply_plan(self.sets, offers)

    @rule(number=NUMBER)
    def publish(self, number: int) -> None:
        fact = self.select(number)
        if fact.state is OfferState.OFFERED:
            self.published.add(fact.id)
        else:
            self.published.discard(fact.id)

    @rule()
    def publish_all(self) -> None:
        self.published = {s.id for s in self.sets if s.state is OfferState.OFFERED}

    @rule(number=NUMBER)
    def confirm(self, number: int) -> None:
        fact = self.select(number)
        in_use = fact.id in self.published or fact.id in self.allocated
        if fact.state is OfferState.WITHDRAWING and not in_use:
            self.change(replace(fact, state=OfferState.WITHHELD))

    @rule(number=NUMBER)
    def allocate(self, number: int) -> None:
        candidates = sorted(self.published - self.allocated)
        if candidates:
            self.allocated.add(candidates[number % len(candidates)])

    @rule(number=NUMBER)
    def claim(self, number: int) -> None:
        pending = sorted(n for n in self.allocated if not self.in_use(self.sets[n]))
        if pending:
            fact = self.sets[pending[number % len(pending)]]
            self.uses |= dict.fromkeys(fact.units, UnitUse(fact.id))

    def in_use(self, fact: SetFacts) -> bool:
        return not self.uses.keys().isdisjoint(fact.units)

    @rule(number=NUMBER)
    def delete_allocation(self, number: int) -> None:
        """Delete that of a server whose set is claimed, not claimed yet, or released."""
        allocated = sorted(self.allocated)
        if allocated:
            self.allocated.discard(allocated[number % len(allocated)])

    @rule(number=NUMBER, cleaning=st.booleans())
    def release(self, number: int, cleaning: bool) -> None:
        owned = sorted({use.set_id for use in self.uses.values() if use.set_id is not None})
        if not owned:
            return
        selected = owned[number % len(owned)]
        for unit in [u for u, use in self.uses.items() if use.set_id == selected]:
            if cleaning and not self.uses[unit].cleaning:
                self.uses[unit] = UnitUse(selected, cleaning=True)
            else:
                del self.uses[unit]

    @rule(number=NUMBER, obstacle=st.sampled_from([None, "device d1 is unhealthy"]))
    def set_obstacle(self, number: int, obstacle: str | None) -> None:
        self.change(replace(self.select(number), obstacle=obstacle))

    @invariant()
    def no_unit_is_allocated_twice(self) -> None:
        units = [unit for number in self.allocated for unit in self.sets[number].units]
        assert len(units) == len(set(units))

    @invariant()
    def no_unit_is_published_twice(self) -> None:
        units = [unit for n in self.published | self.allocated for unit in self.sets[n].units]
        assert len(units) == len(set(units))


TestRaces = Races.TestCase
TestRaces.settings = settings(stateful_step_count=60)
