# SPDX-License-Identifier: Apache-2.0
"""Taking requests off their handles, and handles to be cleaned: parts of other transactions.

A handle that its host has prepared, or must sanitise, is dirty once its owner is gone. It goes to a
release job, one for each host, in the transaction that takes the owner away; nobody gets it until
that job is done.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.core.errors import WrongState
from cyborg.core.job import Item, JobKind, JobState
from cyborg.core.states import HOLDING
from cyborg.db.store import claims, jobs
from cyborg.db.store import requests as store

PARCEL = 64  # handles that one job cleans


@dataclass(frozen=True, slots=True)
class Released:
    """What a release came to: how many requests, and what must be seen to after the commit.

    ``failed`` are the rows of other requests of the same instance, whose bind waited for the same
    host work: they are BindFailed now, and Nova must be told.
    """

    count: int
    jobs: int = 0
    failed: Sequence[Mapping[Any, Any]] = ()


def release(
    tx: sa.Connection, rows: Sequence[sa.RowMapping], *, keep: bool, now: datetime
) -> Released:
    """Free the handles of requests that ``store.lock`` has locked; then unbind or delete them.

    With ``keep`` they become Unbound. Raises WrongState when the table of steps does not let one.
    """
    if not rows:
        return Released(0)
    ids = [row["id"] for row in rows]
    cancelled = sorted({row["job_id"] for row in rows if row["job_id"] is not None})
    failed: Sequence[Mapping[Any, Any]] = ()
    stopped: list[str] = []
    if cancelled:
        failed = [row for row in store.lock_of_jobs(tx, cancelled) if row["id"] not in ids]
        stopped = jobs.uuids(tx, cancelled)
        jobs.end(tx, cancelled, JobState.CANCELLED, "its requests were unbound or deleted")
        # The instance's requests are bound together or not at all.
        store.fail_bind(tx, [row["id"] for row in failed])
    holding = [row["id"] for row in rows if row["state"] in HOLDING]
    holding += [row["id"] for row in failed]
    dirty = claims.release(tx, holding) if holding else ()
    made = clean(tx, dirty, now=now, cancels=stopped)
    changed = store.unbind(tx, ids) if keep else store.delete(tx, ids)
    if changed != len(ids):
        raise WrongState(
            f"{len(ids) - changed} of {len(ids)} requests are in no state to be "
            f"{'unbound' if keep else 'deleted'}",
            requests=sorted(row["uuid"] for row in rows),
        )
    return Released(len(ids), made, failed)


def fail(
    tx: sa.Connection, rows: Sequence[sa.RowMapping], *, now: datetime, cancels: Collection[str]
) -> int:
    """Make locked requests that are BindStarted BindFailed, without a handle.

    ``cancels`` are the uuids of the jobs that must not begin any more. Returns how many jobs were
    made to undo what has been done.
    """
    ids = [row["id"] for row in rows]
    if store.fail_bind(tx, ids) != len(ids):
        raise WrongState("a request changed while its bind was undone")
    return clean(tx, claims.release(tx, ids), now=now, cancels=cancels)


def clean(
    tx: sa.Connection,
    handles: Sequence[Mapping[Any, Any]],
    *,
    now: datetime,
    cancels: Collection[str] = (),
) -> int:
    """Have the hosts clean handles that nobody owns any longer; return how many jobs that makes."""
    by_host = sorted(handles, key=lambda row: (row["host"], row["id"]))
    made = 0
    for host, rows in _parcels(by_host):
        job = jobs.add(
            tx,
            kind=JobKind.RELEASE,
            host=host,
            subject=rows[0]["deployable"],
            arguments={
                "items": [item(row).to_dict() for row in rows],
                "cancels": list(cancels),
            },
            now=now,
            deadline=None,
        )
        jobs.attach_handles_of(tx, [row["id"] for row in rows], job)
        made += 1
    return made


def _parcels(
    by_host: Sequence[Mapping[Any, Any]],
) -> Iterator[tuple[str, Sequence[Mapping[Any, Any]]]]:
    """Give each host's handles, not too many at once: a job is one message."""
    for host, group in itertools.groupby(by_host, key=lambda row: str(row["host"])):
        rows = list(group)
        for begin in range(0, len(rows), PARCEL):
            yield host, rows[begin : begin + PARCEL]


def item(row: Mapping[Any, Any], accel: Mapping[str, str] | None = None) -> Item:
    """Return a handle's row as the agent is told of it."""
    return Item(
        backend=row["backend"],
        device=row["device"],
        deployable=row["deployable"],
        handle=row["address"],
        accel=accel or {},
    )
