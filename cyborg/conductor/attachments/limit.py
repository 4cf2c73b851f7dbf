# SPDX-License-Identifier: Apache-2.0
"""Enforce the limit of attachments of a project in the transaction that inserts one."""

import sqlalchemy as sa

from cyborg.conductor.binding.project_lock import lock_project
from cyborg.core.errors import OverLimit
from cyborg.db.attachments import write as store


def check_limit(tx: sa.Connection, project: str, limit: int) -> None:
    """Lock a project and raise OverLimit if it cannot have another attachment.

    A negative limit means no limit. Raise ProjectRowMissing.
    """
    if limit < 0:
        return
    # An attachment needs requests to Nova and Placement: one more statement does not matter.
    lock_project(tx, project)
    if store.count(tx, project, limit) >= limit:
        used = store.count(tx, project)
        raise OverLimit(
            f"project {project} has {used} attachments and the limit is {limit}; detach "
            "accelerators, or delete attachments in error",
            project_id=project,
            limit=limit,
            used=used,
        )
