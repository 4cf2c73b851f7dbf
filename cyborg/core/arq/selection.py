# SPDX-License-Identifier: Apache-2.0
"""Selection of free attach handles for ARQs, and the reasons if none fits.

Nova gives the provider of each ARQ, so a handle is selected among the handles of that provider
only. All of them are equal for the ARQ, so any free handle can be selected without a global
matching.
"""

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cyborg.core.arq.attach_target import AttachTarget, explain_missing_info
from cyborg.core.errors import NoHandle
from cyborg.core.text import join_limited

MAX_REASONS = 20  # of one ARQ, in the details of an error
TAKEN_IN_CALL = "claimed by another request of this call"
HANDLE_TAKEN = "handle is taken"
BEING_CLEANED = "handle is being cleaned"
DRAINING = "device is draining"


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of one ARQ: a unit of a resource class from a provider of a host."""

    arq_uuid: str
    provider: str
    host: str
    resource_class: str
    required: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()
    accel: Mapping[str, str] = field(default_factory=dict)
    target: AttachTarget = AttachTarget.INSTANCE
    profile: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One attach handle, with the facts that decide whether it can be allocated.

    ``device`` is the address of its device, for messages; ``info`` is what Nova gets of the handle.
    """

    handle_id: int
    handle: str
    provider: str
    resource_class: str
    traits: frozenset[str] = frozenset()
    device_status: str = "enabled"
    health: str = "ok"
    draining: bool = False
    setup_required: bool = False
    reboot_required: bool = False
    deliverable: bool = True
    backend_disabled: bool = False
    programming: bool = False
    restore_failed: bool = False
    failing: bool = False
    in_use: bool = False
    dirty: bool = False
    device: str = ""
    info: Mapping[str, str] = field(default_factory=dict)


def choose_handles(
    demands: Sequence[Demand], candidates: Sequence[Candidate], order: random.Random
) -> dict[str, int]:
    """Return the id of the chosen handle of each demand, by ARQ uuid.

    The caller has checked that the provider of each demand is on its host. Raise NoHandle if a
    demand cannot be met. The ``details['reasons']`` of that error are ``{ARQ uuid: [{"reason",
    "provider", "handles"}]}``, where "handles" is how many handles the reason excludes.
    """
    pools: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        pools.setdefault(candidate.provider, []).append(candidate)
    # Shuffled: conductors that choose at the same time then seldom choose the same handles.
    for pool in pools.values():
        order.shuffle(pool)
    chosen: dict[str, int] = {}
    taken_counts: Counter[str] = Counter()
    taken_ids: set[int] = set()
    searches: dict[object, _Search] = {}
    reasons: dict[str, list[dict[str, object]]] = {}
    for demand in demands:
        kind = (
            *(demand.provider, demand.resource_class, demand.required, demand.forbidden),
            *(demand.target, demand.profile),
        )
        search = searches.setdefault(kind, _Search(pools.get(demand.provider, [])))
        found = search.next(demand, taken_ids)
        if found is not None:
            chosen[demand.arq_uuid] = found.handle_id
            taken_ids.add(found.handle_id)
            taken_counts[demand.provider] += 1
            continue
        rejections = search.rejections + Counter({TAKEN_IN_CALL: taken_counts[demand.provider]})
        reasons[demand.arq_uuid] = [
            {"provider": demand.provider, "reason": reason, "handles": count}
            for reason, count in rejections.most_common(MAX_REASONS)
        ]
    if reasons:
        raise NoHandle(_no_handle_message(reasons), reasons=reasons)
    return chosen


@dataclass(slots=True)
class _Search:
    """One pass over the handles of a provider, shared by all equal demands.

    A handle that one demand rejects is rejected by all of them. So each handle is examined once.
    """

    pool: Sequence[Candidate]
    at: int = 0
    rejections: Counter[str] = field(default_factory=Counter)

    def next(self, demand: Demand, taken_ids: Collection[int]) -> Candidate | None:
        """Return the next handle that fits the demand; None if no other handle fits."""
        while self.at < len(self.pool):
            candidate = self.pool[self.at]
            self.at += 1
            if candidate.handle_id in taken_ids:
                continue
            rejections = explain_rejection(demand, candidate)
            if not rejections:
                return candidate
            self.rejections.update(rejections)
        return None


def explain_rejection(demand: Demand, candidate: Candidate) -> list[str]:
    """Return the reasons why a handle does not fit a demand; none if it fits."""
    conditions = {
        "device is under maintenance": candidate.device_status != "enabled",
        "its driver is disabled, being uninstalled or cordoned, or it waits for another layout": (
            candidate.backend_disabled
        ),
        "device is unhealthy": candidate.health == "unhealthy",
        DRAINING: candidate.draining,
        "setup required": candidate.setup_required,
        "reboot required": candidate.reboot_required,
        "device cannot be attached to an instance": not candidate.deliverable,
        "device is being programmed": candidate.programming,
        "device could not be prepared again after a reboot of its host": candidate.restore_failed,
        "the last prepare jobs of the device failed": candidate.failing,
        HANDLE_TAKEN: candidate.in_use,
        BEING_CLEANED: candidate.dirty,
    }
    reasons = [reason for reason, applies in conditions.items() if applies]
    if candidate.resource_class != demand.resource_class:
        reasons.append(f"resource class differs: {candidate.resource_class}")
    reasons += [f"trait missing: {name}" for name in sorted(demand.required - candidate.traits)]
    reasons += [f"trait forbidden: {name}" for name in sorted(demand.forbidden & candidate.traits)]
    missing = explain_missing_info(demand.target, candidate.info, candidate.device, demand.profile)
    reasons += [missing] if missing else []
    return reasons


def _no_handle_message(reasons: Mapping[str, Sequence[Mapping[str, object]]]) -> str:
    """Return an error message with the reasons of the first three ARQs."""
    messages = [
        f"request {arq_uuid}: "
        + (
            "; ".join(f"{r['reason']} ({r['handles']} handles)" for r in rejected[:4])
            or "no handle"
        )
        for arq_uuid, rejected in reasons.items()
    ]
    shown = join_limited(messages, 3, separator=". ", nouns="requests")
    return f"no free attach handle: {shown}"
