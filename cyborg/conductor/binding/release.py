# SPDX-License-Identifier: Apache-2.0
"""Release the handles of ARQs and enqueue their cleaning, within the transaction of the caller.

A handle that was prepared, or must be sanitised, is dirty once it is released. The transaction that
removes the owner also enqueues a release job for each host. The handle cannot be claimed before
that job is done.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

import sqlalchemy as sa

from cyborg.conductor.custody import entries
from cyborg.core.binding.states import OWNING_STATES, ArqState, Step, source_states
from cyborg.core.contexts.refusals import PREPARE_FAILED, ContextFailure, make_job_failure
from cyborg.core.errors import WrongState
from cyborg.core.jobs.job import JobKind, JobState, WorkItem
from cyborg.db.binding import claims as handle_claims
from cyborg.db.binding import write as store
from cyborg.db.device_sets import write as device_sets
from cyborg.db.jobs import write as jobs
from cyborg.db.providers import write as providers

MAX_HANDLES_PER_JOB = 64  # a job is one message
CANCELLED_ERROR = "other ARQs of the same host work were unbound or deleted"


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """Result of a release: the number of ARQs, and the work that follows the commit.

    ``failed_arqs`` are the rows of other ARQs of the same instances, whose bind waited for the same
    host work. They are now BindFailed, and Nova must be notified. ``instances`` has the released
    ARQs by instance; ARQs without an instance have the key "". ``providers`` is the number of
    providers to publish, such as those of device sets, whose offers are planned again.
    """

    count: int
    jobs_created: int = 0
    failed_arqs: Sequence[store.ArqRow] = ()
    instances: Mapping[str, Sequence[str]] = field(default_factory=dict)
    providers: int = 0


class FailedBinds(NamedTuple):
    """Numbers of release jobs that undo the host work of failed binds, and of stale providers."""

    jobs: int
    providers: int


def stays(row: store.ArqRow, *, keep: bool) -> bool:
    """Return whether the release of an ARQ unbinds it; otherwise it deletes it.

    The ARQs of a device context are used again by its next bind. They are deleted with it.
    """
    return keep or row["context_id"] is not None


def is_idle(row: store.ArqRow) -> bool:
    """Return whether it is an ARQ of a device context that is not bound: nothing to release."""
    return row["context_id"] is not None and row["state"] not in source_states(Step.UNBIND)


def release(
    tx: sa.Connection,
    rows: Sequence[store.ArqRow],
    *,
    keep: bool,
    now: datetime,
    timeout: float,
    whole_sets: bool = False,
) -> ReleaseResult:
    """Free the handles of locked ARQs (``store.lock``), then unbind or delete the ARQs.

    Unbind the ARQs if ``keep`` is True, else delete them. The ARQs of a device context are always
    unbound; those that are unbound already do not change. An unbound ARQ waits for the job that
    cleans its former handle; if the job takes longer than ``timeout`` seconds, the ARQ becomes
    UnbindFailed. Raise WrongState if the state of an ARQ does not allow it and, with
    ``whole_sets``, if other ARQs keep devices of the same device set.
    """
    rows = [row for row in rows if keep or not is_idle(row)]
    if not rows:
        return ReleaseResult(0)
    # Read before anything is written: afterwards the states no longer say who owned a handle.
    owning = [row for row in rows if row["state"] in OWNING_STATES]
    cancelled = _cancel_jobs(tx, owning, {row["id"] for row in rows}, now)
    for reason, is_kept in (("unbound", True), ("deleted", False)):
        released = [row for row in owning if stays(row, keep=keep) is is_kept]
        entries.record_released(tx, released, now, reason=reason)
    entries.record_released(tx, cancelled.failed, now, reason="bind_failed", error=CANCELLED_ERROR)
    # After the custody records, which name the handle and its owner.
    owners = [row["id"] for row in (*owning, *cancelled.failed)]
    dirty, stale = _release_handles(tx, owners, now, whole_sets=whole_sets)
    cleaning = enqueue_cleaning(tx, dirty, now=now, timeout=timeout, cancelled_jobs=cancelled.uuids)
    _restore_others(tx, cancelled.bound, dirty, now)
    job_by_arq = {row["owner_id"]: cleaning[row["id"]] for row in dirty}
    _end_arqs(tx, rows, job_by_arq, keep=keep)
    instances = defaultdict[str, list[str]](list)
    for row in rows:
        instances[row["instance_uuid"] or ""].append(row["uuid"])
    return ReleaseResult(
        count=len(rows),
        jobs_created=len(set(cleaning.values())),
        failed_arqs=cancelled.failed,
        instances=instances,
        providers=stale + cancelled.stale,
    )


class _CancelledJobs(NamedTuple):
    """Jobs that a release has cancelled, by uuid, and the other ARQs that waited for them.

    ``failed`` are BindFailed now; ``bound`` are still Bound, and waited for a restore. ``stale`` is
    the number of providers that are offered again, because nothing fails to be restored any more.
    """

    uuids: Sequence[str]
    failed: Sequence[store.ArqRow]
    bound: Sequence[store.ArqRow]
    stale: int = 0


def _cancel_jobs(
    tx: sa.Connection, owning: Sequence[store.ArqRow], released: Collection[int], now: datetime
) -> _CancelledJobs:
    """Cancel the jobs of ARQs that own handles; ``released`` are the row ids of all released ARQs.

    The job of an unbound ARQ cleans its former handle, and must go on without the ARQ.
    """
    ids = sorted({row["job_id"] for row in owning if row["job_id"] is not None})
    if not ids:
        return _CancelledJobs(uuids=(), failed=(), bound=())
    # One prepare job serves all ARQs of a bind: cancelling it for one ARQ fails the others.
    # They are locked before the job, as everywhere.
    others = [row for row in store.lock_of_jobs(tx, ids) if row["id"] not in released]
    failed = [row for row in others if row["state"] != ArqState.BOUND]
    bound = [row for row in others if row["state"] == ArqState.BOUND]
    uuids = jobs.uuids(tx, ids)
    restores = set(jobs.failing_restores(tx, ids))
    jobs.end(tx, ids, JobState.CANCELLED, "its ARQs were unbound or deleted")
    stale = 0
    # A failing restore closes its device: without the job, the providers are offered again.
    if reopened := [row for row in owning if row["job_id"] in restores]:
        stale = providers.mark_stale_existing(tx, store.providers_of(reopened), now)
    # Either all ARQs of an instance are bound, or none.
    store.fail_bind(tx, [row["id"] for row in failed])
    return _CancelledJobs(uuids, failed, bound, stale)


def _end_arqs(
    tx: sa.Connection,
    rows: Sequence[store.ArqRow],
    cleaning_jobs: Mapping[int, int],
    *,
    keep: bool,
) -> None:
    """Unbind or delete ARQs; an unbound one waits for its job in ``cleaning_jobs``, by row id."""
    kept = [row["id"] for row in rows if stays(row, keep=keep)]
    changed = 0
    if kept:
        waits = {arq: job for arq, job in cleaning_jobs.items() if arq in kept}
        changed += store.unbind(tx, kept, waits)
    if deleted := [row["id"] for row in rows if row["id"] not in kept]:
        changed += store.delete(tx, deleted)
    # The guards of the updates compare the states again. Without this a concurrent change would
    # leave some ARQs as they were, and the caller would not know.
    if changed != len(rows):
        raise WrongState(
            f"cannot {'unbind' if keep else 'delete'} {len(rows) - changed} of {len(rows)} ARQs "
            "in their current state",
            requests=sorted(row["uuid"] for row in rows),
        )


def fail_binds(
    tx: sa.Connection,
    rows: Sequence[store.ArqRow],
    *,
    now: datetime,
    timeout: float,
    cancelled_jobs: Collection[str],
    error: str | None = None,
) -> FailedBinds:
    """Set locked ARQs from BindStarted to BindFailed and free their handles.

    ``cancelled_jobs`` are the uuids of jobs that must no longer start, and ``error`` is why the
    bind failed.
    """
    ids = [row["id"] for row in rows]
    if store.fail_bind(tx, ids) != len(ids):
        raise WrongState("the state of an ARQ changed during the rollback of its bind")
    entries.record_released(tx, rows, now, reason="bind_failed", error=error)
    dirty, stale = _release_handles(tx, ids, now)
    # The job of each handle; one job cleans all handles of an instance on a host.
    jobs = enqueue_cleaning(tx, dirty, now=now, timeout=timeout, cancelled_jobs=cancelled_jobs)
    return FailedBinds(jobs=len(set(jobs.values())), providers=stale)


def _release_handles(
    tx: sa.Connection, owners: Sequence[int], now: datetime, *, whole_sets: bool = False
) -> tuple[list[handle_claims.ReleasedHandleRow], int]:
    """Release the handles of ARQs; return the dirty ones, and how many providers to publish.

    The providers to publish are device sets, and those of devices whose sets are planned again.
    """
    rows = handle_claims.release(tx, owners, now) if owners else []
    sets = {row["set_id"] for row in rows if row["set_id"] is not None}
    if whole_sets and sets and (others := device_sets.find_owners(tx, sets)):
        names = ", ".join(sorted({other.name for other in others}))
        arqs = [other.uuid for other in others]
        raise WrongState(
            f"the devices of {names} are released together: also release ARQ {', '.join(arqs)}",
            requests=arqs,
        )
    stale = device_sets.mark_stale(tx, (row["set_id"] for row in rows), now)
    # ``handle_claims.release`` has marked the providers of members that were claimed alone.
    stale += sum(row["is_member"] and row["set_id"] is None for row in rows)
    return [row for row in rows if row["needs_cleaning"]], stale


def make_cancelled(now: datetime) -> ContextFailure:
    """Return the failure of a bind of which other ARQs were released."""
    return make_job_failure(PREPARE_FAILED, CANCELLED_ERROR, now)


def enqueue_cleaning(
    tx: sa.Connection,
    handles: Sequence[handle_claims.DirtyHandleRow],
    *,
    now: datetime,
    timeout: float,
    cancelled_jobs: Collection[str] = (),
    repeated: bool = False,
) -> dict[int, int]:
    """Enqueue release jobs that clean these dirty handles.

    Return, by the row id of each handle, the row id of its job. The deadline of the jobs is in
    ``timeout`` seconds; after the deadline they are still retried. ``cancelled_jobs`` are the uuids
    of jobs that must no longer start. ``repeated`` is True if earlier jobs have ended without
    cleaning the handles: unbound ARQs that waited for an earlier job then wait for the new job.
    """
    # Sorted for the batches: a job is one call to one agent.
    by_host = sorted(handles, key=lambda row: (row["host"], row["set_id"] or 0, row["id"]))
    created: dict[int, int] = {}
    for rows in _batches(by_host):
        job = jobs.enqueue(
            tx,
            kind=JobKind.RELEASE,
            host=rows[0]["host"],
            subject=rows[0]["deployable"],
            arguments={
                "items": [item.to_dict() for item in _cleaning_items(tx, rows)],
                "cancels": list(cancelled_jobs),
            },
            now=now,
            deadline=now + timedelta(seconds=timeout),
        )
        ids = [row["id"] for row in rows]
        if repeated:
            store.replace_release_jobs(tx, ids, job)
        jobs.assign_cleaning(tx, ids, job)
        created |= dict.fromkeys(ids, job)
    return created


def _cleaning_items(
    tx: sa.Connection, rows: Sequence[handle_claims.DirtyHandleRow]
) -> list[WorkItem]:
    """Return the items of a job that cleans handles: the work of their sets, then the handles.

    A fabric partition is deactivated before its devices are reset.
    """
    sets = device_sets.work_items(tx, (row["set_id"] for row in rows))
    return [*sets.values(), *map(work_item, rows)]


def _batches(
    rows: Sequence[handle_claims.DirtyHandleRow],
) -> Iterator[Sequence[handle_claims.DirtyHandleRow]]:
    """Yield the sorted handles in batches of one host, of at most MAX_HANDLES_PER_JOB.

    The members of a device set are a batch of their own: while its guest keeps it, the other
    handles of the host are cleaned.
    """
    for _, group in itertools.groupby(rows, key=lambda row: (row["host"], row["set_id"])):
        handles = list(group)
        for start in range(0, len(handles), MAX_HANDLES_PER_JOB):
            yield handles[start : start + MAX_HANDLES_PER_JOB]


def _restore_others(
    tx: sa.Connection,
    rows: Sequence[store.ArqRow],
    released: Sequence[handle_claims.DirtyHandleRow],
    now: datetime,
) -> None:
    """Enqueue the restore of Bound ARQs again whose job was cancelled with that of others.

    These are ARQs of a device set of which a part was released, so the work of the set is left out.
    """
    released_handles = {(row["deployable"], row["address"]) for row in released}
    for job_id in sorted({row["job_id"] for row in rows if row["job_id"] is not None}):
        job = jobs.get_by_id(tx, job_id)
        if job is None:
            continue
        # An item without a handle is the work of the set.
        items = tuple(
            item
            for item in map(WorkItem.from_dict, job["arguments"]["items"])
            if item.handle and (item.deployable, item.handle) not in released_handles
        )
        ids = tuple(row["id"] for row in rows if row["job_id"] == job_id)
        if not items:
            # Only the set needed work: an agent would get an empty job.
            store.clear_job(tx, ids)
            continue
        instance = job["arguments"]["instance"]
        restore = jobs.Restore(arq_ids=ids, instance=instance, subject=job["subject"], items=items)
        jobs.enqueue_restores(tx, job["host"], [restore], now)


def work_item(
    row: handle_claims.DirtyHandleRow, accel: Mapping[str, str] | None = None
) -> WorkItem:
    """Convert a handle row to a work item for the agent."""
    return WorkItem(
        backend=row["backend"],
        device=row["device"],
        deployable=row["deployable"],
        handle=row["address"],
        accel=accel or {},
    )
