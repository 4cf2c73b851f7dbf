# SPDX-License-Identifier: Apache-2.0
"""Giving each request of a bind a free handle of its provider, or saying why there is none."""

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import sqlalchemy as sa

from cyborg.core.choosing import Candidate, Need, choose
from cyborg.core.errors import NoHandle, NotFound
from cyborg.db.store import claims

_RANDOM = random.Random()  # noqa: S311  (spreads load, guards nothing)


class Lost(Exception):
    """Others hold or claimed what would serve: undo the transaction and try again, waiting."""


def claim(
    tx: sa.Connection,
    needs: Sequence[Need],
    ids: Mapping[str, int],
    parts: Sequence[sa.RowMapping],
    *,
    soiling: Collection[str],
    wait: bool,
) -> dict[str, str]:
    """Give each need a free handle of its provider: request uuid -> handle address.

    The handles of the providers in ``soiling`` are marked: they must be cleaned afterwards.
    Raises NoHandle or Lost.
    """
    units = Counter(need.provider for need in needs)
    addresses: dict[int, str] = {}
    found: list[Candidate] = []
    for part in parts:
        free = claims.lock_free(tx, part["deployable_id"], units[part["provider"]], wait=wait)
        found += [_candidate(part, handle) for handle in free]
        addresses |= {handle["id"]: handle["address"] for handle in free}
    if len(found) != len(needs):
        # Waiting with handles in hand that were picked out of their order would be a deadlock.
        raise _refusal(tx, needs, parts) if wait else Lost
    try:
        chosen = choose(needs, found, _RANDOM)
    except NoHandle:
        raise _refusal(tx, needs, parts) from None
    owners = {handle: ids[request] for request, handle in chosen.items()}
    prepared = [found_.handle_id for found_ in found if found_.provider in soiling]
    if claims.claim(tx, owners, prepared=prepared) != len(owners):
        raise Lost
    return {request: addresses[handle] for request, handle in chosen.items()}


def check_providers(needs: Sequence[Need], parts: Sequence[sa.RowMapping]) -> None:
    """Raise NotFound unless each need's provider is known, on the host that the need names."""
    hosts = {part["provider"]: part["host"] for part in parts}
    for need in needs:
        if need.provider not in hosts:
            raise NotFound(
                f"request {need.request}: no resource provider {need.provider} is known",
                request=need.request,
                provider=need.provider,
            )
        if hosts[need.provider] != need.host:
            raise NotFound(
                f"request {need.request}: resource provider {need.provider} is on host "
                f"{hosts[need.provider]}, not on {need.host}",
                request=need.request,
                provider=need.provider,
                host=hosts[need.provider],
            )


def _refusal(tx: sa.Connection, needs: Sequence[Need], parts: Sequence[sa.RowMapping]) -> Exception:
    """Look at every handle, free or not, to say why none serves."""
    by_id = {part["deployable_id"]: part for part in parts}
    handles = claims.census(tx, sorted(by_id))
    everything = [_candidate(by_id[row["deployable_id"]], row) for row in handles]
    if empty := {part["provider"] for part in parts} - {found.provider for found in everything}:
        return NoHandle(
            f"no free attach handle: resource provider {', '.join(sorted(empty))} has none at all",
            reasons={
                need.request: [{"provider": need.provider, "reason": "no handle", "handles": 0}]
                for need in needs
                if need.provider in empty
            },
        )
    try:
        choose(needs, everything, _RANDOM)
    except NoHandle as bad:
        return bad
    return Lost()  # one was given back between the two looks


def _candidate(part: sa.RowMapping, handle: sa.RowMapping) -> Candidate:
    return Candidate(
        handle_id=handle["id"],
        handle=handle["uuid"],
        provider=part["provider"],
        host=part["host"],
        resource_class=part["resource_class"],
        traits=frozenset(part["traits"]),
        device_status=part["device_status"],
        health=part["health"],
        draining=part["draining"] or handle.get("draining", False),
        setup_required=part["setup_required"],
        reboot_required=part["reboot_required"],
        withdrawn=part["withdrawn"],
        programming=part["programming"],
        taken=handle.get("taken", False),
        dirty=handle.get("dirty", False),
    )
