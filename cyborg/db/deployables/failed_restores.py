# SPDX-License-Identifier: Apache-2.0
"""The deployables with a bound handle that the host failed to prepare again after a reboot.

These deployables are found by the open restore jobs. They are not stored in a
column, because a column could keep an outdated value after the ARQ of such a job is released. The
subquery starts at the few open jobs. It does not depend on the outer query; therefore a database
runs it once.
"""

from typing import Any

import sqlalchemy as sa

from cyborg.core.jobs.job import JobKind, JobState
from cyborg.db.schema import arqs, deployables, jobs

FAILED_RESTORES: sa.Select[Any] = (
    sa.select(arqs.c.device_rp_uuid)
    .join(jobs, jobs.c.id == arqs.c.job_id)
    .where(
        jobs.c.state == JobState.OPEN,
        jobs.c.kind == JobKind.RESTORE,
        jobs.c.error.is_not(None),
        # A NULL in the result would make the condition below NULL instead of false.
        arqs.c.device_rp_uuid.is_not(None),
    )
)
"""The uuids of the providers of these deployables."""

RESTORE_FAILED: sa.ColumnElement[bool] = deployables.c.rp_uuid.in_(FAILED_RESTORES)
"""The condition of the deployable."""


def failed_restores(connection: sa.Connection) -> set[str]:
    """Return the provider uuids of all deployables with a failed restore."""
    return set(connection.scalars(FAILED_RESTORES))
