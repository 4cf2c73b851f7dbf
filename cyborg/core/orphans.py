# SPDX-License-Identifier: Apache-2.0
"""Which bound requests are orphans: their instance has no allocation on their provider.

Nova leaks such requests. It also deletes allocations and requests one after the other, so that a
request without an allocation is first suspected, and is an orphan when it still has none after a
time of grace. A provider that was not read decides nothing: neither suspicion nor recovery.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Self

from cyborg.core.states import RequestState

FEW = 20
"""So many orphans at once are believed, however large their share is."""


@dataclass(frozen=True, slots=True)
class Held:
    """A bound request: what is needed to tell whether its instance is still there."""

    id: int
    uuid: str
    instance: str
    provider: str
    bound_at: datetime
    orphan_since: datetime | None = None
    project: str | None = None
    owner_known: bool = True

    @classmethod
    def of(cls, row: Mapping[Any, Any]) -> Self:
        """Return the row of a bound request as this."""
        return cls(
            id=row["id"],
            uuid=row["uuid"],
            instance=row["instance_uuid"],
            provider=row["device_rp_uuid"],
            bound_at=row["updated_at"] or row["created_at"],
            orphan_since=row["orphan_since"],
            project=row["project_id"],
            owner_known=bool(row["owner_known"]),
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """What one look came to; a request is in at most one of the first three.

    ``suspects`` are new, ``recovered`` have their allocation back, ``orphans`` have had none for
    the time of grace. ``unowned`` have an allocation, which tells whose they are, and nobody has
    asked. ``judged`` is how many requests were looked at.
    """

    suspects: tuple[Held, ...] = ()
    recovered: tuple[Held, ...] = ()
    orphans: tuple[Held, ...] = ()
    unowned: tuple[Held, ...] = ()
    judged: int = 0


def judge(
    held: Iterable[Held],
    consumers: Mapping[str, Collection[str] | None],
    now: datetime,
    *,
    settle: timedelta,
    grace: timedelta | None,
) -> Findings:
    """Judge requests by the consumers that have allocations on each provider.

    None for a provider, or no entry, is that it was not read or that Placement does not know it.
    A request that was bound within ``settle`` is not suspected. Without ``grace`` there are
    suspects, and never orphans.
    """
    suspects, recovered, orphans, unowned = [], [], [], []
    judged = 0
    for one in held:
        seen = consumers.get(one.provider)
        if seen is None:
            continue
        judged += 1
        if one.instance in seen:
            if one.orphan_since is not None:
                recovered.append(one)
            if not one.owner_known:
                unowned.append(one)
        elif one.orphan_since is None:
            if now - one.bound_at >= settle:
                suspects.append(one)
        elif grace is not None and now - one.orphan_since >= grace:
            orphans.append(one)
    return Findings(tuple(suspects), tuple(recovered), tuple(orphans), tuple(unowned), judged)


def believable(orphans: int, judged: int) -> bool:
    """Tell whether so many orphans among so many requests may be freed.

    When most requests have no allocation at once, it is more likely that Placement lost them (a
    database restored or made anew) than that most instances are gone. To free the devices of
    running instances would sell them twice.
    """
    return orphans <= FEW or 2 * orphans <= judged


def unchanged(row: Mapping[Any, Any], seen: Held) -> bool:
    """Tell whether a locked row is still the request that was judged."""
    return (
        row["state"] == RequestState.BOUND
        and row["instance_uuid"] == seen.instance
        and row["device_rp_uuid"] == seen.provider
        and row["orphan_since"] is not None
        and row["orphan_since"] == seen.orphan_since
    )


def owners(
    unowned: Iterable[Held], projects: Mapping[str, str | None]
) -> Mapping[tuple[str, str], tuple[int, ...]]:
    """Return the requests whose project is known now: (instance, project) -> request ids."""
    known: dict[tuple[str, str], list[int]] = {}
    for one in unowned:
        if (project := projects.get(one.instance)) is not None:
            known.setdefault((one.instance, project), []).append(one.id)
    return {key: tuple(ids) for key, ids in known.items()}
