# SPDX-License-Identifier: Apache-2.0
"""Claim a free handle for each ARQ of a bind, or explain why there is none."""

import os
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.core.binding.profile import REQUIRED_INFO
from cyborg.core.errors import Conflict, NoHandle, NotFound
from cyborg.core.explain.explanation import ProviderState
from cyborg.core.explain.predicates import Failure, Predicate
from cyborg.core.explain.selection import (
    Candidate,
    Demand,
    choose_handles,
    describe_rejection,
    find_claim_failures,
    put_first,
)
from cyborg.core.inventory.device_state import ENABLED, DeviceFacts, combine_facts
from cyborg.core.naming import OWNER_TRAIT
from cyborg.db.binding import claims as handle_claims
from cyborg.db.binding.claims import ClaimedProviderRow, FreeHandleRow, HandleStateRow
from cyborg.db.device_sets import write as device_sets
from cyborg.db.device_sets.write import MemberRow, MemberStateRow
from cyborg.db.explain import provider_states

MAX_HANDLES = 4096  # of one provider, more than a device has
NO_HANDLES = Failure(Predicate.TOO_FEW_HANDLES, "no handle")

# Faster than the generator of the system for thousands of handles. The workers of a conductor are
# forks: with the same state all would choose the same handles.
_RANDOM = random.Random()  # noqa: S311  (spreads load, no security purpose)
os.register_at_fork(after_in_child=_RANDOM.seed)


