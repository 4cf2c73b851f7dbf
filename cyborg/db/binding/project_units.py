# SPDX-License-Identifier: Apache-2.0
"""Count the units of projects; each ARQ is one unit of its resource class.

A transaction that adds units to a project first updates the row of the project in
``project_locks``, and then counts. So the count includes the units of each transaction that had the
lock before, because a statement sees all data committed at its start. An UPDATE is used instead of
SELECT FOR UPDATE, because Galera detects conflicting writes on two of its nodes, but not
conflicting locks.

The API reads ``usage`` and the query ``NUM_ARQS`` here. So the module is not among those that the
contract ``one-writer`` forbids to the API, although ``insert_lock`` inserts a row: a module of its
own for the lock would separate it from the count that it protects.

A transaction that removes units takes no lock. A count that does not see the removal yet is too
high, never too low.
"""

from collections.abc import Collection
from typing import TypedDict

import sqlalchemy as sa

from cyborg.core.binding.states import OWNING_STATES
from cyborg.db.rows import fetch_all
from cyborg.db.schema import arqs, project_locks

_BIND_STATES = sorted(OWNING_STATES)


class UsageRow(TypedDict):
    """Units of a resource class: of all ARQs, and of those that own an attach handle."""

    resource_class: str
    used: int
    bound: int


_PROJECT = sa.bindparam("project", type_=sa.String)
# The number of ARQs of ``project``, in any state, counted up to ``max_count``.
NUM_ARQS = (
    sa.select(sa.func.count())
    .select_from(
        sa.select(arqs.c.id)
        .where(arqs.c.project_id == _PROJECT)
        .limit(sa.bindparam("max_count", type_=sa.Integer))
        .subquery()
    )
    .scalar_subquery()
)
# UPDATE project_locks SET generation = generation + 1 WHERE project_id = :project
# The row stays locked until the end of the transaction, so that only one counts at a time.
_LOCK = (
    sa.update(project_locks)
    .where(project_locks.c.project_id == _PROJECT)
    .values(generation=project_locks.c.generation + 1)
)
# SELECT resource_class, count(*) FROM arqs
#  WHERE project_id = :project AND resource_class IN (:classes) [AND state IN (owning states)]
#  GROUP BY resource_class
_COUNT = (
    sa.select(arqs.c.resource_class, sa.func.count().label("number"))
    .where(
        arqs.c.project_id == _PROJECT,
        arqs.c.resource_class.in_(sa.bindparam("classes", expanding=True)),
    )
    .group_by(arqs.c.resource_class)
)
_COUNT_BOUND = _COUNT.where(arqs.c.state.in_(_BIND_STATES))
_USAGE = (
    sa.select(
        arqs.c.resource_class,
        sa.func.count().label("used"),
        sa.func.count(sa.case((arqs.c.state.in_(_BIND_STATES), 1))).label("bound"),
    )
    .where(arqs.c.project_id == _PROJECT)
    .group_by(arqs.c.resource_class)
    .order_by(arqs.c.resource_class)
)


def lock(tx: sa.Connection, project: str) -> bool:
    """Lock a project until the end of the transaction; return False if it has no row yet."""
    return bool(tx.execute(_LOCK, {"project": project}).rowcount)


def insert_lock(tx: sa.Connection, project: str) -> None:
    """Insert the row of a project. Raise oslo.db's DBDuplicateEntry if it exists."""
    tx.execute(sa.insert(project_locks).values(project_id=project))


def count_arqs(tx: sa.Connection, project: str, max_count: int) -> int:
    """Return the number of ARQs of a project, in any state, counted up to ``max_count``."""
    values = {"project": project, "max_count": max_count}
    return int(tx.scalar(sa.select(NUM_ARQS), values) or 0)


def count(
    tx: sa.Connection, project: str, resource_classes: Collection[str], *, bound: bool
) -> dict[str, int]:
    """Return the number of ARQs of a locked project, by resource class.

    If ``bound`` is True, count only ARQs that own an attach handle. A class without ARQs is absent.
    """
    query = _COUNT_BOUND if bound else _COUNT
    values = {"project": project, "classes": sorted(resource_classes)}
    return {row.resource_class: row.number for row in tx.execute(query, values)}


def usage(connection: sa.Connection, project: str) -> list[UsageRow]:
    """Return the units of a project, ordered by resource class. Needs no lock: it changes nothing.

    A class without ARQs is absent.
    """
    return fetch_all(UsageRow, connection.execute(_USAGE, {"project": project}))
