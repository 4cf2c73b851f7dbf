# SPDX-License-Identifier: Apache-2.0
"""Abandon the cleaning of handles whose backend was force-uninstalled.

A release job is retried until it succeeds. Without its backend it never succeeds, and its dirty
handles would keep their device forever. So the handles are removed and tombstones are kept. Handles
that need no cleaning are removed by the next report of their host; a host that is down sends none.
"""

from datetime import datetime

import sqlalchemy as sa

from cyborg.conductor.inventory import report_handler
from cyborg.conductor.inventory.report_handler import ReportResult
from cyborg.conductor.jobs.completion import JobResult
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.jobs.job import JobState
from cyborg.core.log import Remark
from cyborg.db.backends import desired as desired_backends
from cyborg.db.jobs import write as jobs


def abandon_cleaning(
    tx: sa.Connection,
    row: jobs.JobRow,
    error: str | None,
    now: datetime,
    notices: NotificationBuilder,
    *,
    keep_tombstones: bool,
) -> tuple[JobResult, list[Remark]]:
    """Abandon the handles of a failed release job whose backend was removed; then end the job.

    The next sweep creates another job for the remaining handles. Return the result and the remarks
    to log. If no handle was abandoned, and the job still has handles, it stays open and the counts
    of the result are 0.
    """
    host, backends = row["host"], {item["backend"] for item in row["arguments"]["items"]}
    if not desired_backends.removed_backends(tx, host, backends):
        return JobResult(), []
    desired_backends.lock_host(tx, host)
    outcomes: list[ReportResult] = [
        report_handler.remove_backend(
            tx, host, backend, now, notices, keep_tombstones=keep_tombstones
        )
        for backend in sorted(desired_backends.removed_backends(tx, host, backends))
    ]
    # The handles of a host that is down were abandoned with the uninstallation.
    if not any(outcome.abandoned for outcome in outcomes) and jobs.providers_of(tx, row["id"]):
        return JobResult(), []
    reason = f"abandoned, its backend is uninstalled: {error}"
    ended = jobs.end(tx, [row["id"]], JobState.FAILED, reason)
    stale = sum(outcome.stale_providers for outcome in outcomes)
    remarks = [remark for outcome in outcomes for remark in outcome.remarks]
    return JobResult(ended, providers=stale), remarks


def remove_abandoned_backend(
    tx: sa.Connection,
    host: str,
    backend: str,
    now: datetime,
    notices: NotificationBuilder,
    *,
    keep_tombstones: bool,
) -> ReportResult | None:
    """Remove the unbound inventory of a force-uninstalled backend from a host that is down.

    Bound devices stay. Return None if the backend is desired again.
    """
    desired_backends.lock_host(tx, host)
    if not desired_backends.removed_backends(tx, host, {backend}):
        return None
    return report_handler.remove_backend(
        tx, host, backend, now, notices, keep_tombstones=keep_tombstones
    )
