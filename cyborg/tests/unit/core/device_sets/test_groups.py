# SPDX-License-Identifier: Apache-2.0
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cyborg.core.device_sets import groups
from cyborg.core.device_sets.groups import (
    SizeSummary,
    count_offered,
    find_shortage,
    rank_hosts_to_merge,
    rank_hosts_to_split,
    share_shortage,
    summarize,
    update_group,
)
from cyborg.core.device_sets.offers import SetFacts, UnitUse, plan_offers
from cyborg.core.inventory.device_set import OfferMode, OfferState
from cyborg.tests.fixtures.device_sets.families import H100, make_facts
from cyborg.tests.unit.core.device_sets.strategies import apply_plan

SIZES = (1, 2, 4, 8)


class Group:
    """H100 boards whose withdrawals end at once; ``owned`` are the sets in use of each host."""

    def __init__(self, wanted: Mapping[int, int], owned: Mapping[str, set[str]]) -> None:
        self.wanted = wanted
        self.sets: dict[str, list[SetFacts]] = {}
        self.uses: dict[str, dict[str, UnitUse]] = {}
        self.by_host: dict[str, list[SizeSummary]] = {}
        names = list(H100)
        for host, used in owned.items():
            self.sets[host] = make_facts(H100)
            self.uses[host] = {
                unit: UnitUse(names.index(name)) for name in used for unit in H100[name]
            }
        for host in owned:
            self.plan(host, {})

    def plan(self, host: str, shortage: Mapping[int, int]) -> list[SizeSummary]:
        """Plan a host, and again after the end of its withdrawals."""
        for _ in range(3):
            offers = plan_offers(self.sets[host], self.uses[host], OfferMode.DISJOINT, shortage)
            self.sets[host] = [
                replace(s, state=OfferState.WITHHELD) if s.state is OfferState.WITHDRAWING else s
                for s in apply_plan(self.sets[host], offers)
            ]
        self.by_host[host] = summarize(host, self.sets[host], self.uses[host], offers)
        return self.by_host[host]

    @property
    def summaries(self) -> list[SizeSummary]:
        return [summary for found in self.by_host.values() for summary in found]

    def update(self, host: str, urgent: Collection[int] = SIZES) -> None:
        update_group(host, self.wanted, self.by_host, self.plan, urgent)

    def offered(self, host: str) -> list[int]:
        """Return the sizes of the offered free sets of a host, largest first."""
        sizes = [s.size for s in self.summaries if s.host == host for _ in range(s.offered)]
        return sorted(sizes, reverse=True)


def test_find_shortage_counts_offered_sets() -> None:
    assert find_shortage({8: 1, 4: 2, 2: 2, 1: 0}, {4: 1, 2: 5}) == {4: 1, 8: 1}
    assert list(find_shortage({8: 1, 4: 2}, {})) == [4, 8]
    assert find_shortage({}, {1: 3}) == {}


def test_summarize_counts_free_sets_by_reason() -> None:
    group = Group({}, {"a": {"7"}})  # GPU 1
    counts = {s.size: (s.offered, s.inside, s.split, s.free_units) for s in group.summaries}
    assert counts == {1: (1, 6, 0, 7), 2: (1, 2, 0, 7), 4: (1, 0, 0, 7), 8: (0, 0, 0, 7)}


def test_summarize_split_board_counts_waiting_sets_as_offered() -> None:
    sets = [replace(s, state=OfferState.OFFERED if s.size == 8 else None) for s in make_facts(H100)]
    plan = plan_offers(sets, {}, OfferMode.DISJOINT, {4: 1})
    counts = {s.size: (s.offered, s.inside, s.split) for s in summarize("a", sets, {}, plan)}
    assert counts == {1: (0, 8, 0), 2: (0, 4, 0), 4: (2, 0, 0), 8: (0, 0, 1)}


def test_rank_hosts_to_split_prefers_smallest_set_then_fewest_free_units() -> None:
    group = Group(
        {},
        {
            "empty": set(),
            "four": {"1"},
            "four-and-pair": {"3", "8"},  # free: GPU 4, and 5 to 8
            "pair": {"1", "5"},
            "single": {"1", "5", "12"},  # nothing larger
        },
    )
    assert rank_hosts_to_split(1, group.summaries) == ["pair", "four", "four-and-pair", "empty"]
    assert rank_hosts_to_split(2, group.summaries) == ["four", "four-and-pair", "empty"]
    assert rank_hosts_to_split(8, group.summaries) == []


