# SPDX-License-Identifier: Apache-2.0
"""Groups of hosts that together keep a number of sets of each size offered.

A set that waits for the withdrawal of another one counts as offered: a second host would otherwise
be split for the same shortage.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from cyborg.core.device_sets.offers import (
    OVERLAPS,
    SPLIT,
    WAITS,
    Offer,
    SetFacts,
    UnitUse,
    find_owned_sets,
)
from cyborg.core.inventory.device_set import OfferState

# Hosts that an update plans in search of one to merge, unless all sizes are urgent. Each plan reads
# the sets of its host, and a bind may wait for it.
MAX_MERGE_PLANS = 4


@dataclass(frozen=True, slots=True)
class SizeSummary:
    """Numbers of free sets of one size on one host, by the reasons of their offers.

    ``offered`` are offered or wait (``WAITS``), ``inside`` overlap an offered set that is not
    smaller (``OVERLAPS``), ``split`` have their units in smaller offered sets (``SPLIT``).
    ``free_units`` is the number of free units of the host.
    """

    host: str
    size: int
    offered: int
    inside: int
    split: int
    free_units: int


def update_group(
    host: str,
    wanted: Mapping[int, int],
    summaries: Mapping[str, Sequence[SizeSummary]],
    plan: Callable[[str, Mapping[int, int]], Sequence[SizeSummary]],
    urgent: Collection[int] = (),
) -> None:
    """Plan the hosts of a group that a change of one host concerns.

    ``summaries`` has those of all hosts of the group, and ``plan`` plans a host with a shortage and
    returns its new summaries. The first plan is that of the changed host; it splits no set for the
    group. Then, smallest size first, one host after the other is split until the size is not short.
    This may make a larger size short, but only if no set of the small size is offered. A split for
    a larger size can leave sets that serve a smaller one: the sizes are looked at again. At the end
    one host that offers small sets which the group now has elsewhere gets its large set back. The
    search for it ends after ``MAX_MERGE_PLANS`` hosts, but not if all sizes are urgent: the others
    would never be planned otherwise.

    Each plan serves each size that is short, but the last wanted sets of a larger size are split
    only for ``urgent`` sizes, and for sizes of which these plans withdraw sets. The caller passes
    the sizes of newly allocated sets, and every few minutes, and after a change of the
    configuration, all sizes. So in a full cloud a large set that is released stays whole for a
    while: if each shortage were served at once, the few sizes that are always short would take all
    of them.
    """
    by_host = dict(summaries)
    totals = count_offered(chain.from_iterable(by_host.values()))
    old_totals = Counter(totals)

    def replan(name: str, split_for: int | None = None) -> bool:
        """Plan a host, update the totals; return whether it offers other numbers of sets now."""
        local = count_offered(by_host.get(name, ()))
        by_host[name] = plan(name, share_shortage(wanted, totals, local, split_for))
        new = count_offered(by_host[name])
        totals.update(new)
        totals.subtract(local)
        # Only the offered numbers: summaries that were read count units in use differently.
        return new != local

    def is_spare(size: int) -> bool:
        """Return whether the group offers more sets of a size than it wants."""
        return totals[size] > wanted.get(size, 0)

    def split_hosts(size: int, *, is_urgent: bool) -> None:
        """Plan one host after the other for more sets of a size, until it is not short."""
        # Checked before all hosts of the group are ranked, which takes time.
        if size not in find_shortage(wanted, totals):
            return
        # Nor rank them if no larger set is spare: in a full cloud some sizes are always short.
        if not is_urgent and not any(n > size and is_spare(n) for n in totals):
            return
        for name in rank_hosts_to_split(size, [*chain.from_iterable(by_host.values())]):
            if size not in find_shortage(wanted, totals):
                return
            offered_sizes = [summary.size for summary in by_host[name] if summary.offered]
            # The ranked hosts all offer a larger set; its smallest one is split.
            larger = min(offered for offered in offered_sizes if offered > size)
            if (totals[size] or not is_urgent) and not is_spare(larger):
                continue  # sets of the larger size would be short for a second small one
            replan(name, size)

    replan(host)
    # Until nothing changes, and in one round for each size at most.
    for _ in wanted:
        before = dict(by_host)
        for size in sorted(wanted):
            is_urgent = size in urgent or totals[size] < old_totals[size]
            split_hosts(size, is_urgent=is_urgent)
        if by_host == before:
            break
    limit = None if wanted.keys() <= set(urgent) else MAX_MERGE_PLANS
    candidates = rank_hosts_to_merge(wanted, [*chain.from_iterable(by_host.values())])
    for name in candidates[:limit]:
        if replan(name):
            break


def summarize(
    host: str,
    sets: Iterable[SetFacts],
    uses: Mapping[str, UnitUse],
    plan: Mapping[int, Offer],
) -> list[SizeSummary]:
    """Return the summaries of a planned host, in the order of the sizes."""
    sets = list(sets)
    owned = find_owned_sets(uses)
    free_units = len({unit for fact in sets for unit in fact.units} - uses.keys())
    counts: dict[int, Counter[str]] = {fact.size: Counter() for fact in sets}
    for fact in sets:
        if fact.id not in owned:
            counts[fact.size][_classify(plan[fact.id])] += 1
    return [
        SizeSummary(
            host=host,
            size=size,
            offered=numbers["offered"],
            inside=numbers[OVERLAPS],
            split=numbers[SPLIT],
            free_units=free_units,
        )
        for size, numbers in sorted(counts.items())
    ]


def is_offered(offer: Offer) -> bool:
    """Return whether a plan offers a set, now or after the withdrawal of another one."""
    return offer.state is OfferState.OFFERED or (offer.reason or "").startswith(WAITS)


def _classify(offer: Offer) -> str:
    """Return "offered", or the start of the reason of a free set; "" for other sets."""
    if is_offered(offer):
        return "offered"
    reason = offer.reason or ""
    return next((start for start in (OVERLAPS, SPLIT) if reason.startswith(start)), "")


def find_shortage(wanted: Mapping[int, int], offered: Mapping[int, int]) -> dict[int, int]:
    """Return the number of sets of each size that are missing, smallest size first.

    ``offered`` has the number of sets of each size that are free and offered.
    """
    missing = {size: number - offered.get(size, 0) for size, number in sorted(wanted.items())}
    return {size: number for size, number in missing.items() if number > 0}


def count_offered(summaries: Iterable[SizeSummary]) -> Counter[int]:
    """Return the number of offered sets of each size."""
    totals = Counter[int]()
    for summary in summaries:
        if summary.offered:
            totals[summary.size] += summary.offered
    return totals


def share_shortage(
    wanted: Mapping[int, int],
    totals: Mapping[int, int],
    local: Mapping[int, int],
    split_for: int | None = None,
) -> dict[int, int]:
    """Return the shortage that a host of a group serves, for its plan.

    ``totals`` and ``local`` are the numbers of offered sets by size, of the group and of the host.
    Of the sets that the other hosts lack, the host keeps those that it offers already; of the size
    ``split_for`` it serves all.
    """
    # What the group would lack without this host is the shortage of ``elsewhere``.
    elsewhere = {size: number - local.get(size, 0) for size, number in totals.items()}
    shares: dict[int, int] = {}
    for size, number in find_shortage(wanted, elsewhere).items():
        share = number if size == split_for else min(number, local.get(size, 0))
        if share:
            shares[size] = share
    return shares


def rank_hosts_to_split(size: int, summaries: Sequence[SizeSummary]) -> list[str]:
    """Return the hosts that can offer sets of a size instead of a larger one, the best first.

    That is the host whose smallest offered set above the size is the smallest, and among these the
    one with the fewest free units: the emptiest hosts stay whole.
    """
    able = {summary.host for summary in summaries if summary.size == size and summary.inside}
    best: dict[str, tuple[int, int]] = {}
    for summary in summaries:
        if summary.host in able and summary.size > size and summary.offered:
            key = summary.size, summary.free_units
            best[summary.host] = min(key, best.get(summary.host, key))
    return sorted(best, key=lambda host: (best[host], host))


def rank_hosts_to_merge(wanted: Mapping[int, int], summaries: Sequence[SizeSummary]) -> list[str]:
    """Return the hosts that may offer a large set instead of small ones, the best first.

    These are hosts with a split set, and with an offered smaller one of which the group has more
    than it wants. The best is the one with the largest split set, then with the most free units.
    """
    totals = count_offered(summaries)
    smallest_spare: dict[str, int] = {}
    for summary in summaries:
        if summary.offered and totals[summary.size] > wanted.get(summary.size, 0):
            smallest = smallest_spare.get(summary.host, summary.size)
            smallest_spare[summary.host] = min(summary.size, smallest)
    best: dict[str, tuple[int, int]] = {}
    for summary in summaries:
        spare = smallest_spare.get(summary.host)
        if summary.split and spare is not None and spare < summary.size:
            key = -summary.size, -summary.free_units
            best[summary.host] = min(key, best.get(summary.host, key))
    return sorted(best, key=lambda host: (best[host], host))
