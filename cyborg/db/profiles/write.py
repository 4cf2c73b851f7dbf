# SPDX-License-Identifier: Apache-2.0
"""Write device profiles. The schema enforces unique names and keeps profiles that are in use."""

from collections.abc import Collection, Mapping
from typing import NotRequired

import sqlalchemy as sa

from cyborg.db.binding.project_units import NUM_ARQS
from cyborg.db.binding.write import ArqRow
from cyborg.db.profiles import read
from cyborg.db.rows import fetch_all, fetch_first
from cyborg.db.schema import arqs
from cyborg.db.schema import device_profiles as profiles

NewProfileRow = read.NewProfileRow


class ProfileRow(read.DeviceProfileRow):
    """All columns of a profile; ``by_name`` adds the number of ARQs of a project."""

    id: int
    context_id: int | None
    attachment_id: int | None
    used: NotRequired[int]


# Built once: SQLAlchemy needs more time to build such a statement than a database to run it.
_BY_NAME = sa.select(profiles, NUM_ARQS.label("used")).where(
    profiles.c.name == sa.bindparam("name", type_=sa.String)
)


def insert(tx: sa.Connection, row: NewProfileRow, attachment_id: int | None = None) -> None:
    """Insert one profile. Raise oslo.db's DBDuplicateEntry if its name or uuid already exists.

    ``attachment_id`` is the row id of the attachment whose hidden profile it is.
    """
    tx.execute(sa.insert(profiles), [{**row, "attachment_id": attachment_id}])


def by_name(
    tx: sa.Connection, name: str, project: str | None = None, max_count: int = 0
) -> ProfileRow | None:
    """Return the profile with this name, or None.

    The number of ARQs of a project is counted only up to ``max_count``.
    """
    values = {"name": name, "project": project, "max_count": max_count}
    return fetch_first(ProfileRow, tx.execute(_BY_NAME, values))


def _named(keys: Collection[str]) -> sa.ColumnElement[bool]:
    return sa.or_(profiles.c.uuid.in_(keys), profiles.c.name.in_(keys))


def find(tx: sa.Connection, keys: Collection[str]) -> list[ProfileRow]:
    """Return the profiles with these uuids or names, except those of attachments."""
    query = sa.select(profiles).where(_named(keys), profiles.c.attachment_id.is_(None))
    return fetch_all(ProfileRow, tx.execute(query.order_by(profiles.c.id)))


def find_visible(tx: sa.Connection, key: str) -> ProfileRow | None:
    """Return the profile with this uuid or name that is not hidden, or None."""
    query = (
        sa.select(profiles)
        .where(
            sa.or_(profiles.c.uuid == key, profiles.c.name == key),
            profiles.c.context_id.is_(None),
            profiles.c.attachment_id.is_(None),
        )
        # A name may look like the uuid of another profile: the uuid takes precedence.
        .order_by(sa.case((profiles.c.uuid == key, 0), else_=1))
        .limit(1)
    )
    return fetch_first(ProfileRow, tx.execute(query))


def delete(tx: sa.Connection, ids: Collection[int]) -> int:
    """Delete profiles and return how many were deleted.

    Raise oslo.db's DBReferenceError if an ARQ uses one of them. The foreign key also detects an ARQ
    that a concurrent transaction inserts, which a query cannot see.
    """
    return tx.execute(sa.delete(profiles).where(profiles.c.id.in_(ids))).rowcount


def usage(tx: sa.Connection, keys: Collection[str]) -> Mapping[str, int]:
    """Return the number of ARQs, by profile name, of the named profiles that are in use."""
    query = (
        sa.select(profiles.c.name, sa.func.count().label("number"))
        .join(arqs, arqs.c.profile_id == profiles.c.id)
        .where(_named(keys))
        .group_by(profiles.c.name)
        .order_by(profiles.c.name)
    )
    return {row.name: row.number for row in tx.execute(query)}


def users(tx: sa.Connection, keys: Collection[str], limit: int) -> list[ArqRow]:
    """Return the oldest ARQs that use the named profiles."""
    query = (
        sa.select(arqs)
        .join(profiles, arqs.c.profile_id == profiles.c.id)
        .where(_named(keys))
        .order_by(arqs.c.id)
        .limit(limit)
    )
    return fetch_all(ArqRow, tx.execute(query))
