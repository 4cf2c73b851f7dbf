# SPDX-License-Identifier: Apache-2.0
"""Lock a project in a transaction that counts its objects before it inserts one.

No concurrent call then exceeds a limit of the project, with or without [quota].
"""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import sqlalchemy as sa
from oslo_db import exception as db_exc

from cyborg.core.errors import Unavailable
from cyborg.db.binding import project_units
from cyborg.db.unit_of_work import UnitOfWork

T = TypeVar("T")

MAX_LOCK_ATTEMPTS = 3
"""Transactions of one call: the first one of a project finds no row to lock."""


class ProjectRowMissing(Exception):
    """The project has no row to lock yet. Roll back, insert it and retry."""

    def __init__(self, project: str) -> None:
        super().__init__(project)
        self.project = project


def lock_project(tx: sa.Connection, project: str) -> None:
    """Lock a project until the end of the transaction. Raise ProjectRowMissing."""
    if not project_units.lock(tx, project):
        raise ProjectRowMissing(project)


def insert_row(uow: UnitOfWork, project: str) -> None:
    """Insert the row of a project, if it does not exist yet."""
    # In a transaction of its own: several transactions that insert the same row and then go on
    # would deadlock on MariaDB.
    with contextlib.suppress(db_exc.DBDuplicateEntry):
        uow.run(lambda tx: project_units.insert_lock(tx, project))


def run_with_lock(uow: UnitOfWork, work: Callable[[], T]) -> T:
    """Return the result of ``work``, which runs a transaction with ``lock_project``.

    Raise Unavailable.
    """
    project = ""
    for _ in range(MAX_LOCK_ATTEMPTS):
        try:
            return work()
        except ProjectRowMissing as exc:
            project = exc.project
        insert_row(uow, project)
    raise Unavailable(f"the row of project {project} is deleted concurrently, retry")
