# SPDX-License-Identifier: Apache-2.0
"""Why providers are in no allocation candidate of a request.

A rejection is the reason why Placement does not return a provider as an allocation candidate: the
first predicate that the bind of Cyborg would fail. The actual reason of Placement may differ: a
candidate needs a provider for each group on one host, Placement also counts the allocations of its
other users, and it knows nothing of attach targets.

A cloud has more providers than an answer. The nearest ones are explained: those that fail the
fewest groups and, of these, those that fail at the latest predicate.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cyborg.core.explain import explanation
from cyborg.core.explain.explanation import GroupDemand, ProviderState
from cyborg.core.explain.predicates import Failure
from cyborg.core.explain.provider_counts import count_kinds
from cyborg.core.explain.request_fit import RequestFit

QUERY_REJECTED = "no predicate fails, but Placement rejects the query"
NOT_RETURNED = (
    "no predicate fails: the limit of candidates is reached, or the host lacks other resources, or "
    "the allocations in Placement differ from the database"
)


@dataclass(frozen=True, slots=True)
class GroupRejection:
    """Why Placement does not return a provider for a group.

    ``failure`` is the first predicate that the provider fails, as ``core.explain.request_fit``
    finds it; None if it fails none.
    """

    demand: GroupDemand
    failure: Failure | None
    text: str


@dataclass(frozen=True, slots=True)
class Rejection:
    """A provider that is in no candidate, with the reason for each group."""

    provider: ProviderState
    groups: tuple[GroupRejection, ...]


class _Distance(NamedTuple):
    """How far a provider is from serving a request; the least value is the nearest.

    ``position`` is that of the last predicate that it fails, negated: a provider that fails at a
    later one came nearer.
    """

    failed_groups: int
    position: int


class _Absence(NamedTuple):
    """A provider that is in no candidate, with its own failure for each group."""

    distance: _Distance
    provider: ProviderState
    failures: Sequence[Failure | None]


def choose_hosts(fit: RequestFit, limit: int) -> list[str]:
    """Return the hosts that have the ``limit`` nearest providers, or all if there are fewer.

    Of equally near providers, those of the first hosts by name count.
    """
    kinds_by_distance = defaultdict[_Distance, set[int]](set)
    weights = Counter(fit.firsts)
    for kind, failures in enumerate(fit.alone):
        # Equal groups are in ``alone`` once.
        repeated = (own for first, own in failures.items() for _ in range(weights[first]))
        kinds_by_distance[_measure(repeated)].add(kind)
    hosts = sorted(fit.counts.hosts.items())
    numbers = {composition: count_kinds(composition) for composition in fit.counts.hosts.values()}
    chosen = set[str]()
    missing = limit
    for _, nearest in sorted(kinds_by_distance.items()):
        for host, composition in hosts:
            if missing <= 0:
                return sorted(chosen)
            if found := sum(numbers[composition][kind] for kind in nearest):
                chosen.add(host)
                missing -= found
    return sorted(chosen)


def explain_rejections(
    fit: RequestFit,
    providers: Iterable[ProviderState],
    returned: Collection[str],
    reason: str | None = None,
    *,
    limit: int | None = None,
) -> list[Rejection]:
    """Return the providers whose uuids are not in ``returned``, the nearest first.

    Equally near ones are in the order of ``providers``. ``fit`` has all providers of each host.
    ``reason`` is the message of Placement if it rejected the whole query: then it does not matter
    whether the groups fit together. ``limit`` is the maximum number of rejections; None is all.
    """
    absences = []
    for provider in providers:
        if provider.uuid not in returned:
            failures = explanation.find_failures(fit.demands, fit.firsts, provider, fit.check)
            absences.append(_Absence(_measure(failures), provider, failures))
    absences.sort(key=lambda absence: absence.distance)
    fallback = f"{QUERY_REJECTED}: {reason}" if reason else NOT_RETURNED
    return [
        _explain(fit, absence, fit.joint(absence.provider.host) if not reason else {}, fallback)
        for absence in absences[:limit]
    ]


def _measure(failures: Iterable[Failure | None]) -> _Distance:
    """Return the distance of a provider that has these failures, one for each group."""
    positions = [own.predicate.position for own in failures if own is not None]
    return _Distance(len(positions), -max(positions, default=0))


def _explain(
    fit: RequestFit, absence: _Absence, joint: Mapping[int, Failure], fallback: str
) -> Rejection:
    """Return the rejection of a provider; ``joint`` has the failures of its host.

    ``fallback`` is the text for a group without a failure.
    """
    groups = []
    for demand, own, first in zip(fit.demands, absence.failures, fit.firsts, strict=True):
        failure = own or joint.get(first)
        groups.append(GroupRejection(demand, failure, failure.text if failure else fallback))
    return Rejection(absence.provider, tuple(groups))
