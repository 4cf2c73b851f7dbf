# SPDX-License-Identifier: Apache-2.0
"""Binding all the requests of one call to one instance, within one transaction.

Two calls at once for one instance, in either order: the first UPDATE takes the instance's places
from 0 on, which the schema holds unique, so the second waits and then fails on the key; a call that
starts later sees the first one's requests. Both are a Conflict, whichever handles were free.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.conductor import wishlist
from cyborg.core.choosing import Candidate, Need, choose
from cyborg.core.errors import Conflict, NoHandle, NotFound, WrongState
from cyborg.core.profile import parse_group
from cyborg.core.request import Bind
from cyborg.core.states import RequestState, Step, sources
from cyborg.db.store import claims, outbox
from cyborg.db.store import requests as store

EVENT = "nova-event"
"""The kind of the outbox's messages to Nova."""

_RANDOM = random.Random()  # noqa: S311  (spreads load, guards nothing)


class Lost(Exception):
    """Others hold or claimed what would serve: undo the transaction and try again, waiting."""


def bind(
    tx: sa.Connection, wishes: Sequence[Bind], scope: str | None, *, notify: bool, wait: bool
) -> int:
    """Bind every request or raise; return how many were not bound so before.

    With ``notify``, Nova's events are recorded in the same transaction. Without ``wait``, handles
    that other transactions hold at this moment are passed over, and too few that are left is Lost;
    with it, it is NoHandle. Raises NotFound, WrongState, Conflict, NoHandle and Lost.
    """
    wanted = {wish.request: wish for wish in wishes}
    rows = store.lock(tx, sorted(wanted), scope)
    if unknown := sorted(set(wanted) - {row["uuid"] for row in rows}):
        raise wishlist.unknown(unknown)
    todo = [row for row in rows if not _is_done(row, wanted[row["uuid"]])]
    if not todo:
        return 0
    for row in todo:
        _check_state(row)
    _take_places(tx, rows, todo, wanted)
    _claim(tx, [_need(row, wanted[row["uuid"]]) for row in todo], _ids(todo), wait=wait)
    if notify:
        outbox.add(tx, EVENT, (_event(row, wanted[row["uuid"]]) for row in todo))
    return len(todo)


def _is_done(row: sa.RowMapping, wish: Bind) -> bool:
    """Tell whether the request is bound just as wished: asking twice is no mistake."""
    return (
        row["state"] == RequestState.BOUND
        and row["hostname"] == wish.hostname
        and row["device_rp_uuid"] == wish.device_rp_uuid
        and row["instance_uuid"] == wish.instance_uuid
        and wish.project_id in (None, row["project_id"])
    )


def _check_state(row: sa.RowMapping) -> None:
    allowed = sources(Step.START)
    if row["state"] not in allowed:
        raise WrongState(
            f"cannot bind request {row['uuid']}, which is {row['state']}: "
            f"it must be one of {', '.join(allowed)}",
            request=row["uuid"],
            state=row["state"],
        )


def _take_places(
    tx: sa.Connection,
    rows: Sequence[sa.RowMapping],
    todo: Sequence[sa.RowMapping],
    wanted: Mapping[str, Bind],
) -> None:
    """Mark the requests Bound; from here on no other call can bind for the same instance."""
    first = wanted[todo[0]["uuid"]]
    instance = first.instance_uuid
    taken = [row["instance_slot"] for row in rows if row["instance_slot"] is not None]
    ids = [row["id"] for row in rows]
    try:
        changed = store.bind(
            tx,
            providers={row["id"]: wanted[row["uuid"]].device_rp_uuid for row in todo},
            projects={
                row["id"]: project
                for row in todo
                if (project := wanted[row["uuid"]].project_id) is not None
            },
            hostname=first.hostname,
            instance=instance,
            first_slot=max(taken, default=-1) + 1,
        )
    except db_exc.DBDuplicateEntry as bad:
        raise Conflict(
            f"instance {instance} has accelerator requests already", instance=instance
        ) from bad
    if changed != len(todo):
        raise Lost
    if others := store.others_of_instance(tx, instance, ids):
        told = ", ".join(f"{row['uuid']} ({row['state']})" for row in others)
        raise Conflict(
            f"instance {instance} has other accelerator requests already: {told}",
            instance=instance,
            requests=[row["uuid"] for row in others],
        )


def _claim(tx: sa.Connection, needs: Sequence[Need], ids: Mapping[str, int], *, wait: bool) -> None:
    """Give each need a free handle of its provider. Raises NotFound, NoHandle or Lost."""
    units = Counter(need.provider for need in needs)
    parts = claims.providers(tx, sorted(units))
    _check_providers(needs, {part["provider"]: part["host"] for part in parts})
    found = [
        _candidate(part, handle)
        for part in parts
        for handle in claims.lock_free(
            tx, part["deployable_id"], units[part["provider"]], wait=wait
        )
    ]
    if len(found) != len(needs):
        # Waiting with handles in hand that were picked out of their order would be a deadlock.
        raise _refusal(tx, needs, parts) if wait else Lost
    try:
        chosen = choose(needs, found, _RANDOM)
    except NoHandle:
        raise _refusal(tx, needs, parts) from None
    owners = {handle: ids[request] for request, handle in chosen.items()}
    if claims.claim(tx, owners) != len(owners):
        raise Lost


def _check_providers(needs: Sequence[Need], hosts: Mapping[str, str]) -> None:
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


def _ids(rows: Sequence[sa.RowMapping]) -> dict[str, int]:
    return {row["uuid"]: row["id"] for row in rows}


def _need(row: sa.RowMapping, wish: Bind) -> Need:
    group = parse_group(row["group"], "group")
    return Need(
        request=row["uuid"],
        provider=wish.device_rp_uuid,
        host=wish.hostname,
        resource_class=row["resource_class"],
        required=group.required,
        forbidden=group.forbidden,
        accel=group.accel,
    )


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
        taken=handle.get("taken", False),
    )


def _event(row: sa.RowMapping, wish: Bind) -> tuple[str, dict[str, str]]:
    return wish.instance_uuid, {
        "name": "accelerator-request-bound",
        "server_uuid": wish.instance_uuid,
        "tag": row["uuid"],
        "status": "completed",
    }
