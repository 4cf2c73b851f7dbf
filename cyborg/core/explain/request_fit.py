# SPDX-License-Identifier: Apache-2.0
"""Whether hosts can serve all groups of a request together.

A provider may have enough handles for each group alone, and too few for all of them. A server, or a
device context, needs all its groups on one host. So a group that no predicate excludes still fails:

* as TAKEN_IN_CALL if groups that share providers need more handles than these have together;
* as OTHER_GROUP if the host cannot serve another group of the request.

Explanations, refused binds and allocation candidates use this evaluation.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cyborg.core.explain import explanation
from cyborg.core.explain.explanation import GroupDemand, ProviderState
from cyborg.core.explain.packing import Budget, Caps, Kind, fits_once
from cyborg.core.explain.predicates import Failure, Predicate, fail
from cyborg.core.explain.provider_counts import (
    Composition,
    ProviderCounts,
    count_kinds,
    list_providers,
)

TOGETHER = "groups {} together need more handles than host {} has"
# Steps of the searches in one evaluation: a tenth of those of a capacity.
EFFORT = 5000


class _Problem(NamedTuple):
    """Why a host cannot serve all groups together: sets of indexes of first equal demands.

    ``unserved`` fit no provider of the host. The groups of each set in ``competing`` fit alone, and
    not together; those in ``idle`` are the rest.
    """

    unserved: tuple[int, ...]
    competing: tuple[tuple[int, ...], ...]
    idle: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestFit:
    """The failures of providers for the groups of a request.

    ``alone`` has for each kind of providers its first failure for each distinct group, by the index
    of the first equal demand. ``problems`` has by composition of a host why it cannot serve all
    groups together; None if it can.
    """

    demands: Sequence[GroupDemand]
    firsts: tuple[int, ...]
    check: explanation.Check | None
    counts: ProviderCounts
    alone: Sequence[Mapping[int, Failure | None]]
    problems: Mapping[Composition, _Problem | None]

    @property
    def fitting_hosts(self) -> frozenset[str]:
        """Return the hosts that can serve all groups together."""
        hosts = self.counts.hosts.items()
        return frozenset(host for host, kinds in hosts if self.problems[kinds] is None)

    def joint(self, host: str) -> Mapping[int, Failure]:
        """Return the failures of groups that a provider of a host fits alone.

        The key is the index of the first equal demand.
        """
        # A host may have appeared after the providers were counted.
        composition = self.counts.hosts.get(host)
        problem = None if composition is None else self.problems[composition]
        return {} if problem is None else _describe(self.demands, self.firsts, problem, host)

    def failures(self, provider: ProviderState) -> list[Failure | None]:
        """Return the first failure of a provider for each demand, with those of its host."""
        joint = self.joint(provider.host)
        found = explanation.find_failures(self.demands, self.firsts, provider, self.check)
        return [own or joint.get(first) for own, first in zip(found, self.firsts, strict=True)]

    def summarize(self) -> list[explanation.GroupSummary]:
        """Return for each group how many providers fit, and how many fail at which predicate.

        The summaries of equal groups share their counters.
        """
        summaries = {first: explanation.GroupSummary(self.demands[first]) for first in self.firsts}
        for composition, hosts in Counter(self.counts.hosts.values()).items():
            problem = self.problems[composition]
            # Without the name of a host, since only the predicates are counted, and no text.
            joint = {} if problem is None else _describe(self.demands, self.firsts, problem, "")
            for kind, number in count_kinds(composition).items():
                for first, failure_alone in self.alone[kind].items():
                    failure = failure_alone or joint.get(first)
                    summaries[first].count(self.counts.kinds[kind], failure, number * hosts)
        if self.counts.others:
            for summary in summaries.values():
                summary.providers[Predicate.RESOURCE_CLASS] += self.counts.others
                summary.handles[Predicate.RESOURCE_CLASS] += self.counts.other_handles
        return [
            replace(summaries[first], demand=demand)
            for demand, first in zip(self.demands, self.firsts, strict=True)
        ]


def evaluate_request(
    demands: Sequence[GroupDemand],
    providers: Iterable[ProviderState],
    check: explanation.Check | None = None,
    effort: int = EFFORT,
) -> RequestFit:
    """Evaluate all groups of a request for listed providers: see ``evaluate_counts``."""
    return evaluate_counts(demands, list_providers(providers), check, effort)


def evaluate_counts(
    demands: Sequence[GroupDemand],
    counts: ProviderCounts,
    check: explanation.Check | None = None,
    effort: int = EFFORT,
) -> RequestFit:
    """Evaluate all groups of a request; ``counts`` has all providers of each host.

    ``effort`` limits the searches for groups that compete, on all hosts together. A host whose
    search ends without a result counts as one that fits.
    """
    firsts = explanation.find_first_equals(demands)
    distinct = tuple(dict.fromkeys(firsts))
    alone: list[Mapping[int, Failure | None]] = []
    caps: list[Caps] = []
    for provider in counts.kinds:
        failures = {
            first: explanation.find_first_failure(demands[first], provider, check)
            for first in distinct
        }
        alone.append(failures)
        caps.append(
            tuple(
                provider.handles.fitting(demands[first].target) if failure is None else 0
                for first, failure in failures.items()
            )
        )
    search = _Search(demands, firsts, distinct, Budget(effort))
    problems: dict[Composition, _Problem | None] = {}
    # In the order of the hosts, in which they share the effort.
    for composition in counts.hosts.values():
        if composition not in problems:
            bins = Counter[Caps]()
            for kind, number in count_kinds(composition).items():
                if any(caps[kind]):
                    bins[caps[kind]] += number
            problems[composition] = search.find(list(bins.elements()))
    return RequestFit(demands, firsts, check, counts, alone, problems)


@dataclass(slots=True)
class _Search:
    """A search for the groups that prevent a host from serving a request.

    ``firsts`` has for each demand the index of the first equal one, ``kinds`` these indexes once: a
    bin has a column for each of them. Hosts with equal free handles are searched once.
    """

    demands: Sequence[GroupDemand]
    firsts: Sequence[int]
    kinds: Sequence[int]
    budget: Budget
    cache: dict[object, _Problem | None] = field(default_factory=dict)

    def find(self, bins: Sequence[Caps]) -> _Problem | None:
        """Return why a host with these free handles, by kind, serves no request; None if it does.

        A bin is a provider.
        """
        # The order of the providers of a host does not matter, and most hosts of a cloud are equal.
        key = tuple(sorted(Counter(bins).items()))
        if key not in self.cache:
            self.cache[key] = self._find(bins)
        return self.cache[key]

    def _find(self, bins: Sequence[Caps]) -> _Problem | None:
        """Return why providers cannot serve all groups, None if they can or this is not known."""
        columns = range(len(self.kinds))
        served = [column for column in columns if any(caps[column] for caps in bins)]
        competing = [
            part for part in _split(served, bins) if self._fits_together(part, bins) is False
        ]
        unserved = tuple(self.kinds[column] for column in columns if column not in served)
        if not unserved and not competing:
            return None
        busy = {column for part in competing for column in part}
        return _Problem(
            unserved=unserved,
            competing=tuple(tuple(self.kinds[column] for column in part) for part in competing),
            idle=tuple(self.kinds[column] for column in served if column not in busy),
        )

    def _fits_together(self, columns: Sequence[int], bins: Sequence[Caps]) -> bool | None:
        """Return whether the groups of these columns fit together; None if that is not known."""
        counts = Counter(self.firsts)
        chosen = [self.kinds[column] for column in columns]
        kinds = [Kind(self.demands[first].count, counts[first]) for first in chosen]
        # A single group was found to fit alone.
        if len(kinds) == 1 and kinds[0].count == 1:
            return True
        caps = [tuple(bin_[column] for column in columns) for bin_ in bins]
        return fits_once(kinds, [each for each in caps if any(each)], self.budget)


def _split(columns: Sequence[int], bins: Iterable[Caps]) -> list[list[int]]:
    """Return the columns in parts: two columns are in one part if they can use one bin."""
    parts = [{column} for column in columns]
    for caps in set(bins):
        users = {column for column in columns if caps[column]}
        merged = [part for part in parts if part & users]
        if len(merged) > 1:
            parts = [part for part in parts if not part & users]
            parts.append(set().union(*merged))
    return [sorted(part) for part in parts]


def _describe(
    demands: Sequence[GroupDemand], firsts: Sequence[int], problem: _Problem, host: str
) -> dict[int, Failure]:
    """Return the failures of the groups that the host serves alone, by their first equal demand."""
    failures: dict[int, Failure] = {}
    for part in problem.competing:
        text = TOGETHER.format(_list_numbers(demands, firsts, part), host)
        failures |= dict.fromkeys(part, Failure(Predicate.TAKEN_IN_CALL, text))
    blocking = problem.unserved or problem.competing[0]
    other = fail(Predicate.OTHER_GROUP, _list_numbers(demands, firsts, blocking))
    return failures | dict.fromkeys(problem.idle, other)


def _list_numbers(
    demands: Sequence[GroupDemand], firsts: Sequence[int], chosen: Collection[int]
) -> str:
    """Return the numbers of groups, such as ``0, 1 and 2``; ``chosen`` are first equal demands."""
    *numbers, last = [
        str(demand.number) for demand, first in zip(demands, firsts, strict=True) if first in chosen
    ]
    return f"{', '.join(numbers)} and {last}" if numbers else last
