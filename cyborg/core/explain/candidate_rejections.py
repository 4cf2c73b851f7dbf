# SPDX-License-Identifier: Apache-2.0
"""The reasons why Placement does not return a provider as an allocation candidate.

The reason is the first predicate that the bind of Cyborg would fail. The actual reason of Placement
may differ: a candidate needs a provider for each group on one host, Placement also counts the
allocations of its other users, and it knows nothing of attach targets.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter

from cyborg.core.explain.explanation import GroupDemand, ProviderState, find_failures
from cyborg.core.explain.predicates import Failure
from cyborg.core.explain.request_fit import evaluate_request

QUERY_REJECTED = "no predicate fails, but Placement rejects the query"
NOT_RETURNED = (
    "no predicate fails: the limit of candidates is reached, or the host lacks other resources, or "
    "the allocations in Placement differ from the database"
)


@dataclass(frozen=True, slots=True)
class GroupRejection:
    """Why Placement does not return a provider for a group.

    ``failure`` is the first predicate that the provider fails, as ``core.arq.request_fit`` finds
    it; None if it fails none.
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
    """Return the providers whose uuids are not in ``returned``, the fewest failures first.

    ``providers`` are all providers of each host. ``reason`` is the message of Placement if it
    rejected the whole query: then it does not matter whether the groups fit together. ``limit`` is
    the maximum number of providers; None is all.
    """
    fit = evaluate_request(demands, providers)
    weights = Counter(fit.firsts)
    distances: list[tuple[tuple[int, int], ProviderState]] = []
    for provider, alone in fit.alone:
        if provider.uuid not in returned:
            failures = {first: own for first, own in alone.items() if own is not None}
            failing = sum(weights[first] for first in failures)
            last = max((own.predicate.position for own in failures.values()), default=0)
            distances.append(((failing, -last), provider))
    distances.sort(key=itemgetter(0))
    # Only the chosen providers get texts.
    rejections = []
    for _, provider in distances[:limit]:
        found = find_failures(demands, fit.firsts, provider) if reason else fit.failures(provider)
        fallback = f"{QUERY_REJECTED}: {reason}" if reason else NOT_RETURNED
        groups = tuple(
            GroupRejection(demand, failure, failure.text if failure else fallback)
            for demand, failure in zip(demands, found, strict=True)
        )
        rejections.append(Rejection(provider, groups))
    return rejections
