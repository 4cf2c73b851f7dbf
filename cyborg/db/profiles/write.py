# SPDX-License-Identifier: Apache-2.0
"""Write device profiles. The schema enforces unique names and keeps profiles that are in use."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import TypedDict

import sqlalchemy as sa

from cyborg.db.binding.project_units import NUM_ARQS
from cyborg.db.rows import fetch_all, fetch_first
from cyborg.db.schema import arqs
from cyborg.db.schema import device_profiles as profiles


class NewProfileRow(TypedDict):
    """A profile to insert."""

    uuid: str
    name: str
    description: str | None
    groups: list[dict[str, str]]
    created_at: datetime


class UsedProfileRow(TypedDict):
    """A profile, and the number of ARQs of a project."""

    id: int
    name: str
    groups: list[dict[str, str]]
    context_id: int | None
    attachment_id: int | None
    used: int


class ProfileKeyRow(TypedDict):
    """The keys of a profile."""

    id: int
    uuid: str
    name: str
    context_id: int | None


class ProfileUserRow(TypedDict):
    """An ARQ that uses a profile."""

    uuid: str
    state: str
    instance_uuid: str | None


# Built once: SQLAlchemy needs more time to build such a statement than a database to run it.
_BY_NAME = sa.select(
    *(profiles.c[column] for column in ("id", "name", "groups", "context_id", "attachment_id")),
    NUM_ARQS.label("used"),
).where(profiles.c.name == sa.bindparam("name", type_=sa.String))


def insert(tx: sa.Connection, row: NewProfileRow, attachment_id: int | None = None) -> None:
    """Insert one profile. Raise oslo.db's DBDuplicateEntry if its name or uuid already exists.

    ``attachment_id`` is the row id of the attachment whose hidden profile it is.
    """
    tx.execute(sa.insert(profiles), [{**row, "attachment_id": attachment_id}])


def by_name(
    tx: sa.Connection, name: str, project: str | None = None, max_count: int = 0
) -> UsedProfileRow | None:
    """Return the profile with this name, or None.

    The number of ARQs of a project is counted only up to ``max_count``.
    """
    values = {"name": name, "project": project, "max_count": max_count}
    return fetch_first(UsedProfileRow, tx.execute(_BY_NAME, values))


def find(tx: sa.Connection, keys: Collection[str]) -> list[ProfileKeyRow]:
    """Return the profiles with these uuids or names, except those of attachments."""
    query = sa.select(profiles.c.id, profiles.c.uuid, profiles.c.name, profiles.c.context_id)
    named = sa.or_(profiles.c.uuid.in_(keys), profiles.c.name.in_(keys))
    query = query.where(named, profiles.c.attachment_id.is_(None))
    return fetch_all(ProfileKeyRow, tx.execute(query.order_by(profiles.c.id)))


def delete(tx: sa.Connection, ids: Collection[int]) -> int:
    """Delete profiles and return how many were deleted.

    Raise oslo.db's DBReferenceError if an ARQ uses one of them. The foreign key also detects an ARQ
    that a concurrent transaction inserts, which a query cannot see.
    """
    return tx.execute(sa.delete(profiles).where(profiles.c.id.in_(ids))).rowcount


def usage(tx: sa.Connection, keys: Collection[str]) -> Mapping[str, int]:
    """Return the number of ARQs, by profile name, of the named profiles that are in use."""
    query = (
        sa.select(profiles.c.name, sa.func.count())
        .join(arqs, arqs.c.profile_id == profiles.c.id)
        .where(sa.or_(profiles.c.uuid.in_(keys), profiles.c.name.in_(keys)))
        .group_by(profiles.c.name)
        .order_by(profiles.c.name)
    )
    return {row[0]: row[1] for row in tx.execute(query)}


def users(tx: sa.Connection, keys: Collection[str], limit: int) -> list[ProfileUserRow]:
    """Return the oldest ARQs that use the named profiles."""
    query = (
        sa.select(arqs.c.uuid, arqs.c.state, arqs.c.instance_uuid)
        .join(profiles, arqs.c.profile_id == profiles.c.id)
        .where(sa.or_(profiles.c.uuid.in_(keys), profiles.c.name.in_(keys)))
        .order_by(arqs.c.id)
        .limit(limit)
    )
    return fetch_all(ProfileUserRow, tx.execute(query))
