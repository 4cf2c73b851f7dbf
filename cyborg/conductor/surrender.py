# SPDX-License-Identifier: Apache-2.0
"""Cleaning that will never be: of handles whose backend was uninstalled by force.

A release is tried until it succeeds. Where the backend is not wanted any longer there is nobody to
do it, and what it should clean would keep its device for ever: it goes, and is remembered.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.conductor import reports
from cyborg.conductor.notices import Notices
from cyborg.conductor.outcomes import Settled
from cyborg.conductor.reports import Outcome
from cyborg.core.job import JobState
from cyborg.db.store import jobs, wanted


def surrender(
    tx: sa.Connection,
    row: Mapping[Any, Any],
    error: str | None,
    now: datetime,
    notices: Notices,
    *,
    remember: bool,
) -> tuple[Settled, list[str]]:
    """Give up what a release that failed was to clean and nobody can; end it if anything goes.

    What is left of it gets another job with the next sweep. Returns what follows and what to log;
    a count of 0 is that nothing was given up.
    """
    host, backends = row["host"], {item["backend"] for item in row["arguments"]["items"]}
    if not wanted.absent(tx, host, backends):
        return Settled(), []
    wanted.lock_host(tx, host)
    outcomes: list[Outcome] = [
        reports.forget(tx, host, backend, now, notices, remember=remember)
        for backend in sorted(wanted.absent(tx, host, backends))
    ]
    if not any(outcome.let_go for outcome in outcomes):
        return Settled(), []
    why = f"given up, for its backend is uninstalled: {error}"
    settled = jobs.end(tx, [row["id"]], JobState.FAILED, why)
    stale = sum(outcome.providers for outcome in outcomes)
    return Settled(settled, providers=stale), [r for one in outcomes for r in one.remarks]
