# SPDX-License-Identifier: Apache-2.0
"""Packing: how many complete sets of items fit into bins.

A set has ``count`` items of each kind, and an item takes ``size`` units of one bin. A bin has a
capacity for each kind: 0 for a kind that it cannot take, and a smaller one for a kind that only
some of its units can take. All units of smaller capacities are part of the larger ones.

If all items have one size, the greatest number of sets follows from Hall's condition: the items of
each subset of kinds must fit into the capacity for this subset. With different sizes this is bin
packing, which is NP-hard: the condition gives an upper bound, first-fit-decreasing a lower bound,
and a search between them is exact until its budget is spent; then the lower bound is the result.
The bounds have a budget too: after it is spent, they are those of single kinds and single bins.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

# Kinds of which all subsets are examined; with more kinds the upper bound is less tight.
MAX_KINDS = 8

# Bins of an exact search, which calls itself once for each of them.
MAX_BINS = 64

# Steps of bounds for each step of an exact search.
BOUND_STEPS = 100

# Steps that first-fit-decreasing takes for each kind and bin.
_FIRST_FIT_STEPS = 8

# Capacities of a bin, one for each kind; or of a kind, one for each bin.
Caps = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of items: the units of one item, and the number of items in a set."""

    size: int
    count: int


@dataclass(slots=True)
class Budget:
    """The numbers of steps that exact searches and the computation of bounds may still take.

    A step of a bound examines a kind, or a subset of kinds, and a bin: it takes a small part of the
    time of a step of a search.
    """

    steps: int
    bound_steps: int = -1

    def __post_init__(self) -> None:
        if self.bound_steps < 0:
            self.bound_steps = BOUND_STEPS * self.steps

    def spend_on_bound(self, steps: int) -> bool:
        """Take steps for a bound; if too few are left, take none and return False."""
        if steps > self.bound_steps:
            return False
        self.bound_steps -= steps
        return True

    def spend(self, steps: int = 1) -> bool:
        """Take steps; return False if the budget is exceeded, also at all later calls."""
        self.steps -= steps
        return self.steps >= 0


class Packing(NamedTuple):
    """A number of sets that fit; if it is not exact, one more may fit too."""

    sets: int
    is_exact: bool


def pack(kinds: Sequence[Kind], bins: Sequence[Caps], budget: Budget) -> Packing:
    """Return the greatest number of sets that fit.

    ``bins`` has the capacity of each bin for each kind.
    """
    kinds, bins = _merge_kinds(kinds, bins)
    high, is_tight = _upper_bound(kinds, bins, budget)
    if is_tight and len({kind.size for kind in kinds}) == 1:
        return Packing(high, is_exact=True)
    # Bisection: if a number of sets fits, each smaller number does.
    low = _largest_first_fit(kinds, bins, high, budget)
    if low < high and len(bins) > MAX_BINS:
        return Packing(low, is_exact=False)
    while low < high:
        middle = (low + high + 1) // 2
        fits = _Search(kinds, bins, budget).fits(middle)
        if fits is None:
            return Packing(low, is_exact=False)
        low, high = (middle, high) if fits else (low, middle - 1)
    return Packing(low, is_exact=True)


def fits_once(kinds: Sequence[Kind], bins: Sequence[Caps], budget: Budget) -> bool | None:
    """Return whether one set fits; None if the budget is spent before that is known."""
    if not bins:
        return False
    kinds, bins = _merge_kinds(kinds, bins)
    high, is_tight = _upper_bound(kinds, bins, budget)
    if high < 1:
        return False
    if is_tight and len({kind.size for kind in kinds}) == 1:
        return True
    has_budget = budget.spend_on_bound(_FIRST_FIT_STEPS * len(kinds) * len(bins))
    if has_budget and _first_fit(kinds, bins, 1):
        return True
    return None if len(bins) > MAX_BINS else _Search(kinds, bins, budget).fits(1)


