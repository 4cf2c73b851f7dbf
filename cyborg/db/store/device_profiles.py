# SPDX-License-Identifier: Apache-2.0
"""Writing device profiles. Who may have which name, and which may go, the schema decides."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from cyborg.db.schema import device_profiles as profiles
from cyborg.db.schema import requests


def insert(tx: sa.Connection, row: Mapping[str, Any]) -> None:
    """Add one profile. Raises oslo.db's DBDuplicateEntry when its name or uuid is taken."""
    tx.execute(sa.insert(profiles), [dict(row)])


def by_name(tx: sa.Connection, name: str) -> sa.RowMapping | None:
    """Return the id, name and groups of the profile of that name, or None."""
    query = sa.select(profiles.c.id, profiles.c.name, profiles.c.groups)
    return tx.execute(query.where(profiles.c.name == name)).mappings().one_or_none()


def find(tx: sa.Connection, keys: Collection[str]) -> Sequence[sa.RowMapping]:
    """Return the id, uuid and name of the profiles that any key names, by uuid or by name."""
    query = sa.select(profiles.c.id, profiles.c.uuid, profiles.c.name)
    named = sa.or_(profiles.c.uuid.in_(keys), profiles.c.name.in_(keys))
    return tx.execute(query.where(named).order_by(profiles.c.id)).mappings().all()


def delete(tx: sa.Connection, ids: Collection[int]) -> int:
    """Delete profiles and return how many there were.

    Raises oslo.db's DBReferenceError when a request was made from one of them: the foreign key
    also sees a request that another transaction adds at this moment, which no query would.
    """
    return tx.execute(sa.delete(profiles).where(profiles.c.id.in_(ids))).rowcount


def usage(tx: sa.Connection, keys: Collection[str]) -> Mapping[str, int]:
    """Return how many requests use each of the profiles named, for those that are used at all."""
    query = (
        sa.select(profiles.c.name, sa.func.count())
        .join(requests, requests.c.profile_id == profiles.c.id)
        .where(sa.or_(profiles.c.uuid.in_(keys), profiles.c.name.in_(keys)))
        .group_by(profiles.c.name)
        .order_by(profiles.c.name)
    )
    return {row[0]: row[1] for row in tx.execute(query)}