def test_share_shortage_keeps_local_sets_and_splits_for_one_size() -> None:
    wanted, totals, local = {1: 4, 2: 1, 4: 1, 8: 1}, {1: 3, 4: 1, 8: 1}, {1: 1, 4: 1}
    assert share_shortage(wanted, totals, local) == {1: 1, 4: 1}
    assert share_shortage(wanted, totals, local, split_for=1) == {1: 2, 4: 1}
    assert share_shortage(wanted, totals, local, split_for=2) == {1: 1, 2: 1, 4: 1}
    assert share_shortage({1: 1}, totals, {1: 2}) == {}


def test_group_short_of_singles_splits_the_smallest_remainder_only() -> None:
    group = Group({1: 2, 2: 1, 4: 1, 8: 1}, {"a": set(), "b": {"1"}, "c": {"1", "5"}})
    assert [group.offered(host) for host in "abc"] == [[8], [4], [2]]
    group.update("a")
    # The pair of c became two singles, then the four of b two pairs, then a lost its eight.
    assert [group.offered(host) for host in "abc"] == [[4, 4], [2, 2], [1, 1]]


def test_group_old_shortage_leaves_released_set_whole_until_it_is_urgent() -> None:
    group = Group({4: 1, 8: 1}, {"a": {"0"}, "b": {"0"}})
    group.uses["a"] = {}  # the server of eight GPUs is deleted
    group.update("a", urgent=())
    assert group.offered("a") == [8]
    group.update("b", urgent=(1, 2))
    assert group.offered("a") == [8]
    group.update("b", urgent=(4,))
    assert group.offered("a") == [4, 4]


def test_group_old_shortage_splits_a_spare_set_at_once() -> None:
    """Without a bind: such as after the release of a server, or the end of a fault."""
    group = Group({1: 2, 4: 1, 8: 1}, {"a": {"0"}, "b": {"0"}})
    group.uses["a"] = {}
    group.update("a", urgent=())
    assert group.offered("a") == [8], "the only one of its size"
    group.uses["b"] = {}
    group.update("b", urgent=())
    assert sorted(map(group.offered, "ab")) == [[4, 2, 1, 1], [8]]


def test_group_set_of_a_size_that_is_not_wanted_is_spare() -> None:
    group = Group({4: 1}, {"a": {"0"}})
    group.uses["a"] = {}
    group.update("a", urgent=())
    assert group.offered("a") == [4, 4]


def test_group_merges_behind_a_host_whose_summary_differs() -> None:
    """Units in use count differently in a summary that is read, and in that of a plan."""
    group = Group({1: 1, 8: 1}, {"a": {"1", "2"}, "b": set(), "c": set()})
    group.update("a")
    assert [group.offered(host) for host in "abc"] == [[], [4, 2, 1, 1], [8]]
    group.plan("c", {4: 1})
    # As read of a host with units that are being cleaned. It keeps its sets: it is no merged host.
    group.by_host["b"] = [replace(s, free_units=9) for s in group.by_host["b"]]
    group.update("a", urgent=())
    assert [group.offered(host) for host in "abc"] == [[], [4, 2, 1, 1], [8]]


@pytest.mark.parametrize(("urgent", "merged"), [((), False), ((1,), False), ((1, 8), True)])
def test_group_search_for_a_host_to_merge_is_limited(
    urgent: tuple[int, ...], *, merged: bool
) -> None:
    """A host that keeps its sets is a candidate each time; an update of all sizes skips none."""
    names = [f"host{number}" for number in range(groups.MAX_MERGE_PLANS + 1)]
    planned: list[str] = []

    def plan(host: str, shortage: Mapping[int, int]) -> list[SizeSummary]:
        planned.append(host)
        whole = [SizeSummary(host, 8, 1, 0, 0, 8)]
        return whole if host == names[-1] else split.get(host, [])

    split = {
        name: [SizeSummary(name, 1, 8, 0, 0, 8), SizeSummary(name, 8, 0, 0, 1, 8)] for name in names
    }
    update_group("other", {1: 1, 8: 0}, split | {"other": []}, plan, urgent)
    assert (names[-1] in planned) is merged
    assert len(planned) <= len(names) + 1


def test_group_plan_withdraws_wanted_set_splits_another_at_once() -> None:
    group = Group({1: 1, 2: 1}, {"a": {"1"}, "b": {"1", "5"}})  # free: a four, a pair
    group.update("a", urgent=(1,))
    # The pair became two singles, so that pairs were short in the same update.
    assert [group.offered(host) for host in "ab"] == [[2, 2], [1, 1]]