def _merge_kinds(kinds: Sequence[Kind], bins: Sequence[Caps]) -> tuple[list[Kind], list[Caps]]:
    """Merge kinds of one size and with one capacity in each bin: their items are equal."""
    counts = Counter[tuple[int, Caps]]()
    for number, kind in enumerate(kinds):
        counts[kind.size, tuple(caps[number] for caps in bins)] += kind.count
    merged = [Kind(size, count) for (size, _), count in counts.items()]
    return merged, list(zip(*(column for _, column in counts), strict=True))


class _Bound(NamedTuple):
    """An upper bound of the sets; ``is_tight`` is whether it considers all subsets of kinds."""

    sets: int
    is_tight: bool


def _upper_bound(kinds: Sequence[Kind], bins: Sequence[Caps], budget: Budget) -> _Bound:
    """Return an upper bound of the number of sets that fit."""
    columns = [tuple(caps[n] for caps in bins) for n in range(len(kinds))]
    largest = tuple(max(caps) for caps in bins)
    # Items fill a bin in multiples of this: the rest of a bin is no room.
    divisor = gcd(*(kind.size for kind in kinds))
    units = sum(kind.size * kind.count for kind in kinds)
    high = _available(largest, divisor) // units
    for kind, column in zip(kinds, columns, strict=True):
        high = min(high, _available(column, kind.size) // (kind.size * kind.count))
    # Of two kinds these are all subsets; of more there are 2 to the power of their number.
    is_tight = len(kinds) <= 2 or (
        len(kinds) <= MAX_KINDS and budget.spend_on_bound(len(bins) << len(kinds))
    )
    if is_tight and len(kinds) > 2:
        high = min(high, *_subset_bounds(kinds, columns))
    return _Bound(high, is_tight)


class _Subset(NamedTuple):
    """A subset of kinds: the common divisor of its sizes, the units of a set, the caps of bins."""

    divisor: int
    units: int
    caps: Caps


def _subset_bounds(kinds: Sequence[Kind], columns: Sequence[Caps]) -> Iterator[int]:
    """Yield the number of sets that each subset of kinds allows."""
    empty = _Subset(divisor=0, units=0, caps=(0,) * len(columns[0]))
    subsets = [empty]
    for kind, column in zip(kinds, columns, strict=True):
        # Each subset so far, with this kind added: together all subsets that have the kind.
        for smaller in list(subsets):
            subset = _Subset(
                divisor=gcd(smaller.divisor, kind.size),
                units=smaller.units + kind.size * kind.count,
                caps=tuple(map(max, smaller.caps, column)),
            )
            yield _available(subset.caps, subset.divisor) // subset.units
            subsets.append(subset)


def _available(caps: Caps, unit: int) -> int:
    """Return the capacity of all bins in multiples of a unit."""
    return sum(caps) if unit == 1 else sum(cap // unit * unit for cap in caps)


def _room(kinds: Sequence[Kind], caps: Caps, content: Sequence[int], number: int) -> int:
    """Return how many more items of the kind ``number`` fit into a bin.

    ``content`` has the number of items of each kind that the bin has already.
    """
    size, limit = kinds[number].size, caps[number]
    room = limit
    # All units for this kind are part of each larger capacity, which other kinds use too: an item
    # takes room in all of them.
    for cap in set(caps):
        if cap >= limit:
            # A kind with a capacity up to this one takes all its units from this one.
            used = 0
            for kind, items, other in zip(kinds, content, caps, strict=True):
                if other <= cap:
                    used += kind.size * items
            room = min(room, cap - used)
    return room // size


def _largest_first_fit(
    kinds: Sequence[Kind], bins: Sequence[Caps], high: int, budget: Budget
) -> int:
    """Return a number of sets, at most ``high``, that first-fit-decreasing can place.

    If the budget is spent, the number may be smaller, but is at least that of ``_fit_alone``.
    """
    low = min(high, sum(_fit_alone(kinds, caps) for caps in bins))
    while low < high and budget.spend_on_bound(_FIRST_FIT_STEPS * len(kinds) * len(bins)):
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _first_fit(kinds, bins, middle) else (low, middle - 1)
    return low


def _fit_alone(kinds: Sequence[Kind], caps: Caps) -> int:
    """Return the number of sets that fit into one bin without the others."""
    return min(
        cap
        // sum(
            kind.size * kind.count for kind, other in zip(kinds, caps, strict=True) if other <= cap
        )
        for cap in set(caps)
    )


def _first_fit(kinds: Sequence[Kind], bins: Sequence[Caps], sets: int) -> bool:
    """Return whether the items of all kinds fit when the largest ones are placed first."""
    # Bins that take few kinds first, then small ones: the others stay free for other kinds.
    ordered = sorted(bins, key=lambda caps: (sum(map(bool, caps)), sum(caps)))
    contents = [[0] * len(kinds) for _ in bins]
    room_of_kind = [sum(caps[number] for caps in bins) for number in range(len(kinds))]
    for number in sorted(range(len(kinds)), key=lambda n: (-kinds[n].size, room_of_kind[n])):
        left = sets * kinds[number].count
        for caps, content in zip(ordered, contents, strict=True):
            if not left:
                break
            if caps[number] >= kinds[number].size:
                placed = min(left, _room(kinds, caps, content, number))
                content[number] += placed
                left -= placed
        if left:
            return False
    return True


@dataclass(slots=True)
class _Search:
    """An exact search: fill one bin after the other, in every way that leaves no room unused."""

    kinds: Sequence[Kind]
    bins: Sequence[Caps]
    budget: Budget
    failed: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)

    def fits(self, sets: int) -> bool | None:
        """Return whether this number of sets fits; None if the budget is spent."""
        items = tuple(sets * kind.count for kind in self.kinds)
        fits = self._fill(0, items)
        return None if not fits and self.budget.steps < 0 else fits

    def _fill(self, number: int, left: tuple[int, ...]) -> bool:
        """Return whether items fit into the bins from ``number`` on; ``left`` counts each kind.

        Return False also when the budget is spent: ``fits`` tells both apart.
        """
        if not any(left):
            return True
        # The ways to the same rest are many, and its result depends on the rest alone.
        state = (number, left)
        if number == len(self.bins) or state in self.failed or not self.budget.spend():
            return False
        for content in self._contents(number, left):
            rest = tuple(have - put for have, put in zip(left, content, strict=True))
            if self._fill(number + 1, rest):
                return True
            if self.budget.steps < 0:
                return False  # not known, so not recorded as failed
        self.failed.add(state)
        return False

    def _contents(self, number: int, left: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the numbers of items that a bin can take so that no further item fits.

        The result is empty if the budget is spent.
        """
        caps, last = self.bins[number], len(self.kinds) - 1
        heads: list[tuple[int, ...]] = [(0,) * len(self.kinds)]
        # Each number of items of all kinds but the last, and of the last kind as many as then fit.
        for n in range(last):
            shorter_heads, heads = heads, []
            for head in shorter_heads:
                most = min(left[n], _room(self.kinds, caps, head, n))
                # Eight of these ``most + 1`` heads take one step.
                if not self.budget.spend((most + 8) // 8):
                    return []
                heads += [_with_items(head, n, items) for items in range(most + 1)]
        contents = [
            _with_items(head, last, min(left[last], _room(self.kinds, caps, head, last)))
            for head in heads
        ]
        return [content for content in contents if self._is_full(caps, content, left)]

    def _is_full(self, caps: Caps, content: tuple[int, ...], left: tuple[int, ...]) -> bool:
        return not any(
            content[n] < left[n] and _room(self.kinds, caps, content, n) for n in range(len(caps))
        )


def _with_items(content: tuple[int, ...], number: int, items: int) -> tuple[int, ...]:
    return (*content[:number], items, *content[number + 1 :])
