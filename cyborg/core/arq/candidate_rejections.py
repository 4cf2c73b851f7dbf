# SPDX-License-Identifier: Apache-2.0
"""The reasons why Placement does not return a provider as an allocation candidate.

The reason is the first predicate that the bind of Cyborg would fail. Placement may have left the
provider out for another one: a candidate needs a provider for each group on one host, Placement
also counts the allocations of its other users, and it knows nothing of attach targets.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from cyborg.core.arq.capacity import compute_capacity
from cyborg.core.arq.explanation import (
    GroupDemand,
    ProviderState,
    find_failures,
    find_first_equals,
    find_first_failure,
)
from cyborg.core.arq.predicates import Failure, Predicate

OTHER_GROUP = "no predicate fails, but no provider of the host fits group {}"
QUERY_REJECTED = "no predicate fails, but Placement rejects the query"
NOT_RETURNED = (
    "no predicate fails: the limit of candidates is reached, or the host lacks other resources, or "
    "the allocations in Placement differ from the database"
)
TOGETHER = "groups {} together need more handles than host {} has"
COMPETITION_EFFORT = 5000
"""Steps of the searches for groups that compete: a tenth of those of a capacity."""


@dataclass(frozen=True, slots=True)
class GroupRejection:
    """Why Placement does not return a provider for a group.

    ``failure`` is the first predicate that the provider fails; None if it fails none. It is
    TAKEN_IN_CALL if the host serves each group alone, and not all of them together.
    """

    demand: GroupDemand
    failure: Failure | None
    text: str


@dataclass(frozen=True, slots=True)
class Rejection:
    """A provider that is in no candidate, with the reason for each group."""

    provider: ProviderState
    groups: tuple[GroupRejection, ...]


def explain_rejections(
    demands: Sequence[GroupDemand],
    providers: Sequence[ProviderState],
    returned: Collection[str],
    reason: str | None = None,
    *,
    limit: int | None = None,
) -> list[Rejection]:
    """Return the providers whose uuids are not in ``returned``, those of the fewest failures first.

    ``providers`` are all providers of each host. ``reason`` is the message of Placement if it
    rejected the whole query. ``limit`` is the maximum number of providers; None is all.
    """
    firsts = find_first_equals(demands)
    weights = Counter(firsts)
    served: dict[str, set[int]] = {}
    distances: list[tuple[tuple[int, int], ProviderState]] = []
    for provider in providers:
        failing, last = 0, 0
        fitting = served.setdefault(provider.host, set())
        for first, weight in weights.items():
            failure = find_first_failure(demands[first], provider)
            if failure is None:
                fitting.add(first)
            else:
                failing += weight
                last = max(last, failure.predicate.position)
        if provider.uuid not in returned:
            distances.append(((failing, -last), provider))
    distances.sort(key=itemgetter(0))
    # Only the chosen providers get texts.
    chosen = [provider for _, provider in distances[:limit]]
    hosts = {provider.host for provider in chosen if len(served[provider.host]) == len(weights)}
    competing = {} if reason else _find_competing(demands, providers, hosts)
    rejections = []
    for provider in chosen:
        fallback = _explain_fitting(demands, firsts, served[provider.host], reason)
        failures = find_failures(demands, firsts, provider)
        joint = competing.get(provider.host, {})
        if joint:
            fallback = f"no predicate fails, but {next(iter(joint.values())).text}"
        rejections.append(Rejection(provider, _explain_groups(demands, failures, joint, fallback)))
    return rejections


def _find_competing(
    demands: Sequence[GroupDemand], providers: Iterable[ProviderState], hosts: Collection[str]
) -> dict[str, dict[int, Failure]]:
    """Return the failures of groups that hosts serve alone and not together.

    They are by host and by the number of the group. The groups of one resource class compete with
    each other; a host whose capacity is not known exactly is left out.
    """
    by_class: dict[str | None, list[GroupDemand]] = {}
    for demand in demands:
        by_class.setdefault(demand.resource_class, []).append(demand)
    states = [provider for provider in providers if provider.host in hosts]
    found: dict[str, dict[int, Failure]] = {}
    for rivals in by_class.values():
        if len(rivals) < 2:
            continue
        for each in compute_capacity(rivals, states, COMPETITION_EFFORT):
            if each.exact and not each.servers:
                text = TOGETHER.format(_list_numbers(rivals), each.host)
                failure = Failure(Predicate.TAKEN_IN_CALL, text)
                found.setdefault(each.host, {}).update((one.number, failure) for one in rivals)
    return found


def _list_numbers(demands: Sequence[GroupDemand]) -> str:
    """Return the numbers of at least two groups, such as ``0, 1 and 2``."""
    *numbers, last = [str(demand.number) for demand in demands]
    return f"{', '.join(numbers)} and {last}"


def _explain_groups(
    demands: Sequence[GroupDemand],
    failures: Sequence[Failure | None],
    joint: Mapping[int, Failure],
    fallback: str,
) -> tuple[GroupRejection, ...]:
    """Return the reasons; ``joint`` are failures of groups that together fit no server."""
    explained = []
    for demand, own in zip(demands, failures, strict=True):
        failure = own or joint.get(demand.number)
        explained.append(GroupRejection(demand, failure, failure.text if failure else fallback))
    return tuple(explained)


def _explain_fitting(
    demands: Sequence[GroupDemand],
    firsts: Sequence[int],
    served: Collection[int],
    reason: str | None,
) -> str:
    """Return the text for a group that a provider fits, from the groups that its host serves."""
    if reason:
        return f"{QUERY_REJECTED}: {reason}"
    unserved = [
        demand.number for demand, first in zip(demands, firsts, strict=True) if first not in served
    ]
    return OTHER_GROUP.format(unserved[0]) if unserved else NOT_RETURNED
