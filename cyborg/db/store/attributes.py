# SPDX-License-Identifier: Apache-2.0
"""Writing the attributes that operators give to deployables."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from cyborg.db.schema import attributes, deployables

_GIVEN = ("uuid", "key", "value", "created_at")


def insert(tx: sa.Connection, deployable: str, row: Mapping[str, Any]) -> bool:
    """Add an attribute to the deployable of this uuid; return whether there is one.

    Raises oslo.db's DBDuplicateEntry when the deployable has an attribute of that key, and
    DBReferenceError when the deployable goes at this moment.
    """
    values = [sa.literal(row[name], attributes.c[name].type).label(name) for name in _GIVEN]
    found = sa.select(deployables.c.id, *values).where(deployables.c.uuid == deployable)
    columns = ["deployable_id", *_GIVEN]
    return bool(tx.execute(sa.insert(attributes).from_select(columns, found)).rowcount)


def delete(tx: sa.Connection, uuid: str) -> bool:
    """Delete an attribute; return whether there was one."""
    return bool(tx.execute(sa.delete(attributes).where(attributes.c.uuid == uuid)).rowcount)
