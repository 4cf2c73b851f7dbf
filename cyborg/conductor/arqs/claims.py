# SPDX-License-Identifier: Apache-2.0
"""Claim a free handle for each ARQ of a bind, or explain why there is none."""

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import sqlalchemy as sa

from cyborg.core.arq.attach_target import REQUIRED_INFO
from cyborg.core.arq.selection import Candidate, Demand, choose_handles
from cyborg.core.errors import NoHandle, NotFound
from cyborg.db.write import handle_claims
from cyborg.db.write.handle_claims import ClaimedProviderRow, FreeHandleRow, HandleStateRow

MAX_HANDLES = 4096  # of one provider, more than a device has

_RANDOM = random.Random()  # noqa: S311  (spreads load, no security purpose)


class ClaimLost(Exception):
    """A concurrent transaction claimed a candidate handle. Roll back, retry with waiting locks."""


def claim(
    tx: sa.Connection,
    demands: Sequence[Demand],
    ids: Mapping[str, int],
    deployables: Sequence[ClaimedProviderRow],
    *,
    needs_cleaning: Collection[str],
    wait: bool,
) -> dict[str, FreeHandleRow]:
    """Claim, for each demand, a free handle of the demanded provider; return them by ARQ uuid.

    ``needs_cleaning`` has the uuids of the providers whose handles must be cleaned after use. The
    column ``needs_cleaning`` of such a handle is set with the claim. Raise NoHandle or ClaimLost.
    """
    units = Counter(demand.provider for demand in demands)
    needs_info = {demand.provider for demand in demands if REQUIRED_INFO[demand.target]}
    rows: dict[int, FreeHandleRow] = {}
    free_handles: list[Candidate] = []
    for row in deployables:
        provider = row["provider"]
        # Not all handles may have the info: after an attempt that found none, lock all of them.
        limit = MAX_HANDLES if wait and provider in needs_info else units[provider]
        free = handle_claims.lock_unclaimed(tx, row["deployable_id"], limit, wait=wait)
        free_handles += [_to_candidate(row, handle) for handle in free]
        rows |= {handle["id"]: handle for handle in free}
    if len(free_handles) < len(demands):
        # Without ``wait``, handles may be locked out of order: waiting now could be a deadlock.
        raise _explain_no_handle(tx, demands, deployables) if wait else ClaimLost
    try:
        chosen = choose_handles(demands, free_handles, _RANDOM)
    except NoHandle:
        raise _explain_no_handle(tx, demands, deployables) from None
    owners = {handle: ids[arq] for arq, handle in chosen.items()}
    dirty = [handle.handle_id for handle in free_handles if handle.provider in needs_cleaning]
    if handle_claims.claim(tx, owners, needs_cleaning=dirty) != len(owners):
        raise ClaimLost
    return {arq: rows[handle] for arq, handle in chosen.items()}


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
    tx: sa.Connection, demands: Sequence[Demand], deployables: Sequence[ClaimedProviderRow]
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
    ]
    providers = {row["provider"] for row in deployables}
    if empty := providers - {candidate.provider for candidate in candidates}:
        return NoHandle(
            f"no free attach handle: resource provider {', '.join(sorted(empty))} has no handles",
            reasons={
                demand.arq_uuid: [
                    {"provider": demand.provider, "reason": "no handle", "handles": 0}
                ]
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
        traits=frozenset(deployable["traits"]),
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
