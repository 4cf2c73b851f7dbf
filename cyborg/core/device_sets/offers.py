# SPDX-License-Identifier: Apache-2.0
"""The offer plan: which device sets of a host Placement offers.

A unit is a member of sets, such as a GPU; a set is any group of units. With the mode DISJOINT no
unit is in two offered sets, so that no two servers can be allocated one unit. The family of the
offered sets is the best one by these criteria, in this order:

1. The shortage that the host serves, the smallest size first.
2. The sum of the squares of the sizes. Each split of a set makes the sum smaller, by 2ab for a
   split into a and b: so large sets stay whole, and small ones are split first.
3. The number of sets that are offered now and stay so.
4. The order of the sets, so that equal hosts have equal plans.

The search is exact: each criterion is a sum over the sets of the family, except the shortage, which
is part of the state of the search. A plan of its own result changes nothing.

A change of the family takes time: a set is offered only after each overlapping set is withheld,
which Placement confirms. Until then the reason of the set begins with ``WAITS``.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, TypeVar

from cyborg.core.inventory.device_set import OfferMode, OfferState
from cyborg.core.text import abbreviate, join_limited

T = TypeVar("T")

MAX_REASON = 255
# Starts of the reasons of free sets; other sets have another reason, offered ones have none.
WAITS = "waits until "  # the set will be offered
OVERLAPS = "overlaps "  # a set that is not smaller is offered instead
SPLIT = "is split into "  # smaller sets are offered instead

_BLOCKING = (OfferState.OFFERED, OfferState.WITHDRAWING)


@dataclass(frozen=True, slots=True)
class SetFacts:
    """A device set as the plan needs it.

    ``name`` is unique on the host, and for reasons. ``state`` is None for a set that was never
    published. ``obstacle`` is a sentence: why the set cannot be used, whatever its units do.
    """

    id: int
    name: str
    units: frozenset[str]
    state: OfferState | None = None
    obstacle: str | None = None

    @property
    def size(self) -> int:
        """Return the number of units."""
        return len(self.units)


@dataclass(frozen=True, slots=True)
class UnitUse:
    """Why a unit is not free.

    ``set_id`` is the set through which it was allocated, None if it was allocated alone. A unit
    with ``cleaning`` was released, and is being cleaned.
    """

    set_id: int | None = None
    cleaning: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """The state of a set in the plan, and the reason why it is not offered, None if it is.

    The reason has at most ``MAX_REASON`` characters; it names the unit or set that blocks the set,
    and what ends this.
    """

    state: OfferState
    reason: str | None = None


def plan_offers(
    sets: Sequence[SetFacts],
    uses: Mapping[str, UnitUse],
    mode: OfferMode,
    shortage: Mapping[int, int],
) -> dict[int, Offer]:
    """Return the offer of each set of a host, by its id.

    ``sets`` are those of a pool (``pools``), and include all sets that have units in common;
    ``uses`` has the units that are not free, and ``shortage`` the number of free sets of each size
    that the pool should offer.

    A set is available if it has no obstacle and all its units are free, or allocated through the
    set itself; an allocated set stays offered. A set that is offered stays available while its
    units are cleaned: its inventory in Placement would otherwise change twice.
    """
    owned = find_owned_sets(uses)
    owners = {unit: fact for fact in sets if fact.id in owned for unit in fact.units}
    names = {fact.id: fact.name for fact in sets}
    hindrances = {fact.id: _find_hindrance(fact, uses, owners, names) for fact in sets}
    available = [fact for fact in sets if hindrances[fact.id] is None]
    disjoint = mode is OfferMode.DISJOINT
    family = _choose_family(available, uses, owners, shortage) if disjoint else available
    members = {fact.id for fact in family}
    plan: dict[int, Offer] = {}
    for fact in sets:
        reason = hindrances[fact.id]
        if reason is not None:
            plan[fact.id] = _refuse(fact, reason)
        elif fact.id not in members:
            plan[fact.id] = _refuse(fact, _explain_overlap(fact, family))
        # An owned set waits for no other one: its units are allocated through it already.
        elif disjoint and fact.id not in owned and (blocker := _find_blocker(fact, sets)):
            # The state stays while the set waits.
            state = fact.state or OfferState.WITHHELD
            plan[fact.id] = Offer(state, f"{WAITS}{blocker.name} is withdrawn"[:MAX_REASON])
        else:
            plan[fact.id] = Offer(OfferState.OFFERED)
    return plan


def find_owned_sets(uses: Mapping[str, UnitUse]) -> frozenset[int]:
    """Return the ids of the sets through which units are allocated.

    The units of a set are claimed together; after a forced release of some of them, the set is
    owned until the last one is released.
    """
    return frozenset(
        use.set_id for use in uses.values() if use.set_id is not None and not use.cleaning
    )


def _find_hindrance(
    fact: SetFacts,
    uses: Mapping[str, UnitUse],
    owners: Mapping[str, SetFacts],
    names: Mapping[int, str],
) -> str | None:
    """Return why a set is not available, None if it is. ``owners`` has the units of owned sets."""
    if fact.obstacle is not None:
        return fact.obstacle
    for unit in sorted(fact.units):
        use, owner = uses.get(unit), owners.get(unit)
        # A set that is offered stays so while its units are cleaned: see ``plan_offers``.
        if use is not None and use.cleaning and fact.state is not OfferState.OFFERED:
            return f"device {unit} is being cleaned: until the end of that work"
        # Also a unit without a use: one of an owned set that was released by force.
        if owner is not None and owner.id != fact.id:
            return f"device {unit} is in {owner.name}, which is allocated: until its release"
        if use is not None and not use.cleaning and use.set_id != fact.id:
            through = "" if use.set_id is None else f" through {names.get(use.set_id, use.set_id)}"
            return f"device {unit} is allocated{through}: until its release"
    return None


def _find_blocker(fact: SetFacts, sets: Sequence[SetFacts]) -> SetFacts | None:
    """Return a set that must be withdrawn before a set can be offered.

    Return None if there is no such set, or if the set is offered already.
    """
    if fact.state is OfferState.OFFERED:
        return None
    return next(
        (
            other
            for other in sets
            if other.id != fact.id and other.state in _BLOCKING and other.units & fact.units
        ),
        None,
    )


def _refuse(fact: SetFacts, reason: str) -> Offer:
    """Return the offer of a set that is not in the family."""
    published = fact.state in _BLOCKING
    state = OfferState.WITHDRAWING if published else OfferState.WITHHELD
    return Offer(state, abbreviate(reason, MAX_REASON))


def _explain_overlap(fact: SetFacts, family: Sequence[SetFacts]) -> str:
    """Return why a set is not in the family. Each set outside of it overlaps one in it."""
    rivals = sorted(
        (member for member in family if member.units & fact.units), key=lambda rival: -rival.size
    )
    if rivals[0].size >= fact.size:
        return f"{OVERLAPS}{rivals[0].name}, which is offered: until sets of {fact.size} are short"
    parts = join_limited([rival.name for rival in rivals], 4, nouns="sets")
    return f"{SPLIT}{parts}: until enough smaller sets are offered"


def _choose_family(
    available: Sequence[SetFacts],
    uses: Mapping[str, UnitUse],
    owners: Mapping[str, SetFacts],
    shortage: Mapping[int, int],
) -> list[SetFacts]:
    """Return the disjoint sets to offer, with those that are owned or being cleaned.

    ``available`` are the sets whose units are all free, that are owned, or that are offered while
    their units are being cleaned. ``uses`` and ``owners`` are by unit.
    """
    owned = {fact.id for fact in owners.values()}
    family = [fact for fact in available if fact.id in owned]
    taken = set(owners)
    candidates = []
    for fact in available:
        if fact.id in owned:
            continue
        # Units in use of an available set that nobody owns are being cleaned.
        is_being_cleaned = any(unit in uses for unit in fact.units)
        if is_being_cleaned:
            # Of two such sets with a common unit, as after a change of the mode, the first stays.
            if taken.isdisjoint(fact.units):
                family.append(fact)
                taken |= fact.units
        else:
            candidates.append(fact)
    candidates = [fact for fact in candidates if taken.isdisjoint(fact.units)]
    return family + _Search(candidates, shortage).run()


class _Option(NamedTuple):
    """A candidate: the bits of its units, its score, and the index of its size in the shortage.

    ``position`` is None if sets of its size are not short.
    """

    mask: int
    score: int
    position: int | None


class _Search:
    """The search for the best disjoint sets of candidates, all of which are free.

    The score of a family is one integer, the sum of the scores of its sets. Its lowest bits, one
    for each candidate, are also the family.
    """

    def __init__(self, candidates: Sequence[SetFacts], shortage: Mapping[int, int]) -> None:
        self._candidates = candidates
        units = _order_units(candidates)
        bits = {unit: 1 << number for number, unit in enumerate(units)}
        self._all = (1 << len(units)) - 1
        counts: dict[int, int] = {}
        # The candidates by the bit of their lowest unit.
        self._options: dict[int, list[_Option]] = {}
        sizes = sorted(size for size, number in shortage.items() if number > 0)
        count_bits = len(candidates).bit_length()
        # The bits of a score, from the lowest: one for each candidate, the number of sets that stay
        # offered, the sum of squares, the numbers of sets of the short sizes, smallest size last.
        square_shift = len(candidates) + count_bits
        for number, fact in enumerate(candidates):
            counts[fact.size] = counts.get(fact.size, 0) + 1
            mask = sum(bits[unit] for unit in fact.units)
            score = 1 << (len(candidates) - 1 - number)
            score += (fact.state is OfferState.OFFERED) << len(candidates)
            score += fact.size**2 << square_shift
            position = sizes.index(fact.size) if fact.size in sizes else None
            self._options.setdefault(mask & -mask, []).append(_Option(mask, score, position))
        self._sizes = sizes
        self._missing = tuple(min(shortage[size], counts.get(size, 0)) for size in sizes)
        gain_shift = square_shift + sum(fact.size**2 for fact in candidates).bit_length()
        self._gain_shifts = [gain_shift + count_bits * n for n in reversed(range(len(sizes)))]
        self._scores: dict[tuple[int, tuple[int, ...]], int] = {}

    def run(self) -> list[SetFacts]:
        """Return the sets of the best family."""
        score = self._best(self._all, self._missing)
        last = len(self._candidates) - 1
        return [fact for n, fact in enumerate(self._candidates) if score >> (last - n) & 1]

    def _best(self, free: int, missing: tuple[int, ...]) -> int:
        """Return the best score for free units, if these numbers of sets are still missing."""
        if not free:
            return 0
        # Cut to the numbers of sets that the units suffice for: equal states are searched once.
        number = free.bit_count()
        missing = tuple(min(n, number // s) for n, s in zip(missing, self._sizes, strict=True))
        key = free, missing
        if key in self._scores:
            return self._scores[key]
        # A family has the lowest free unit in one of these sets, or leaves it out.
        lowest = free & -free
        options = self._options.get(lowest, [])
        best = 0
        # No family is the best that leaves out a unit which is a set by itself.
        if all(option.mask != lowest for option in options):
            best = self._best(free ^ lowest, missing)
        for mask, score, position in options:
            if mask & ~free:
                continue  # a unit of the set is not free
            gain, left = score, missing
            if position is not None and missing[position]:
                gain += 1 << self._gain_shifts[position]
                left = (*missing[:position], missing[position] - 1, *missing[position + 1 :])
            best = max(best, gain + self._best(free ^ mask, left))
        self._scores[key] = best
        return best


def _order_units(sets: Iterable[SetFacts]) -> list[str]:
    """Return the units of sets, those of overlapping sets one after the other.

    The search decides in this order. Independent parts that it decided in turns would multiply its
    states.
    """
    order: dict[str, None] = {}
    parts = join(sets, attrgetter("units"))
    for part in sorted(sorted(set().union(*(fact.units for fact in part))) for part in parts):
        order |= dict.fromkeys(part)
    return list(order)


def join(values: Iterable[T], keys: Callable[[T], Iterable[Hashable]]) -> list[list[T]]:
    """Return lists of values that have a key in common, directly or through others, in order."""
    parts: list[tuple[list[T], set[Hashable]]] = []
    for value in values:
        own = set(keys(value))
        joined = [part for part in parts if not own.isdisjoint(part[1])]
        parts = [part for part in parts if own.isdisjoint(part[1])]
        members = [each for part in joined for each in part[0]]
        parts.append(([*members, value], own.union(*(part[1] for part in joined))))
    return [part for part, _ in parts]
