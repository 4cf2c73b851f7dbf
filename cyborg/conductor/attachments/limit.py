# SPDX-License-Identifier: Apache-2.0
"""Enforce the limit of attachments of a project in the transaction that inserts one.

The transaction locks the project, with or without [quota]: an attachment needs requests to Nova
and Placement, so that one more statement does not matter, and no concurrent call can exceed the
limit.
"""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.core.errors import OverLimit, Unavailable
from cyborg.db import project_units
from cyborg.db.unit_of_work import UnitOfWork
from cyborg.db.write.attachments import records as store

T = TypeVar("T")

MAX_ATTEMPTS = 3
"""Transactions of one call: the first one of a project finds no row to lock."""


class ProjectRowMissing(Exception):
    """The project has no row to lock yet. Roll back, insert it and retry."""


def run_with_lock(uow: UnitOfWork, project: str, work: Callable[[], T]) -> T:
    """Return the result of ``work``, which runs a transaction with ``check_limit``.

    Raise Unavailable.
    """
    for _ in range(MAX_ATTEMPTS):
        with contextlib.suppress(ProjectRowMissing):
            return work()
        # In a transaction of its own: several transactions that insert the same row and then go on
        # would deadlock on MariaDB.
        with contextlib.suppress(db_exc.DBDuplicateEntry):
            uow.run(lambda tx: project_units.insert_lock(tx, project))
    raise Unavailable(f"the row of project {project} is deleted concurrently, retry")


def check_limit(tx: sa.Connection, project: str, limit: int) -> None:
    """Lock a project and raise OverLimit if it cannot have another attachment.

    A negative limit is none. Raise ProjectRowMissing.
    """
    if limit < 0:
        return
    if not project_units.lock(tx, project):
        raise ProjectRowMissing
    if store.count(tx, project, limit) >= limit:
        used = store.count(tx, project)
        raise OverLimit(
            f"project {project} has {used} attachments and the limit is {limit}; detach "
            "accelerators, or delete attachments in error",
            project_id=project,
            limit=limit,
            used=used,
        )
