# SPDX-License-Identifier: Apache-2.0
"""Orphaned ARQs: bound ARQs whose instance has no allocation on their provider.

Nova may leave such ARQs behind. But when Nova deletes an instance normally, an ARQ also has no
allocation for a short time. So an ARQ without an allocation is suspected first, and is an orphan if
it has no allocation after a grace period. The ARQs of a provider whose allocations were not read
are not classified.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Self, TypedDict

from cyborg.core.binding.states import ArqState
from cyborg.core.explain.predicates import Predicate
from cyborg.core.hosts import Instance

# Up to this number of orphans is always released, however large their share is.
MIN_SAFETY_LIMIT = 20


class BoundArqRow(TypedDict):
    """Database columns of a bound ARQ; its instance and its provider are never None.

    ARQs under the lease of a device context, which have no instance, are not among these rows.
    """

    id: int
    uuid: str
    instance_uuid: str
    hostname: str | None
    device_rp_uuid: str
    project_id: str | None
    owner_verified: bool
    orphan_since: datetime | None
    created_at: datetime
    updated_at: datetime | None


class LockedArqRow(TypedDict):
    """Database columns of a locked ARQ, which show whether its bind has changed meanwhile."""

    state: str
    instance_uuid: str | None
    device_rp_uuid: str | None
    orphan_since: datetime | None
    created_at: datetime
    updated_at: datetime | None


@dataclass(frozen=True, slots=True)
class BoundArq:
    """A bound ARQ, with the data that decide whether it is an orphan."""

    id: int
    uuid: str
    instance: str
    provider: str
    bound_at: datetime
    orphan_since: datetime | None = None
    project: str | None = None
    owner_verified: bool = True
    hostname: str | None = None

    @classmethod
    def from_row(cls, row: BoundArqRow) -> Self:
        """Return the bound ARQ of a database row."""
        return cls(
            id=row["id"],
            uuid=row["uuid"],
            instance=row["instance_uuid"],
            provider=row["device_rp_uuid"],
            # The last change of a bound ARQ counts as its bind.
            bound_at=row["updated_at"] or row["created_at"],
            orphan_since=row["orphan_since"],
            project=row["project_id"],
            owner_verified=bool(row["owner_verified"]),
            hostname=row["hostname"],
        )


class Presence(StrEnum):
    """Nova's answer about the instance of a bound ARQ."""

    NOT_FOUND = "gone"  # Nova has no such instance
    OFFLOADED = "offloaded"  # it is shelved and on no host; when unshelved, it gets new ARQs
    ELSEWHERE = "elsewhere"  # it is on another host than the device, or on none
    ON_HOST = "on_host"  # it is on the device's host, or Nova does not show its host
    UNKNOWN = "unknown"  # Nova gave no answer


def classify_presence(instance: Instance | None, hostname: str | None) -> Presence:
    """Return whether an instance is on the host of its device.

    ``instance`` is None if Nova has no such instance.
    """
    if instance is None or instance.deleted:
        return Presence.NOT_FOUND
    if not instance.host_visible or hostname is None or instance.is_on(hostname):
        return Presence.ON_HOST
    if instance.offloaded:
        return Presence.OFFLOADED
    return Presence.ELSEWHERE


@dataclass(frozen=True, slots=True)
class Classification:
    """Result of ``classify``. An ARQ is in at most one of the first three groups.

    ``suspects`` are newly without an allocation, ``recovered`` have their allocation again,
    ``orphans`` had none for the grace period. ``unowned`` have an allocation and an owner that is
    not verified. ``checked`` counts the ARQs of providers that were read.
    """

    suspects: tuple[BoundArq, ...] = ()
    recovered: tuple[BoundArq, ...] = ()
    orphans: tuple[BoundArq, ...] = ()
    unowned: tuple[BoundArq, ...] = ()
    checked: int = 0


