# SPDX-License-Identifier: Apache-2.0
"""Which free attach handle serves which request, and if none does, why.

Nova names the provider of each request, so the choice is only among the handles of that provider;
these differ in nothing that a request can ask for. Taking any that is free is therefore as good as
a matching over the whole.
"""

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cyborg.core.errors import NoHandle, NotFound

MAX_REASONS = 20  # told of one request; the rest is counted
GIVEN = "claimed by another request of this call"


@dataclass(frozen=True, slots=True)
class Need:
    """What one request wants: a unit of a class, from this provider of this host."""

    request: str
    provider: str
    host: str
    resource_class: str
    required: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()
    accel: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One attach handle and all that decides whether it may be given out."""

    handle_id: int
    handle: str
    provider: str
    host: str
    resource_class: str
    traits: frozenset[str] = frozenset()
    device_status: str = "enabled"
    health: str = "ok"
    draining: bool = False
    setup_required: bool = False
    reboot_required: bool = False
    withdrawn: bool = False
    programming: bool = False
    taken: bool = False
    dirty: bool = False


def choose(
    needs: Sequence[Need], candidates: Sequence[Candidate], order: random.Random
) -> dict[str, int]:
    """Give each need a handle of its own: request uuid -> handle id; all needs or none.

    ``order`` shuffles, so that conductors that choose at once seldom choose alike. Raises NotFound
    when a provider has no candidate at all or is on another host, and NoHandle, whose
    ``details['reasons']`` is ``{request: [{"reason", "provider", "handles": count}]}``.
    """
    _check_providers(needs, candidates)
    pools: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        pools.setdefault(candidate.provider, []).append(candidate)
    for pool in pools.values():
        order.shuffle(pool)
    chosen: dict[str, int] = {}
    given: Counter[str] = Counter()
    taken: set[int] = set()
    searches: dict[object, _Search] = {}
    reasons: dict[str, list[dict[str, object]]] = {}
    for need in needs:
        kind = (need.provider, need.resource_class, need.required, need.forbidden)
        search = searches.setdefault(kind, _Search(pools[need.provider]))
        found = search.next(need, taken)
        if found is not None:
            chosen[need.request] = found.handle_id
            taken.add(found.handle_id)
            given[need.provider] += 1
            continue
        against = search.against + Counter({GIVEN: given[need.provider]})
        reasons[need.request] = [
            {"provider": need.provider, "reason": reason, "handles": count}
            for reason, count in against.most_common(MAX_REASONS)
        ]
    if reasons:
        raise NoHandle(_sentence(reasons), reasons=reasons)
    return chosen


@dataclass(slots=True)
class _Search:
    """One walk through a provider's handles for all the needs that are alike.

    What was passed over stays unfit for them, so nothing is looked at twice, however many needs.
    """

    pool: Sequence[Candidate]
    at: int = 0
    against: Counter[str] = field(default_factory=Counter)

    def next(self, need: Need, taken: Collection[int]) -> Candidate | None:
        """Return the next handle that serves, or None when there is no more."""
        while self.at < len(self.pool):
            candidate = self.pool[self.at]
            self.at += 1
            if candidate.handle_id in taken:
                continue
            why = refusals(need, candidate)
            if not why:
                return candidate
            self.against.update(why)
        return None


def refusals(need: Need, candidate: Candidate) -> list[str]:
    """Return what speaks against giving this handle to this need; nothing when it serves."""
    why: list[str] = []
    if candidate.device_status != "enabled":
        why.append("device is under maintenance")
    if candidate.withdrawn:
        why.append("its driver is disabled or being uninstalled")
    if candidate.health == "unhealthy":
        why.append("device is unhealthy")
    if candidate.draining:
        why.append("device is draining")
    if candidate.setup_required:
        why.append("setup required")
    if candidate.reboot_required:
        why.append("reboot required")
    if candidate.programming:
        why.append("device is being programmed")
    if candidate.taken:
        why.append("handle is taken")
    if candidate.dirty:
        why.append("handle is being cleaned")
    if candidate.resource_class != need.resource_class:
        why.append(f"resource class differs: {candidate.resource_class}")
    why += [f"trait missing: {name}" for name in sorted(need.required - candidate.traits)]
    why += [f"trait forbidden: {name}" for name in sorted(need.forbidden & candidate.traits)]
    return why


def _check_providers(needs: Sequence[Need], candidates: Collection[Candidate]) -> None:
    hosts = {candidate.provider: candidate.host for candidate in candidates}
    for need in needs:
        host = hosts.get(need.provider)
        if host != need.host:
            where = "has no handle at all" if host is None else f"is on host {host}"
            raise NotFound(
                f"request {need.request}: resource provider {need.provider} {where}; asked for "
                f"was host {need.host}",
                request=need.request,
                provider=need.provider,
            )


def _sentence(reasons: Mapping[str, Sequence[Mapping[str, object]]]) -> str:
    """Say it for the first few requests; the details have them all."""
    told = [
        f"request {request}: "
        + ("; ".join(f"{r['reason']} ({r['handles']} handles)" for r in why[:4]) or "no handle")
        for request, why in list(reasons.items())[:3]
    ]
    more = f"; and {len(reasons) - 3} more requests" if len(reasons) > 3 else ""
    return f"no free attach handle: {'. '.join(told)}{more}"