class Retry(Exception):
    """A concurrent transaction has changed what this one needs. Roll back, and retry with ``wait``.

    ``reason`` is what has changed, for the log.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BeingCleaned(NoHandle):
    """Handles that are being cleaned will meet the demands: the same bind succeeds after that.

    ``handles`` are the row ids of these handles.
    """

    def __init__(self, message: str, handles: Collection[int], **details: object) -> None:
        super().__init__(message, **details)
        self.handles = frozenset(handles)


def claim_handles(
    tx: sa.Connection,
    demands: Sequence[Demand],
    ids: Mapping[str, int],
    deployables: Sequence[ClaimedProviderRow],
    *,
    providers_to_clean: Collection[str],
    wait: bool,
    now: datetime,
    handle: str | None = None,
    check_host: bool = False,
    honoured: Collection[str] = (),
) -> dict[str, FreeHandleRow | MemberRow]:
    """Claim, for each demand, a free handle of the demanded provider; return them by ARQ uuid.

    Choose among free handles, which are locked for that; ``db.binding.claims.claim`` writes the
    choice.

    ``providers_to_clean`` has the uuids of the providers whose handles must be cleaned after use:
    the column ``needs_cleaning`` of such a handle is set with the claim. ``handle`` is the uuid of
    the only handle to claim. With ``check_host``, Placement must have the providers: the caller has
    called ``check_available`` before. ``honoured`` are the uuids of the providers whose cordon does
    not count. Raise NoHandle, which is BeingCleaned if a later bind succeeds, NotFound or Retry.
    """
    deployables = [
        {**row, "status": ENABLED, "cordoned": False} if row["provider"] in honoured else row
        for row in deployables
    ]
    units = Counter(demand.provider for demand in demands)
    needs_info = {demand.provider for demand in demands if REQUIRED_INFO[demand.target]}
    # The other ARQs must leave the handles with the info to later servers: choose among all.
    mixed = bool(needs_info) and not all(REQUIRED_INFO[demand.target] for demand in demands)
    # Handles are locked provider by provider, in the order of ``deployables``, which is that of
    # their row ids: two binds that need the same providers never wait in a circle.
    rows: dict[int, FreeHandleRow | MemberRow] = {}
    free_handles: list[Candidate] = []
    for row in deployables:
        provider = row["provider"]
        # Not all handles may have the info: after an attempt that found none, lock all of them.
        lock_all = mixed or (wait and provider in needs_info)
        limit = MAX_HANDLES if lock_all else units[provider]
        if row["set_size"] is not None:
            members = device_sets.lock_unclaimed(tx, row["deployable_id"], wait=wait)
            cordons = provider not in honoured
            free_handles += [_to_member_candidate(row, m, cordons=cordons) for m in members]
            rows |= {item["id"]: item for item in members}
            continue
        free = handle_claims.lock_unclaimed(
            tx,
            row["deployable_id"],
            limit,
            wait=wait,
            handle=handle,
            has_members=row["has_members"],
        )
        free_handles += [_to_candidate(row, item) for item in free]
        rows |= {item["id"]: item for item in free}
    # Without ``wait``, handles may be locked out of order: waiting now could be a deadlock.
    if len(free_handles) < len(demands) and not wait:
        raise Retry("too few handles are free and unlocked")
    try:
        chosen = choose_handles(demands, free_handles, _RANDOM)
    except NoHandle:
        raise _explain_no_handle(
            tx, demands, deployables, handle, now, check_host=check_host, honoured=honoured
        ) from None
    # The guarded UPDATE decides, not the choice: a device may have been cordoned since its handles
    # were locked, and no lock of a handle prevents that.
    owners = {handle_id: ids[arq] for arq, handle_id in chosen.items()}
    dirty = [item.handle_id for item in free_handles if item.provider in providers_to_clean]
    sets = {row["provider"]: row for row in deployables if row["set_size"] is not None}
    claimed = 0
    for provider, row in sets.items():
        of_set = {
            chosen[demand.arq_uuid]: owners[chosen[demand.arq_uuid]]
            for demand in demands
            if demand.provider == provider
        }
        try:
            claimed += device_sets.claim(
                tx,
                row["deployable_id"],
                of_set,
                needs_cleaning=dirty,
                is_honoured=provider in honoured,
            )
        except db_exc.DBReferenceError as exc:
            raise Retry(f"device set {row['address']} was removed") from exc
        owners = {handle_id: arq for handle_id, arq in owners.items() if handle_id not in of_set}
    if owners:
        claimed += handle_claims.claim(
            tx,
            owners,
            needs_cleaning=dirty,
            published=check_host,
            honoured=[row["deployable_id"] for row in deployables if row["provider"] in honoured],
        )
    if claimed != len(chosen):
        raise Retry("a chosen handle was claimed, or its provider was cordoned")
    return {arq: rows[handle_id] for arq, handle_id in chosen.items()}


def check_available(tx: sa.Connection, demands: Sequence[Demand]) -> None:
    """Raise NoHandle if the agent of a host is down, or Placement does not have a provider.

    The reasons are the first failing predicates, as in an explanation. The guards of the later
    changes check both again: without them, a concurrent transaction could mark the agent down
    between this query and the claim.
    """
    providers = sorted({demand.provider for demand in demands})
    if not handle_claims.any_unavailable(tx, providers):
        return
    # Only for the error: the query above is a cheap yes or no, the states cost a join over all
    # handles.
    states = _read_states(tx, demands, check_host=True)
    failures = find_claim_failures(demands, states)
    if not failures:
        raise Retry("an unavailable host or provider is available again")
    # No handle was examined: the first failure is the only reason of an ARQ.
    reasons: dict[str, list[dict[str, object]]] = {arq_uuid: [] for arq_uuid in failures}
    raise put_first(reasons, failures, demands, _count_handles(states))


def check_providers(demands: Sequence[Demand], deployables: Sequence[ClaimedProviderRow]) -> None:
    """Raise NotFound unless the provider of each demand exists on the host of the demand.

    Raise Conflict unless the demands for a device set are as many as its members. The errors name
    the provider and no ARQ: those of a device context or an attachment are created in the
    transaction that is undone.
    """
    hosts = {row["provider"]: row["host"] for row in deployables}
    for demand in demands:
        if demand.provider not in hosts:
            raise NotFound(
                f"resource provider {demand.provider} does not exist in this service, or was "
                "removed with its device or device set: take one of cyborg deployable-list, or "
                "build the server again",
                provider=demand.provider,
            )
        if hosts[demand.provider] != demand.host:
            raise NotFound(
                f"resource provider {demand.provider} is on host {hosts[demand.provider]}, not on "
                f"{demand.host}: bind to its host, or take a provider of that host",
                provider=demand.provider,
                host=hosts[demand.provider],
            )
    units = Counter(demand.provider for demand in demands)
    for row in deployables:
        provider, size = row["provider"], row["set_size"]
        if size not in (None, units[provider]):
            raise Conflict(
                f"resource provider {provider} is the device set {row['address']} of {size} "
                f"devices, which are bound together, and the call binds {units[provider]}: bind "
                f"the {size} accelerator requests of one group in one call",
                provider=provider,
                size=size,
            )


def _explain_no_handle(
    tx: sa.Connection,
    demands: Sequence[Demand],
    deployables: Sequence[ClaimedProviderRow],
    handle: str | None,
    now: datetime,
    *,
    check_host: bool,
    honoured: Collection[str],
) -> Exception:
    """Return the error of a claim: NoHandle with the reasons why each handle cannot be claimed.

    It is NotFound or Retry if a provider or a handle has changed since the first query. Cordons of
    the providers ``honoured`` do not count. The first reason of each ARQ is the first failing
    predicate of its group, as in an explanation.
    """
    candidates = _list_candidates(tx, deployables, handle, honoured)
    error = _list_rejections(demands, candidates, handle)
    if not isinstance(error, NoHandle):
        return error
    # An explanation is about all handles of a provider: not for a claim of one of them.
    if handle is None:
        # The honoured providers as if they were not cordoned.
        states = [
            replace(state, facts=replace(state.facts, status=ENABLED, cordoned=False))
            if state.uuid in honoured
            else state
            for state in _read_states(tx, demands, check_host=check_host)
        ]
        failures = find_claim_failures(demands, states)
        error = put_first(error.details["reasons"], failures, demands, _count_handles(states))
    if cleaning := _find_sufficient_cleaning(tx, demands, candidates, now):
        return BeingCleaned(error.message, cleaning, **error.details)
    return error


def _find_sufficient_cleaning(
    tx: sa.Connection, demands: Sequence[Demand], candidates: Sequence[Candidate], now: datetime
) -> set[int]:
    """Return the row ids of the handles that are being cleaned, and whose cleaning may end soon.

    Return none if the demands cannot be met when all of these are clean.
    """
    dirty = {candidate.handle_id for candidate in candidates if candidate.dirty}
    cleaning = handle_claims.find_cleaning(tx, dirty, now) if dirty else set()
    if not cleaning:
        return set()
    later = [replace(c, dirty=c.dirty and c.handle_id not in cleaning) for c in candidates]
    try:
        choose_handles(demands, later, _RANDOM)
    except NoHandle:
        return set()
    return cleaning


def _read_states(
    tx: sa.Connection, demands: Sequence[Demand], *, check_host: bool
) -> list[ProviderState]:
    """Return the states of the demanded providers; without ``check_host``, as if available."""
    states = provider_states.find(
        tx,
        uuids={demand.provider for demand in demands},
        attach_targets={demand.target for demand in demands},
    )
    if check_host:
        return states
    return [
        replace(state, published=True, facts=replace(state.facts, host_down=False, withheld=False))
        for state in states
    ]


def _count_handles(states: Iterable[ProviderState]) -> dict[str, int]:
    return {state.uuid: state.handles.total for state in states}


def _list_candidates(
    tx: sa.Connection,
    deployables: Sequence[ClaimedProviderRow],
    handle: str | None,
    honoured: Collection[str],
) -> list[Candidate]:
    """Return all handles of the deployables, also those that cannot be claimed."""
    by_id = {row["deployable_id"]: row for row in deployables}
    handles = handle_claims.all_handles(tx, sorted(by_id))
    sets = [id_ for id_, row in by_id.items() if row["set_size"] is not None]
    candidates = [
        _to_candidate(
            by_id[row["deployable_id"]],
            row,
            draining=row["draining"],
            in_use=row["taken"],
            dirty=row["dirty"],
            in_sets=row["is_member"],
        )
        for row in handles
        if handle in (None, row["uuid"])
    ]
    for member in device_sets.all_members(tx, sets) if sets else ():
        row = by_id[member["deployable_id"]]
        cordons = row["provider"] not in honoured
        candidates.append(_to_member_candidate(row, member, cordons=cordons))
    return candidates


def _list_rejections(
    demands: Sequence[Demand], candidates: Sequence[Candidate], handle: str | None
) -> Exception:
    """Return the NoHandle error with all predicates that the handles fail, or another one.

    It is Retry if a handle can be claimed now, NotFound if the only ``handle`` was deleted.
    """
    if handle is not None and not candidates:
        return NotFound(f"accelerator {handle} does not exist any more")
    try:
        choose_handles(demands, candidates, _RANDOM)
    except NoHandle as exc:
        for demand in demands:
            if exc.details["reasons"].get(demand.arq_uuid) == []:  # a provider without handles
                none = describe_rejection(demand, NO_HANDLES, handles=0)
                exc.details["reasons"][demand.arq_uuid].append(none)
        return exc
    return Retry("a handle was released since the first query, or was not locked by it")


def _to_candidate(
    deployable: ClaimedProviderRow,
    handle: FreeHandleRow | HandleStateRow,
    *,
    draining: bool = False,
    in_use: bool = False,
    dirty: bool = False,
    in_sets: bool = False,
) -> Candidate:
    return Candidate(
        handle_id=handle["id"],
        handle=handle["uuid"],
        provider=deployable["provider"],
        resource_class=deployable["resource_class"],
        # Placement shows this trait of each provider of ours; no report has it.
        traits=frozenset(deployable["traits"]) | {OWNER_TRAIT},
        # Whether the agent is down does not matter: Nova has chosen the host. Whether a set is
        # offered does not matter: Placement allocated it before the offer ended, and no overlapping
        # set is offered while it may have done so.
        facts=DeviceFacts.from_row(
            deployable, host_down=False, withheld=False, draining=deployable["draining"] or draining
        ),
        in_use=in_use,
        dirty=dirty,
        in_sets=in_sets,
        device=deployable["device"],
        numa_node=deployable["numa_node"],
        info=handle["info"],
    )


def _to_member_candidate(
    device_set: ClaimedProviderRow, member: MemberRow | MemberStateRow, *, cordons: bool
) -> Candidate:
    """Return a member of a set as a handle of the set's provider.

    Without ``cordons``, a cordon of its device does not count.
    """
    facts = DeviceFacts.from_row(member, host_down=False, withheld=False)
    if not cordons:
        facts = replace(facts, status=ENABLED, cordoned=False)
    candidate = _to_candidate(device_set, member)
    return replace(
        candidate,
        device=member["device"],
        facts=combine_facts(candidate.facts, facts),
        # A MemberRow, which is free and clean, has neither column.
        in_use=bool(member.get("taken")),
        dirty=bool(member.get("dirty")),
    )
