# SPDX-License-Identifier: Apache-2.0
"""Binding all the requests of one call to one instance, within one transaction.

Two calls at once for one instance, in either order: the first UPDATE takes the instance's places
from 0 on, which the schema holds unique, so the second waits and then fails on the key; a call that
starts later sees the first one's requests. Both are a Conflict, whichever handles were free.

When one of the devices must be prepared on its host, all the requests become BindStarted and wait
for one job: they are Bound together, or BindFailed together. Whatever can be decided without the
host is decided here and refused with an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.conductor import wishlist
from cyborg.conductor.claiming import Lost, check_providers, claim
from cyborg.core.choosing import Need
from cyborg.core.device import CLEANED, Ability
from cyborg.core.errors import Conflict, NoHandle, WrongState
from cyborg.core.job import Item, JobKind
from cyborg.core.profile import parse_group
from cyborg.core.request import Bind
from cyborg.core.states import RequestState, Step, sources
from cyborg.db.store import claims, jobs
from cyborg.db.store import requests as store
from cyborg.db.store import services as agents


@dataclass(frozen=True, slots=True)
class Terms:
    """What a bind depends on beside its wishes.

    ``project`` is the instance's as Placement tells, None when it tells none; ``owner_known`` is
    False when nobody could vouch for whose the instance is. ``seconds`` is the time that host work
    may take. An agent that was last seen before ``alive_since`` cannot do any.
    """

    now: datetime
    seconds: float
    alive_since: datetime
    project: str | None = None
    owner_known: bool = True


@dataclass(frozen=True, slots=True)
class Done:
    """What a bind came to: the rows of the requests as they are now, and whether work follows.

    ``started`` tells that they are BindStarted and wait for a job. Rows that were bound before are
    not among them.
    """

    rows: Sequence[Mapping[str, object]] = ()
    started: bool = False


def bind(
    tx: sa.Connection, wishes: Sequence[Bind], scope: str | None, terms: Terms, *, wait: bool
) -> Done:
    """Bind every request or raise.

    Without ``wait``, handles that other transactions hold at this moment are passed over, and too
    few that are left is Lost; with it, it is NoHandle. Raises NotFound, WrongState, Conflict,
    NoHandle and Lost.
    """
    wanted = {wish.request: wish for wish in wishes}
    instance = wishes[0].instance_uuid
    rows = store.lock_to_bind(tx, sorted(wanted), instance, scope)
    if unknown := sorted(set(wanted) - {row["uuid"] for row in rows}):
        raise wishlist.unknown(unknown)
    todo = [row for row in rows if not _is_done(row, wanted[row["uuid"]], terms)]
    if not todo:
        return Done()
    for row in todo:
        _check_state(row)
    if rows[0]["others"]:
        raise _has_others(tx, instance, sorted(wanted))
    needs = [_need(row, wanted[row["uuid"]]) for row in todo]
    parts = claims.providers(tx, sorted({need.provider for need in needs}))
    check_providers(needs, parts)
    preparing = {part["provider"] for part in parts if Ability.PREPARES in part["abilities"]}
    state = RequestState.BIND_STARTED if preparing else RequestState.BOUND
    projects = _projects(todo, wanted, terms)
    _take_places(tx, rows, todo, wanted, state, projects, terms)
    soiling = {part["provider"] for part in parts if CLEANED & set(part["abilities"])}
    chosen = claim(tx, needs, _ids(todo), parts, soiling=soiling, wait=wait)
    if preparing:
        work = [need for need in needs if need.provider in preparing]
        _promise(tx, todo, work, chosen, parts, instance, terms)
    now_bound = [
        {
            **row,
            "state": state,
            "hostname": wishes[0].hostname,
            "instance_uuid": instance,
            "device_rp_uuid": wanted[row["uuid"]].device_rp_uuid,
            "project_id": projects.get(row["id"], row["project_id"]),
        }
        for row in todo
    ]
    return Done(now_bound, bool(preparing))


def _is_done(row: sa.RowMapping, wish: Bind, terms: Terms) -> bool:
    """Tell whether the request is bound just as wished, or about to be: asking twice is fine."""
    return (
        row["state"] in (RequestState.BOUND, RequestState.BIND_STARTED)
        and row["hostname"] == wish.hostname
        and row["device_rp_uuid"] == wish.device_rp_uuid
        and row["instance_uuid"] == wish.instance_uuid
        and wish.project_id in (None, terms.project, row["project_id"])
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


def _has_others(tx: sa.Connection, instance: str, uuids: Sequence[str]) -> Conflict:
    others = store.others_of_instance(tx, instance, uuids)
    told = ", ".join(f"{row['uuid']} ({row['state']})" for row in others)
    return Conflict(
        f"instance {instance} has other accelerator requests already: {told}",
        instance=instance,
        requests=[row["uuid"] for row in others],
    )


def _projects(
    todo: Sequence[sa.RowMapping], wanted: Mapping[str, Bind], terms: Terms
) -> dict[int, str]:
    """Return the project of each request whose owner changes, by row id.

    What Placement says of the instance counts for more than what the caller says.
    """
    told = {row["id"]: terms.project or wanted[row["uuid"]].project_id for row in todo}
    return {
        row["id"]: project
        for row in todo
        if (project := told[row["id"]]) is not None and project != row["project_id"]
    }


def _take_places(
    tx: sa.Connection,
    rows: Sequence[sa.RowMapping],
    todo: Sequence[sa.RowMapping],
    wanted: Mapping[str, Bind],
    state: RequestState,
    projects: Mapping[int, str],
    terms: Terms,
) -> None:
    """Give the requests their state; from here on no other call can bind for the same instance."""
    first = wanted[todo[0]["uuid"]]
    instance = first.instance_uuid
    taken = [row["instance_slot"] for row in rows if row["instance_slot"] is not None]
    try:
        changed = store.bind(
            tx,
            providers={row["id"]: wanted[row["uuid"]].device_rp_uuid for row in todo},
            projects=projects,
            hostname=first.hostname,
            instance=instance,
            first_slot=max(taken, default=-1) + 1,
            state=state,
            owner_known=terms.owner_known
            or all(wanted[row["uuid"]].project_id is not None for row in todo),
        )
    except db_exc.DBDuplicateEntry as bad:
        raise Conflict(
            f"instance {instance} has accelerator requests already", instance=instance
        ) from bad
    if changed != len(todo):
        raise Lost


def _promise(
    tx: sa.Connection,
    todo: Sequence[sa.RowMapping],
    needs: Sequence[Need],
    chosen: Mapping[str, str],
    parts: Sequence[sa.RowMapping],
    instance: str,
    terms: Terms,
) -> None:
    """Promise the host work in the same transaction. Raises NoHandle when nobody could do it."""
    host = needs[0].host
    seen = agents.last_seen(tx, host)
    if seen is None or seen < terms.alive_since:
        why = f"the agent of host {host} is down and its devices must be prepared"
        raise NoHandle(
            f"no attach handle can be made ready: {why}",
            reasons={n.request: [{"provider": n.provider, "reason": why}] for n in needs},
        )
    by_provider = {part["provider"]: part for part in parts}
    items = [
        Item(
            backend=part["backend"],
            device=part["device"],
            deployable=part["address"],
            handle=chosen[need.request],
            accel=need.accel,
        )
        for need in needs
        if (part := by_provider[need.provider])
    ]
    job = jobs.add(
        tx,
        kind=JobKind.PREPARE,
        host=host,
        subject=instance,
        arguments={"items": [item.to_dict() for item in items], "instance": instance},
        now=terms.now,
        deadline=terms.now + timedelta(seconds=terms.seconds),
    )
    jobs.attach_requests(tx, [row["id"] for row in todo], job)


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
