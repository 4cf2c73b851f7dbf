# SPDX-License-Identifier: Apache-2.0
"""Bind all ARQs of one call to one instance, within one transaction.

Two concurrent calls for one instance cannot both succeed. The first UPDATE of a call reserves slots
of the instance, numbered from 0. A slot is unique in the schema, so the second call waits for the
first and then fails on the unique key. A call that starts later finds the ARQs of the first call.
In both cases the error is Conflict, even if handles are free.

If one of the devices must be prepared on its host, all the ARQs become BindStarted and wait for one
job; then all are Bound or all are BindFailed. Errors that do not come from host work are raised by
``bind``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.conductor.arqs.claims import ClaimLost, check_providers, claim
from cyborg.conductor.custody import entries
from cyborg.core.arq.arqs import BindRequest, arqs_not_found
from cyborg.core.arq.attach_target import find_target
from cyborg.core.arq.profile import parse_group
from cyborg.core.arq.selection import Demand
from cyborg.core.arq.states import ArqState, Step, source_states
from cyborg.core.errors import Conflict, NoHandle, WrongState
from cyborg.core.inventory.device import CLEANING_ABILITIES, Ability
from cyborg.core.jobs.job import JobKind, WorkItem
from cyborg.db.write import arqs as store
from cyborg.db.write import handle_claims, jobs
from cyborg.db.write import services as agents


@dataclass(frozen=True, slots=True)
class BindContext:
    """Context of a bind that is not part of the request.

    ``project`` is the project of the instance in Placement, or None. ``owner_verified`` is False if
    the project of the instance could not be determined. ``prepare_timeout`` limits the host work,
    in seconds. An agent last seen before ``alive_since`` counts as down.
    """

    now: datetime
    prepare_timeout: float
    alive_since: datetime
    project: str | None = None
    owner_verified: bool = True


@dataclass(frozen=True, slots=True)
class BindResult:
    """Result of a bind: the rows of the ARQs that this call has bound, as they are now.

    An ARQ that an earlier call has bound is left out. If ``host_work_pending`` is True, the ARQs
    are BindStarted and wait for a job.
    """

    arqs: Sequence[store.ArqRow] = ()
    host_work_pending: bool = False


def bind(
    tx: sa.Connection,
    bind_requests: Sequence[BindRequest],
    scope: str | None,
    context: BindContext,
    *,
    wait: bool,
) -> BindResult:
    """Bind all the ARQs or raise.

    Without ``wait``, skip handles that other transactions have locked, and raise ClaimLost if too
    few remain. With ``wait``, wait for these locks, and raise NoHandle if too few are free. Raise
    NotFound, WrongState, Conflict, NoHandle, ClaimLost.
    """
    requests_by_uuid = {item.request: item for item in bind_requests}
    instance = bind_requests[0].instance_uuid
    rows = store.lock_to_bind(tx, sorted(requests_by_uuid), instance, scope)
    if missing := sorted(set(requests_by_uuid) - {row["uuid"] for row in rows}):
        raise arqs_not_found(missing)
    todo = [
        row
        for row in rows
        if not _is_bound_as_requested(row, requests_by_uuid[row["uuid"]], context)
    ]
    if not todo:
        return BindResult()
    for row in todo:
        _check_state(tx, row)
    if rows[0]["other_arqs"]:
        raise _instance_conflict(tx, instance, sorted(requests_by_uuid))
    demands = [_to_demand(row, requests_by_uuid[row["uuid"]]) for row in todo]
    deployables = handle_claims.providers(tx, sorted({demand.provider for demand in demands}))
    check_providers(demands, deployables)
    needs_prepare = {row["provider"] for row in deployables if Ability.PREPARES in row["abilities"]}
    state = ArqState.BIND_STARTED if needs_prepare else ArqState.BOUND
    projects = _changed_projects(todo, requests_by_uuid, context)
    _reserve_instance_slots(tx, rows, todo, requests_by_uuid, state, projects, context)
    needs_cleaning = {
        row["provider"] for row in deployables if CLEANING_ABILITIES & set(row["abilities"])
    }
    chosen = claim(tx, demands, _ids(todo), deployables, needs_cleaning=needs_cleaning, wait=wait)
    if needs_prepare:
        to_prepare = [demand for demand in demands if demand.provider in needs_prepare]
        _enqueue_prepare_job(tx, todo, to_prepare, chosen, deployables, instance, context)
    updated: list[store.ArqToBindRow] = [
        {
            **row,
            "state": state,
            "hostname": bind_requests[0].hostname,
            "instance_uuid": instance,
            "device_rp_uuid": requests_by_uuid[row["uuid"]].device_rp_uuid,
            "project_id": projects.get(row["id"], row["project_id"]),
        }
        for row in todo
    ]
    by_provider = {row["provider"]: row for row in deployables}
    of_arqs = {demand.arq_uuid: by_provider[demand.provider] for demand in demands}
    entries.record_claimed(tx, updated, chosen, of_arqs, context.now)
    return BindResult(updated, bool(needs_prepare))


def _is_bound_as_requested(
    row: store.ArqToBindRow, bind_request: BindRequest, context: BindContext
) -> bool:
    """Return whether an earlier, equal request has bound, or is binding, the ARQ."""
    return (
        row["state"] in (ArqState.BOUND, ArqState.BIND_STARTED)
        and row["hostname"] == bind_request.hostname
        and row["device_rp_uuid"] == bind_request.device_rp_uuid
        and row["instance_uuid"] == bind_request.instance_uuid
        and bind_request.project_id in (None, context.project, row["project_id"])
    )


def _check_state(tx: sa.Connection, row: store.ArqToBindRow) -> None:
    allowed = source_states(Step.START)
    if row["state"] in allowed:
        return
    reason = f"expected one of {', '.join(allowed)}"
    if row["state"] == ArqState.UNBIND_FAILED:
        reason = "because its last handle is not clean; wait until it is Unbound, or create another"
        if (job := jobs.get_by_id(tx, row["job_id"] or 0)) is not None:
            reason += f": host {job['host']}, job {job['uuid']}: {job['error']}"
    raise WrongState(
        f"cannot bind ARQ {row['uuid']} in state {row['state']}, {reason}",
        request=row["uuid"],
        state=row["state"],
    )


def _instance_conflict(tx: sa.Connection, instance: str, uuids: Sequence[str]) -> Conflict:
    others = store.other_arqs_of_instance(tx, instance, uuids)
    conflicting = ", ".join(f"{row['uuid']} ({row['state']})" for row in others)
    return Conflict(
        f"instance {instance} already has other accelerator requests: {conflicting}",
        instance=instance,
        requests=[row["uuid"] for row in others],
    )


def _changed_projects(
    todo: Sequence[store.ArqToBindRow],
    requests_by_uuid: Mapping[str, BindRequest],
    context: BindContext,
) -> dict[int, str]:
    """Return the new project of each ARQ whose project changes, by row id.

    The project of the instance in Placement takes precedence over the project in the request.
    """
    projects = {
        row["id"]: context.project or requests_by_uuid[row["uuid"]].project_id for row in todo
    }
    return {
        row["id"]: project
        for row in todo
        if (project := projects[row["id"]]) is not None and project != row["project_id"]
    }


def _reserve_instance_slots(
    tx: sa.Connection,
    rows: Sequence[store.ArqToBindRow],
    todo: Sequence[store.ArqToBindRow],
    requests_by_uuid: Mapping[str, BindRequest],
    state: ArqState,
    projects: Mapping[int, str],
    context: BindContext,
) -> None:
    """Set state and slot of the ARQs; afterwards no other call can bind for the same instance."""
    first = requests_by_uuid[todo[0]["uuid"]]
    instance = first.instance_uuid
    used_slots = [row["instance_slot"] for row in rows if row["instance_slot"] is not None]
    try:
        changed = store.bind(
            tx,
            providers={row["id"]: requests_by_uuid[row["uuid"]].device_rp_uuid for row in todo},
            projects=projects,
            hostname=first.hostname,
            instance=instance,
            first_slot=max(used_slots, default=-1) + 1,
            state=state,
            owner_verified=context.owner_verified
            or all(requests_by_uuid[row["uuid"]].project_id is not None for row in todo),
        )
    except db_exc.DBDuplicateEntry as exc:
        raise Conflict(
            f"instance {instance} already has other accelerator requests", instance=instance
        ) from exc
    if changed != len(todo):
        raise ClaimLost


def _enqueue_prepare_job(
    tx: sa.Connection,
    todo: Sequence[store.ArqToBindRow],
    demands: Sequence[Demand],
    chosen: Mapping[str, handle_claims.FreeHandleRow],
    deployables: Sequence[handle_claims.ClaimedProviderRow],
    instance: str,
    context: BindContext,
) -> None:
    """Enqueue the job that prepares the devices. Raise NoHandle if the agent is down."""
    host = demands[0].host
    last_seen = agents.last_seen(tx, host)
    if last_seen is None or last_seen < context.alive_since:
        reason = f"the agent of host {host} is down and its devices must be prepared"
        raise NoHandle(
            f"cannot prepare an attach handle: {reason}",
            reasons={
                demand.arq_uuid: [{"provider": demand.provider, "reason": reason}]
                for demand in demands
            },
        )
    by_provider = {row["provider"]: row for row in deployables}
    items = [
        WorkItem(
            backend=row["backend"],
            device=row["device"],
            deployable=row["address"],
            handle=chosen[demand.arq_uuid]["address"],
            accel=demand.accel,
        )
        for demand in demands
        if (row := by_provider[demand.provider])
    ]
    job = jobs.enqueue(
        tx,
        kind=JobKind.PREPARE,
        host=host,
        subject=instance,
        arguments={"items": [item.to_dict() for item in items], "instance": instance},
        now=context.now,
        deadline=context.now + timedelta(seconds=context.prepare_timeout),
    )
    jobs.assign_arqs(tx, [row["id"] for row in todo], job)


def _ids(rows: Sequence[store.ArqToBindRow]) -> dict[str, int]:
    return {row["uuid"]: row["id"] for row in rows}


def _to_demand(row: store.ArqToBindRow, bind_request: BindRequest) -> Demand:
    group, profile = parse_group(row["group"], "group"), row["device_profile_name"]
    return Demand(
        arq_uuid=row["uuid"],
        provider=bind_request.device_rp_uuid,
        host=bind_request.hostname,
        resource_class=row["resource_class"],
        required=group.required,
        forbidden=group.forbidden,
        accel=group.accel,
        target=find_target(group, profile),
        profile=profile,
    )
