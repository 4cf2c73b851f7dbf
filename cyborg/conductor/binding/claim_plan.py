# SPDX-License-Identifier: Apache-2.0
"""Claim handles for the ARQs of one call, and enqueue the job that prepares them on their host.

A bind to an instance and the lease of a device context use this.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

import sqlalchemy as sa

from cyborg.conductor.binding.claims import check_providers, claim_handles
from cyborg.conductor.binding.limits import ProjectLimits
from cyborg.conductor.custody import entries
from cyborg.core.binding.profile import check_user, count_units, find_target, parse_group
from cyborg.core.binding.states import ArqState
from cyborg.core.errors import Unavailable
from cyborg.core.explain.predicates import Failure, Predicate
from cyborg.core.explain.selection import Demand, describe_rejection, make_no_handle_error
from cyborg.core.inventory.device import CLEANING_ABILITIES, Ability
from cyborg.core.inventory.device_state import ENABLED, is_in_grace
from cyborg.core.jobs.job import JobKind, WorkItem
from cyborg.db.binding import claims as handle_claims
from cyborg.db.binding import write as store
from cyborg.db.device_sets import write as device_sets
from cyborg.db.device_sets.write import MemberRow
from cyborg.db.jobs import write as jobs
from cyborg.db.services import write as agents


class AllocationsUnread(Exception):
    """A device is cordoned, so the bind needs the allocations of the instance. Roll back."""

    def __init__(self, instance: str) -> None:
        super().__init__(instance)
        self.instance = instance


@dataclass(frozen=True, slots=True)
class BindContext:
    """Context of a bind that is not part of the request.

    ``project`` is the project of the instance in Placement, or None. ``owner_verified`` is False if
    the project of the instance could not be determined. ``prepare_timeout`` limits the host work,
    in seconds. ``limits`` is None if projects have no limits. ``epoch`` is that of the lease which
    the bind must find, if the caller knows it. ``check_host`` is whether the agent of the host must
    be up and Placement must have the providers, as explanations say; Nova, which has chosen the
    host, binds without this. ``handle`` is the uuid of the only handle that may be claimed, None
    for any. ``allocated`` are the units that Placement has allocated to the instance, by provider,
    None if it was not asked or did not answer, and ``cordon_grace`` is the time in seconds for
    which these are honoured after a cordon. ``owner_error`` is why Placement did not answer about
    the instance.
    """

    now: datetime
    prepare_timeout: float
    project: str | None = None
    owner_verified: bool = True
    limits: ProjectLimits | None = None
    epoch: int | None = None
    check_host: bool = False
    handle: str | None = None
    allocated: Mapping[str, int] | None = None
    cordon_grace: float = 0.0
    owner_error: str | None = None


@dataclass(frozen=True, slots=True)
class BindResult:
    """Result of a bind: the rows of the ARQs that this call has bound, as they are now.

    An ARQ that an earlier call has bound is left out. If ``host_work_pending`` is True, the ARQs
    are BindStarted and wait for a job. ``providers`` is the number of device sets whose offers are
    planned again.
    """

    arqs: Sequence[store.ArqRow] = ()
    host_work_pending: bool = False
    providers: int = 0


@dataclass(frozen=True, slots=True)
class ClaimPlan:
    """Demands of the ARQs of one call, and the deployables that they name.

    The cordon of a device set is the first one of its source and its members. ``abilities`` are
    those of the backends by the uuid of the provider; a device set has those of its source and of
    all its members.
    """

    demands: Sequence[Demand]
    deployables: Sequence[handle_claims.ClaimedProviderRow]
    abilities: Mapping[str, frozenset[str]]

    @property
    def sets(self) -> Sequence[int]:
        """Return the row ids of the device sets among the deployables."""
        return [row["deployable_id"] for row in self.deployables if row["set_size"] is not None]

    @property
    def to_prepare(self) -> frozenset[str]:
        """Return the uuids of the providers whose handles need work on the host."""
        return frozenset(p for p, names in self.abilities.items() if Ability.PREPARES in names)

    @property
    def to_clean(self) -> frozenset[str]:
        """Return the uuids of the providers whose handles must be cleaned after use."""
        return frozenset(p for p, names in self.abilities.items() if CLEANING_ABILITIES & names)

    @property
    def state(self) -> ArqState:
        """Return the state of the ARQs after the claim."""
        return ArqState.BIND_STARTED if self.to_prepare else ArqState.BOUND


def make_plan(
    tx: sa.Connection,
    rows: Sequence[store.ArqRow],
    hostname: str,
    providers: Mapping[str, str],
    *,
    for_host: bool = False,
) -> ClaimPlan:
    """Return the plan of a claim; ``providers`` has the provider of each ARQ by the ARQ's uuid.

    ``for_host`` is whether the host itself gets the devices. Raise NotFound if a provider does not
    exist on the host, Conflict if the devices are for another target.
    """
    demands = [_to_demand(row, hostname, providers[row["uuid"]]) for row in rows]
    for demand in demands:
        check_user([demand.target], demand.profile, for_host=for_host)
    deployables = handle_claims.providers(tx, sorted({demand.provider for demand in demands}))
    check_providers(demands, deployables)
    set_ids = [row["deployable_id"] for row in deployables if row["set_size"]]
    members = device_sets.member_devices(tx, set_ids) if set_ids else {}
    abilities: dict[str, frozenset[str]] = {}
    for index, row in enumerate(deployables):
        members_of_set = members.get(row["deployable_id"], ())  # none of another deployable
        abilities[row["provider"]] = frozenset(row["abilities"]).union(
            *(member.abilities for member in members_of_set)
        )
        if row["set_size"] is not None:
            deployables[index] = {**row, "cordoned_since": _find_cordon(row, members_of_set)}
    return ClaimPlan(demands, deployables, abilities)


def _find_cordon(
    row: handle_claims.ClaimedProviderRow, members: Sequence[device_sets.MemberDeviceRow]
) -> datetime | None:
    """Return since when a device set or a member of it is cordoned.

    Return None if nothing of the set is cordoned, or if a part of it cannot be used at all.
    """
    times = [m.cordoned_since for m in members if m.cordoned or m.status != ENABLED]
    if row["cordoned"] or row["status"] != ENABLED:
        times.append(row["cordoned_since"])
    # A device without a time cannot be used, whatever the other times are.
    if not times or None in times:
        return None
    return min(since for since in times if since is not None)


def claim_planned(
    tx: sa.Connection,
    *,
    rows: Sequence[store.ArqRow],
    updated: Sequence[store.ArqRow],
    plan: ClaimPlan,
    context: BindContext,
    instance: str | None,
    subject: str,
    wait: bool,
) -> None:
    """Claim the handles, enqueue the host work, and record who owns them.

    ``rows`` are the ARQs, which are BindStarted or Bound in this transaction, and ``updated`` are
    the same with their new values. ``subject`` is that of the job. Raise NoHandle or Retry.
    """
    ids = {row["uuid"]: row["id"] for row in rows}
    # A handle is marked as dirty with the claim, not with the release: a conductor that is killed
    # between the two must not leave a dirty handle that looks clean.
    chosen = claim_handles(
        tx,
        plan.demands,
        ids,
        plan.deployables,
        providers_to_clean=plan.to_clean,
        wait=wait,
        now=context.now,
        handle=context.handle,
        check_host=context.check_host,
        honoured=_find_honoured(tx, plan, context, instance),
    )
    if plan.to_prepare:
        _enqueue_prepare_job(tx, ids.values(), plan, chosen, instance, subject, context)
    device_sets.mark_stale(tx, plan.sets, context.now)
    by_provider = {row["provider"]: row for row in plan.deployables}
    places = {
        demand.arq_uuid: _find_place(by_provider[demand.provider], chosen[demand.arq_uuid])
        for demand in plan.demands
    }
    entries.record_claimed(tx, updated, chosen, places, context.now)


def _find_place(
    row: handle_claims.ClaimedProviderRow, handle: handle_claims.FreeHandleRow | MemberRow
) -> entries.Place:
    """Return the device and the deployable of a handle: of a set, those of its member."""
    if row["set_size"] is None:
        return entries.Place(row["host"], row["device_uuid"], row["address"])
    member = cast(MemberRow, handle)
    return entries.Place(row["host"], member["device_uuid"], member["deployable"], row["address"])


def _find_honoured(
    tx: sa.Connection, plan: ClaimPlan, context: BindContext, instance: str | None
) -> frozenset[str]:
    """Return the providers whose cordon does not count, because Placement served the instance.

    What the instance has already counts: an allocation is served once. Raise AllocationsUnread if
    the allocations decide and are not in the context, Unavailable if Placement did not answer.
    """
    cordoned = {
        row["provider"]: row["deployable_id"]
        for row in plan.deployables
        if is_in_grace(row["cordoned_since"], context.now, context.cordon_grace)
    }
    # No query to Placement unless a device is cordoned: it would add a request to each boot.
    if not cordoned or instance is None:
        return frozenset()
    if context.owner_error is not None:
        raise Unavailable(
            f"it is unknown whether the instance was served before its device was cordoned: "
            f"{context.owner_error}"
        )
    if context.allocated is None:
        raise AllocationsUnread(instance)
    # An allocation is one unit: what the instance owns already has been served from it.
    owned = handle_claims.count_owned(tx, cordoned.values(), instance)
    wanted = Counter(demand.provider for demand in plan.demands)
    return frozenset(
        provider
        for provider, id_ in cordoned.items()
        if owned.get(id_, 0) + wanted[provider] <= context.allocated.get(provider, 0)
    )


def _enqueue_prepare_job(
    tx: sa.Connection,
    ids: Collection[int],
    plan: ClaimPlan,
    chosen: Mapping[str, handle_claims.FreeHandleRow | MemberRow],
    instance: str | None,
    subject: str,
    context: BindContext,
) -> None:
    """Enqueue the job that prepares the devices. Raise NoHandle if the agent is marked down."""
    to_prepare = plan.to_prepare
    demands = [demand for demand in plan.demands if demand.provider in to_prepare]
    host = demands[0].host  # all ARQs of a call are bound on one host
    # Without its agent the job would wait until its deadline, and Nova with it. After this error
    # Nova can choose another host.
    if not agents.has_agent(tx, host):
        reason = f"the agent of host {host} is down and its devices must be prepared"
        failure = Failure(Predicate.HOST_DOWN, reason)
        reasons = {
            demand.arq_uuid: [describe_rejection(demand, failure, handles=1)] for demand in demands
        }
        raise make_no_handle_error(reasons, demands)
    items = _list_items(tx, demands, plan, chosen)
    job = jobs.enqueue(
        tx,
        kind=JobKind.PREPARE,
        host=host,
        subject=subject,
        arguments={"items": [item.to_dict() for item in items], "instance": instance},
        now=context.now,
        deadline=context.now + timedelta(seconds=context.prepare_timeout),
    )
    jobs.assign_arqs(tx, ids, job)


def _list_items(
    tx: sa.Connection,
    demands: Sequence[Demand],
    plan: ClaimPlan,
    chosen: Mapping[str, handle_claims.FreeHandleRow | MemberRow],
) -> list[WorkItem]:
    """Return the items of a job that prepares the handles of ``demands``, which have host work.

    The work of sets comes last: a fabric partition is activated when its devices are ready, and
    before the guest starts.
    """
    by_provider = {row["provider"]: row for row in plan.deployables}
    items: list[WorkItem] = []
    for demand in demands:
        row, handle = by_provider[demand.provider], chosen[demand.arq_uuid]
        backend, device, deployable = row["backend"], row["device"], row["address"]
        if row["set_size"] is not None:
            # The handle of a set is that of a member: another device, perhaps of another backend.
            member = cast(MemberRow, handle)
            # A set has host work if a part of it does: this member may have none.
            if Ability.PREPARES not in member["abilities"]:
                continue
            backend, device, deployable = member["backend"], member["device"], member["deployable"]
        items.append(
            WorkItem(
                backend=backend,
                device=device,
                deployable=deployable,
                handle=handle["address"],
                accel=demand.accel,
            )
        )
    return [*items, *device_sets.work_items(tx, plan.sets).values()]


def _to_demand(row: store.ArqRow, hostname: str, provider: str) -> Demand:
    """Return what an ARQ requests of its provider."""
    group, profile = parse_group(row["group"], "group"), row["device_profile_name"]
    return Demand(
        arq_uuid=row["uuid"],
        provider=provider,
        host=hostname,
        resource_class=row["resource_class"],
        required=group.required,
        forbidden=group.forbidden,
        accel=group.accel,
        target=find_target(group, profile),
        profile=profile,
        group=row["device_profile_group_id"],
        group_units=count_units(group),
    )
