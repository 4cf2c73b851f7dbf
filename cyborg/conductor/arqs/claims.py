# SPDX-License-Identifier: Apache-2.0
"""Claim a free handle for each ARQ of a bind, or explain why there is none."""

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import sqlalchemy as sa

from cyborg.core.arq.attach_target import REQUIRED_INFO
from cyborg.core.arq.predicates import Failure, Predicate
from cyborg.core.arq.selection import Candidate, Demand, choose_handles, describe_rejection
from cyborg.core.errors import NoHandle, NotFound
from cyborg.core.naming import OWNER_TRAIT
from cyborg.db.write import handle_claims
from cyborg.db.write.handle_claims import ClaimedProviderRow, FreeHandleRow, HandleStateRow

MAX_HANDLES = 4096  # of one provider, more than a device has
NO_HANDLES = Failure(Predicate.TOO_FEW_HANDLES, "no handle")

_RANDOM = random.Random()  # noqa: S311  (spreads load, no security purpose)


class ClaimLost(Exception):
    """A concurrent transaction claimed a candidate handle. Roll back, and retry with ``wait``."""


def claim(
    tx: sa.Connection,
    demands: Sequence[Demand],
    ids: Mapping[str, int],
    deployables: Sequence[ClaimedProviderRow],
    *,
    needs_cleaning: Collection[str],
    wait: bool,
    handle: str | None = None,
) -> dict[str, FreeHandleRow]:
    """Claim, for each demand, a free handle of the demanded provider; return them by ARQ uuid.

    ``needs_cleaning`` has the uuids of the providers whose handles must be cleaned after use. The
    column ``needs_cleaning`` of such a handle is set with the claim. ``handle`` is the uuid of the
    only handle to claim. Raise NoHandle or ClaimLost.
    """
    units = Counter(demand.provider for demand in demands)
    needs_info = {demand.provider for demand in demands if REQUIRED_INFO[demand.target]}
    # The other ARQs must leave the handles with the info to later servers: choose among all.
    mixed = bool(needs_info) and not all(REQUIRED_INFO[demand.target] for demand in demands)
    rows: dict[int, FreeHandleRow] = {}
    free_handles: list[Candidate] = []
    for row in deployables:
        provider = row["provider"]
        # Not all handles may have the info: after an attempt that found none, lock all of them.
        lock_all = mixed or (wait and provider in needs_info)
        limit = MAX_HANDLES if lock_all else units[provider]
        free = handle_claims.lock_unclaimed(
            tx, row["deployable_id"], limit, wait=wait, handle=handle
        )
        free_handles += [_to_candidate(row, item) for item in free]
        rows |= {item["id"]: item for item in free}
    if len(free_handles) < len(demands):
        # Without ``wait``, handles may be locked out of order: waiting now could be a deadlock.
        raise _explain_no_handle(tx, demands, deployables, handle) if wait else ClaimLost
    try:
        chosen = choose_handles(demands, free_handles, _RANDOM)
    except NoHandle:
        raise _explain_no_handle(tx, demands, deployables, handle) from None
    owners = {handle_id: ids[arq] for arq, handle_id in chosen.items()}
    dirty = [item.handle_id for item in free_handles if item.provider in needs_cleaning]
    if handle_claims.claim(tx, owners, needs_cleaning=dirty) != len(owners):
        raise ClaimLost
    return {arq: rows[handle_id] for arq, handle_id in chosen.items()}


def check_providers(demands: Sequence[Demand], deployables: Sequence[ClaimedProviderRow]) -> None:
    """Raise NotFound unless the provider of each demand exists on the host of the demand."""
    hosts = {row["provider"]: row["host"] for row in deployables}
    for demand in demands:
        if demand.provider not in hosts:
            raise NotFound(
                f"ARQ {demand.arq_uuid}: resource provider {demand.provider} does not exist",
                request=demand.arq_uuid,
                provider=demand.provider,
            )
        if hosts[demand.provider] != demand.host:
            raise NotFound(
                f"ARQ {demand.arq_uuid}: resource provider {demand.provider} is on host "
                f"{hosts[demand.provider]}, not on {demand.host}",
                request=demand.arq_uuid,
                provider=demand.provider,
                host=hosts[demand.provider],
            )


def _explain_no_handle(
    tx: sa.Connection,
    demands: Sequence[Demand],
    deployables: Sequence[ClaimedProviderRow],
    handle: str | None,
) -> Exception:
    """Return the NoHandle error, with the reasons why each handle cannot be claimed."""
    by_id = {row["deployable_id"]: row for row in deployables}
    handles = handle_claims.all_handles(tx, sorted(by_id))
    candidates = [
        _to_candidate(
            by_id[row["deployable_id"]],
            row,
            draining=row["draining"],
            in_use=row["taken"],
            dirty=row["dirty"],
        )
        for row in handles
        if handle in (None, row["uuid"])
    ]
    providers = {row["provider"] for row in deployables}
    if handle is not None and not candidates:
        return NoHandle(
            f"no free attach handle: accelerator {handle} does not exist any more on resource "
            f"provider {', '.join(sorted(providers))}",
            reasons={
                demand.arq_uuid: [describe_rejection(demand.provider, NO_HANDLES, 0)]
                for demand in demands
            },
        )
    if empty := providers - {candidate.provider for candidate in candidates}:
        return NoHandle(
            f"no free attach handle: resource provider {', '.join(sorted(empty))} has no handles",
            reasons={
                demand.arq_uuid: [describe_rejection(demand.provider, NO_HANDLES, 0)]
                for demand in demands
                if demand.provider in empty
            },
        )
    try:
        choose_handles(demands, candidates, _RANDOM)
    except NoHandle as exc:
        return exc
    return ClaimLost()  # a handle was released since the first query, or was not locked by it


def _to_candidate(
    deployable: ClaimedProviderRow,
    handle: FreeHandleRow | HandleStateRow,
    *,
    draining: bool = False,
    in_use: bool = False,
    dirty: bool = False,
) -> Candidate:
    return Candidate(
        handle_id=handle["id"],
        handle=handle["uuid"],
        provider=deployable["provider"],
        resource_class=deployable["resource_class"],
        # Placement shows this trait of each provider of ours; no report has it.
        traits=frozenset(deployable["traits"]) | {OWNER_TRAIT},
        device_status=deployable["device_status"],
        health=deployable["health"],
        draining=deployable["draining"] or draining,
        setup_required=deployable["setup_required"],
        reboot_required=deployable["reboot_required"],
        failing=deployable["failing"],
        deliverable=deployable["deliverable"],
        backend_disabled=deployable["cordoned"],
        programming=deployable["programming"],
        restore_failed=deployable["restore_failed"],
        in_use=in_use,
        dirty=dirty,
        device=deployable["device"],
        info=handle["info"],
    )
