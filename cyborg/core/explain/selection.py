# SPDX-License-Identifier: Apache-2.0
"""Selection of free attach handles for ARQs, and the reasons if none fits.

Nova gives the provider of each ARQ, so a handle is selected among the handles of that provider
only. All of them are equal for the ARQ, so any free handle can be selected without a global
matching.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from cyborg.core.binding import profile as device_profile
from cyborg.core.errors import NoHandle
from cyborg.core.explain.explanation import GroupDemand, ProviderState
from cyborg.core.explain.predicates import Failure, Predicate, device_failures, fail, trait_failures
from cyborg.core.explain.request_fit import evaluate_request
from cyborg.core.inventory.device_state import READY, DeviceFacts
from cyborg.core.text import join_limited

# Reasons of one ARQ in the details of an error.
MAX_REASONS = 20


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of one ARQ: a unit of a resource class from a provider of a host.

    ``group`` is the number of its group in the profile, and ``group_units`` the number of ARQs of
    this group.
    """

    arq_uuid: str
    provider: str
    host: str
    resource_class: str
    required: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()
    accel: Mapping[str, str] = field(default_factory=dict)
    target: device_profile.AttachTarget = device_profile.AttachTarget.INSTANCE
    profile: str = ""
    group: int = 0
    group_units: int = 1

    @property
    def kind(self) -> tuple[object, ...]:
        """Return a key that is equal for demands which the same handles fit."""
        return (
            *(self.provider, self.resource_class, self.required, self.forbidden),
            *(self.target, self.profile),
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One attach handle, with the facts of its deployable that decide whether it can be allocated.

    ``in_use`` is set if it has an owner. ``device`` is the address of its device, for messages;
    ``info`` is the part of the handle that Nova gets. With ``in_sets``, the handle is demanded
    alone, and is a member of device sets.
    """

    handle_id: int
    handle: str
    provider: str
    resource_class: str
    traits: frozenset[str] = frozenset()
    facts: DeviceFacts = READY
    in_use: bool = False
    dirty: bool = False
    in_sets: bool = False
    device: str = ""
    numa_node: int | None = None
    info: Mapping[str, str] = field(default_factory=dict)


def choose_handles(
    demands: Sequence[Demand], candidates: Sequence[Candidate], order: random.Random
) -> dict[str, int]:
    """Return the id of the chosen handle of each demand, by ARQ uuid.

    The caller has checked that the provider of each demand is on its host. Raise NoHandle if a
    demand cannot be met. The ``details['reasons']`` of that error are ``{ARQ uuid: [{"code",
    "reason", "provider", "handles", "group"}]}``: the code and the text of a predicate, and the
    number of handles that fail it.
    """
    pools: dict[str, list[Candidate]] = {}
    # By provider: Nova has allocated on these, so that a handle of another one is of no use.
    for candidate in candidates:
        pools.setdefault(candidate.provider, []).append(candidate)
    for pool in pools.values():
        # Conductors that choose at the same time then seldom choose the same handles.
        order.shuffle(pool)
        # True sorts last, and the sort keeps the shuffled order otherwise: handles that only some
        # demands need come last, so that the others leave them to later servers.
        pool.sort(key=_has_scarce_info)
    chosen: dict[str, int] = {}
    taken_counts: Counter[str] = Counter()
    taken_ids: set[int] = set()
    # ``kind`` has the provider, so that all demands of a search have the same pool.
    searches: dict[object, _Search] = {}
    reasons: dict[str, list[dict[str, object]]] = {}
    # The handles that fit a demand with required info also fit one without: the demands without it
    # must not take them first.
    ordered_demands = sorted(
        demands, key=lambda demand: not device_profile.REQUIRED_INFO[demand.target]
    )
    for demand in ordered_demands:
        if demand.kind not in searches:
            searches[demand.kind] = _Search(pools.get(demand.provider, []))
        search = searches[demand.kind]
        if (handle := search.next(demand, taken_ids)) is not None:
            chosen[demand.arq_uuid] = handle.handle_id
            taken_ids.add(handle.handle_id)
            taken_counts[demand.provider] += 1
            continue
        # A search skips the handles that other demands of this call have: they count as a reason.
        in_call = {fail(Predicate.TAKEN_IN_CALL): taken_counts[demand.provider]}
        rejections = search.rejections + Counter(in_call)
        reasons[demand.arq_uuid] = [
            describe_rejection(demand, failure, count)
            for failure, count in rejections.most_common(MAX_REASONS)
        ]
    if reasons:
        raise make_no_handle_error(reasons, demands)
    return chosen


def find_claim_failures(
    demands: Iterable[Demand], providers: Iterable[ProviderState]
) -> dict[str, Failure]:
    """Return the first failure of ARQs that their providers cannot serve, as an explanation has it.

    ``providers`` are the states of the demanded providers. The ARQs of one group count together.
    """
    by_provider: dict[str, list[Demand]] = {}
    for demand in demands:
        by_provider.setdefault(demand.provider, []).append(demand)
    first_failures: dict[str, Failure] = {}
    for state in providers:
        if state.uuid not in by_provider:
            continue
        parts = _split_by_group(by_provider[state.uuid])
        failures = evaluate_request(list(map(_to_group, parts)), [state]).failures(state)
        for part, failure in zip(parts, failures, strict=True):
            # With OTHER_GROUP the provider can serve this group: another group has the failure.
            if failure is not None and failure.predicate is not Predicate.OTHER_GROUP:
                first_failures |= dict.fromkeys((demand.arq_uuid for demand in part), failure)
    return first_failures


def _split_by_group(demands: Iterable[Demand]) -> list[list[Demand]]:
    """Return the demands of each group of each request; a call may repeat a profile."""
    parts: dict[tuple[str, int], list[list[Demand]]] = {}
    for demand in demands:
        requests = parts.setdefault((demand.profile, demand.group), [[]])
        if len(requests[-1]) >= demand.group_units:  # one more request of the same profile
            requests.append([])
        requests[-1].append(demand)
    return list(chain.from_iterable(parts.values()))


def put_first(
    reasons: Mapping[str, Sequence[dict[str, object]]],
    failures: Mapping[str, Failure],
    demands: Sequence[Demand],
    handles: Mapping[str, int],
) -> NoHandle:
    """Return the error with the first failure of each ARQ before its other reasons.

    ``failures`` is the result of ``find_claim_failures``. ``handles`` has the number of handles of
    each provider: such a failure excludes all of them unless it is one of the reasons.
    """
    by_arq = {demand.arq_uuid: demand for demand in demands}
    ordered: dict[str, list[dict[str, object]]] = {}
    for arq_uuid, arq_reasons in reasons.items():
        demand = by_arq[arq_uuid]
        # Without a failure, its provider fits the group alone: other groups of the call were first.
        failure = failures.get(arq_uuid, fail(Predicate.TAKEN_IN_CALL))
        same_code = [reason for reason in arq_reasons if reason["code"] == failure.predicate.value]
        # Of several reasons with the code, the one with the same text is about the same handles.
        same_text = [reason for reason in same_code if reason["reason"] == failure.text]
        first = (same_text or same_code)[:1]
        if not first and arq_uuid in failures:
            first = [describe_rejection(demand, failure, handles.get(demand.provider, 0))]
        ordered[arq_uuid] = [*first, *(reason for reason in arq_reasons if reason not in first)]
    return make_no_handle_error(ordered, demands)


def _to_group(part: Sequence[Demand]) -> GroupDemand:
    """Return the demand of the ARQs of one group."""
    first = part[0]
    units = Counter(demand.resource_class for demand in part)
    return GroupDemand(first.group, units, first.required, first.forbidden, first.target)


def _has_scarce_info(candidate: Candidate) -> bool:
    """Return whether a handle has info that an attach target requires."""
    return any(map(candidate.info.get, _REQUIRED_KEYS))


_REQUIRED_KEYS = frozenset(key for keys in device_profile.REQUIRED_INFO.values() for key in keys)


@dataclass(slots=True)
class _Search:
    """One pass over the handles of a provider, shared by all equal demands.

    A handle that one demand rejects is rejected by all of them. So each handle is examined once.
    """

    pool: Sequence[Candidate]
    at: int = 0
    rejections: Counter[Failure] = field(default_factory=Counter)

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


def describe_rejection(demand: Demand, failure: Failure, handles: int) -> dict[str, object]:
    """Return one reason in the details of NoHandle."""
    return {
        "group": demand.group,
        "provider": demand.provider,
        "code": failure.predicate.value,
        "reason": failure.text,
        "handles": handles,
    }


def explain_rejection(demand: Demand, candidate: Candidate) -> list[Failure]:
    """Return all predicates that a handle fails for a demand, in order; none if it fits.

    An agent that is down is not a reason: Nova has chosen the host.
    """
    reasons: list[Failure] = []
    if candidate.resource_class != demand.resource_class:
        reasons.append(fail(Predicate.RESOURCE_CLASS, candidate.resource_class))
    reasons += trait_failures(
        demand.required, demand.forbidden, candidate.traits, candidate.numa_node
    )
    reasons += [fail(Predicate.IN_DEVICE_SETS)] if candidate.in_sets else []
    reasons += [fail(predicate) for predicate in device_failures(candidate.facts)]
    reasons += [fail(Predicate.TAKEN)] if candidate.in_use else []
    reasons += [fail(Predicate.CLEANING)] if candidate.dirty else []
    requester = device_profile.describe_profile(demand.profile)
    missing = device_profile.explain_missing_info(
        demand.target, candidate.info, candidate.device, requester
    )
    reasons += [Failure(Predicate.ATTACH_TARGET, missing)] if missing else []
    return reasons


def make_no_handle_error(
    reasons: Mapping[str, Sequence[dict[str, object]]], demands: Iterable[Demand]
) -> NoHandle:
    """Return the error for ARQs whose demands were refused, by uuid, with the reasons of each.

    Its message has up to four reasons of each of the first three groups, and what to do. It names
    groups and no ARQs: those of a device context and of an attachment are created in the
    transaction that is undone. The ARQs of a group have the same reasons.
    """
    refused = {demand.arq_uuid: demand for demand in demands if demand.arq_uuid in reasons}
    profiles = list(dict.fromkeys(demand.profile for demand in refused.values()))
    has_several_profiles = len(profiles) > 1
    messages: dict[str, None] = {}  # ordered, each text once
    for arq_uuid, arq_reasons in reasons.items():
        demand = refused[arq_uuid]
        name = f"group {demand.group}"
        if has_several_profiles:
            name += f" of {device_profile.describe_profile(demand.profile)}"
        texts = [f"{r['reason']} ({r['handles']} handles)" for r in arq_reasons[:4]]
        messages[f"{name}: {'; '.join(texts) or 'no handle'}"] = None
    shown = join_limited(list(messages), 3, separator=". ", nouns="groups")
    subject = ""
    if not has_several_profiles and profiles[0]:
        subject = f" for {device_profile.describe_profile(profiles[0])}"
    message = f"no free attach handle{subject}: {shown}"
    commands = [command for profile in profiles if (command := _explain_command(profile))]
    if commands:
        message += f". What to do: see {join_limited(commands, 3, nouns='commands')}"
    return NoHandle(message, reasons=reasons)


def _explain_command(profile: str) -> str | None:
    """Return the command that shows each provider with a remedy, None if there is none."""
    if not device_profile.is_hidden_profile_name(profile):
        return f"cyborg device-profile-explain {profile}" if profile else None
    context = profile.removeprefix(device_profile.HIDDEN_PREFIX)
    return None if context == profile else f"cyborg device-context-explain {context}"