def classify(
    arqs: Iterable[BoundArq],
    consumers: Mapping[str, Collection[str] | None],
    now: datetime,
    *,
    bound_before: datetime,
    grace_period: timedelta | None,
) -> Classification:
    """Classify bound ARQs: does the instance of an ARQ have an allocation on its provider?

    ``consumers`` has the uuids of the instances with an allocation, by provider uuid. If a provider
    is missing there, or has the value None, its ARQs are not classified: the provider was not read,
    or Placement does not have it. Only ARQs bound at ``bound_before`` or earlier are suspected.
    Without a ``grace_period`` there are no orphans.
    """
    suspects, recovered, orphans, unowned = [], [], [], []
    checked = 0
    for arq in arqs:
        allocated = consumers.get(arq.provider)
        if allocated is None:
            continue
        checked += 1
        if arq.instance in allocated:
            if arq.orphan_since is not None:
                recovered.append(arq)
            if not arq.owner_verified:
                unowned.append(arq)
        elif arq.orphan_since is None:
            # Nova allocates before it binds, so that Placement has shown the allocation of such an
            # ARQ if there is one.
            if arq.bound_at <= bound_before:
                suspects.append(arq)
        elif grace_period is not None and now - arq.orphan_since >= grace_period:
            orphans.append(arq)
    return Classification(
        suspects=tuple(suspects),
        recovered=tuple(recovered),
        orphans=tuple(orphans),
        unowned=tuple(unowned),
        checked=checked,
    )


def within_safety_limit(orphans: int, checked: int) -> bool:
    """Return whether the orphans are few enough to be released; both arguments count ARQs."""
    # If most ARQs have no allocation at once, Placement has probably lost them (a restored or new
    # database). Releasing the devices of running instances would allocate them twice.
    return orphans <= MIN_SAFETY_LIMIT or 2 * orphans <= checked


def is_unchanged(row: LockedArqRow, arq: BoundArq) -> bool:
    """Return whether a locked row still has the bind and ``orphan_since`` of the classified ARQ."""
    return (
        row["state"] == ArqState.BOUND
        and row["instance_uuid"] == arq.instance
        and row["device_rp_uuid"] == arq.provider
        and row["orphan_since"] is not None
        and row["orphan_since"] == arq.orphan_since
    )


def is_same_bind(row: LockedArqRow, arq: BoundArq) -> bool:
    """Return whether a locked row still has the same bind as ``arq``, which was read before."""
    return bool(
        row["state"] == ArqState.BOUND
        and row["instance_uuid"] == arq.instance
        and row["device_rp_uuid"] == arq.provider
        and (row["updated_at"] or row["created_at"]) == arq.bound_at
    )


def is_same_failure(row: LockedArqRow, arq: BoundArq) -> bool:
    """Return whether a locked row still has the failed bind of ``arq``, which was read before."""
    return bool(
        row["state"] == ArqState.BIND_FAILED
        and (row["instance_uuid"] or "") == arq.instance
        and (row["updated_at"] or row["created_at"]) == arq.bound_at
    )


def without_allocation(
    arqs: Iterable[BoundArq], consumers: Collection[str]
) -> tuple[BoundArq, ...]:
    """Return the ARQs whose instance is not among the consumers.

    Suspected ARQs come first, the oldest suspicion first. The others follow by descending id.
    """
    missing = [arq for arq in arqs if arq.instance not in consumers]
    return tuple(sorted(missing, key=lambda arq: (arq.orphan_since or datetime.max, -arq.id)))


def providers_to_check(reasons: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, ...]:
    """Return providers of a failed bind whose handles are rejected only because they are in use.

    ``reasons`` are the details of NoHandle. Other providers are left out: if the device is disabled
    or a trait is missing, the release of a handle does not help.
    """
    # With any other reason the handle would be refused again after its release.
    temporary = {
        Predicate.TAKEN,
        Predicate.CLEANING,
        Predicate.DRAINING,
        Predicate.TAKEN_IN_CALL,
    }
    codes_of: dict[str, set[str]] = {}
    for refusals in reasons.values():
        for refusal in refusals:
            codes_of.setdefault(str(refusal["provider"]), set()).add(str(refusal["code"]))
    return tuple(
        provider
        for provider, codes in sorted(codes_of.items())
        if Predicate.TAKEN in codes and codes <= temporary
    )


def group_by_owner(
    unowned: Iterable[BoundArq], projects: Mapping[str, str | None]
) -> Mapping[tuple[str, str], tuple[int, ...]]:
    """Return ids of ARQs by (instance, project); skip ARQs whose project is unknown.

    ``projects`` has the project of each instance.
    """
    by_owner: dict[tuple[str, str], list[int]] = {}
    for arq in unowned:
        if (project := projects.get(arq.instance)) is not None:
            by_owner.setdefault((arq.instance, project), []).append(arq.id)
    return {key: tuple(ids) for key, ids in by_owner.items()}
