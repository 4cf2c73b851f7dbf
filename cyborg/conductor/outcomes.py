# SPDX-License-Identifier: Apache-2.0
"""What the end of a job changes, each within one transaction that ends the job as well.

Locks are taken in the order of every other transaction: requests, handles, then the job. Of two who
record an outcome, the second finds the job ended and changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from cyborg.conductor import unbinding
from cyborg.conductor.events import Telling
from cyborg.core.deed import Deed
from cyborg.core.job import JobKind, JobState
from cyborg.db.store import deeds, jobs, programs, services
from cyborg.db.store import providers as publishing
from cyborg.db.store import requests as store

LOST = "no job prepared its device any longer"
SWEPT = 256  # things that one sweep puts right
LATE = timedelta(minutes=5)  # past its deadline, that a job which nobody can read is given up


@dataclass(frozen=True, slots=True)
class Settled:
    """What an outcome calls for after its commit, and how many jobs or things it settled."""

    count: int = 0
    jobs: int = 0  # that were made
    events: int = 0  # that wait in the outbox
    providers: int = 0  # that Placement must be told of


def settle(
    tx: sa.Connection,
    row: Mapping[Any, Any],
    good: bool,
    error: str | None,
    now: datetime,
    *,
    telling: Telling,
) -> Settled:
    """Record that a job ended well or not, with all that follows; nothing when it had ended."""
    kind = JobKind(row["kind"])
    # First, as every transaction that touches requests does.
    waiting = store.lock_of_jobs(tx, [row["id"]])
    state = JobState.DONE if good else JobState.FAILED
    if not jobs.end(tx, [row["id"]], state, error):
        return Settled()
    if not good:
        deeds.add(tx, Deed.JOBS_UNDONE, 1, now)
    match kind:
        case JobKind.PREPARE if good:
            return _bound(tx, waiting, telling)
        case JobKind.PREPARE:
            return _failed(tx, waiting, [row["uuid"]], now, telling, error)
        case JobKind.RELEASE:
            return _cleaned(tx, row, now)
        case JobKind.PROGRAM:
            image = row["arguments"].get("image")
            providers = programs.end(tx, row["id"], image if good else None)
            publishing.mark_known(tx, providers, now)
            telling.notices.programmed(tx, row["subject"], image, good=good, error=error)
            # Reports of the meantime left the device as it was.
            services.ask(tx, row["host"])
            return Settled(1, providers=len(providers))


def stuck(tx: sa.Connection, job_id: int, now: datetime) -> None:
    """Close the handles of a release that does not succeed at once to the scheduler."""
    publishing.mark_known(tx, jobs.providers_of(tx, job_id), now)


def sweep(tx: sa.Connection, now: datetime, *, telling: Telling) -> Settled:
    """Put right what no open job sees to: requests in BindStarted, dirty handles.

    None of this can come about by the steps of this house; a database that was restored or edited
    by hand has it.
    """
    late = jobs.overdue(tx, now - LATE, SWEPT)
    jobs.end(tx, [row["id"] for row in late], JobState.FAILED, "nobody could see to it in time")
    lost = store.lock_stranded(tx, SWEPT)
    failed = (
        _failed(tx, lost, [row["uuid"] for row in late], now, telling, LOST) if lost else Settled()
    )
    dirty = jobs.dirty(tx, SWEPT)
    made = unbinding.clean(tx, dirty, now=now)
    freed = programs.open_again(tx)
    deeds.add(tx, Deed.REQUESTS_UNSTUCK, len(lost), now)
    return Settled(
        failed.count + len(dirty) + freed, failed.jobs + made, failed.events, failed.providers
    )


def _bound(tx: sa.Connection, rows: Sequence[sa.RowMapping], telling: Telling) -> Settled:
    store.finish_bind(tx, [row["id"] for row in rows])
    telling.bound(tx, rows)
    return Settled(1, events=len(rows))


def _failed(
    tx: sa.Connection,
    rows: Sequence[sa.RowMapping],
    cancels: Sequence[str],
    now: datetime,
    telling: Telling,
    error: str | None,
) -> Settled:
    made = unbinding.fail(tx, rows, now=now, cancels=cancels)
    telling.failed(tx, rows, error)
    return Settled(max(1, len(rows)), jobs=made, events=len(rows))


def _cleaned(tx: sa.Connection, row: Mapping[Any, Any], now: datetime) -> Settled:
    providers = jobs.cleaned(tx, row["id"])
    # Placement was told only if the first try failed.
    if row["error"] is not None and providers:
        deeds.add(tx, Deed.HANDLES_CLEANED, len(row["arguments"]["items"]), now)
        publishing.mark_known(tx, providers, now)
        return Settled(1, providers=len(providers))
    return Settled(1)