def test_group_plan_without_a_shortage_ranks_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranking reads all hosts of the group."""
    ranked: list[int] = []

    def rank(size: int, summaries: Sequence[SizeSummary]) -> list[str]:
        ranked.append(size)
        return rank_hosts_to_split(size, summaries)

    monkeypatch.setattr(groups, "rank_hosts_to_split", rank)
    group = Group({8: 1, 1: 1}, {"a": {"1"}, "b": set()})
    group.update("a")
    assert ranked == [1]
    assert [group.offered(host) for host in "ab"] == [[2, 1, 1], [8]]
    ranked.clear()
    group.update("a")
    assert ranked == []


def test_group_size_is_available_elsewhere_merges_the_split_host() -> None:
    group = Group({1: 1}, {"a": set(), "b": {"0"}})
    group.update("a")
    assert group.offered("a") == [4, 2, 1, 1]
    # A server of seven of the eight GPUs of b is deleted.
    group.uses["b"] = {u: UnitUse(n) for n, u in enumerate(sorted(H100["0"]), start=7) if n < 14}
    group.update("b")
    assert group.offered("b") == [1]
    assert group.offered("a") == [8]


def test_group_larger_size_is_short_merges_the_split_host() -> None:
    group = Group({4: 1, 8: 1}, {"a": set(), "b": {"1", "2"}})
    group.update("a")
    assert group.offered("a") == [4, 4]
    group.uses["b"] = dict.fromkeys(H100["2"], UnitUse(set_id=2))  # the other four is released
    group.update("b", urgent=())
    assert [group.offered(host) for host in "ab"] == [[8], [4]]


def test_group_of_one_host_offers_each_size_that_it_can() -> None:
    """The four is not split for the second pair; a board has no set of eight then."""
    group = Group({1: 2, 2: 2, 4: 1, 8: 1}, {"a": set()})
    group.update("a")
    assert group.offered("a") == [4, 2, 1, 1]


def test_group_splits_last_larger_set_for_the_first_of_a_size_only() -> None:
    group = Group({1: 2, 2: 1}, {"a": {"1", "6", "11"}, "b": {"1", "5"}})  # GPU 7 and a pair
    group.update("a")
    assert [group.offered(host) for host in "ab"] == [[1], [2]]
    group.uses["a"] |= {"07": UnitUse(set_id=13)}
    group.update("a")
    assert [group.offered(host) for host in "ab"] == [[], [1, 1]]


def test_group_split_for_a_larger_size_leaves_a_set_for_a_smaller_one() -> None:
    group = Group({1: 2, 2: 1, 8: 1}, {"a": set(), "b": {"10", "2", "3"}})  # b has one GPU free
    group.update("a")
    # The board was split for the first pair; the second pair serves the second single GPU.
    assert [group.offered(host) for host in "ab"] == [[4, 2, 1, 1], [1]]


BOARDS = st.frozensets(st.sampled_from(sorted(H100)), max_size=5)


@given(
    st.lists(BOARDS, min_size=1, max_size=5),
    st.dictionaries(st.sampled_from(SIZES), st.integers(1, 3), max_size=4),
    st.booleans(),
)
def test_group_after_update_lacks_a_size_only_if_no_larger_set_can_be_split(
    boards: list[frozenset[str]], wanted: dict[int, int], is_urgent: bool
) -> None:
    """Also, a second update changes nothing."""
    owned: dict[str, set[str]] = {}
    for number, names in enumerate(boards):
        used: set[str] = set()
        for name in sorted(names):
            if all(H100[name].isdisjoint(H100[other]) for other in used):
                used.add(name)
        owned[f"host{number}"] = used
    group, urgent = Group(wanted, owned), SIZES if is_urgent else ()
    group.update("host0", urgent)
    totals = count_offered(group.summaries)
    for size in find_shortage(wanted, totals):
        # A larger set is left only if it is the last of its wanted size, and the size is offered,
        # or not urgent.
        for name in rank_hosts_to_split(size, group.summaries):
            larger = min(n for n in group.offered(name) if n > size)
            assert totals[size] or not is_urgent
            assert totals[larger] <= wanted.get(larger, 0)
    before = {host: list(sets) for host, sets in group.sets.items()}
    group.update("host0", urgent)
    assert find_shortage(wanted, count_offered(group.summaries)) == find_shortage(wanted, totals)
    if find_shortage(wanted, totals):
        assert group.sets == before


@pytest.mark.parametrize("size", SIZES)
def test_rank_hosts_without_summaries_is_empty(size: int) -> None:
    assert rank_hosts_to_split(size, []) == rank_hosts_to_merge({size: 1}, []) == []
