# SPDX-License-Identifier: Apache-2.0
"""Read the attributes that operators added to deployables.

Attributes reported by the agent are a column of the deployable: see
``cyborg.db.deployables.read``.
"""

from collections.abc import Collection
from datetime import datetime
from typing import TypedDict

import sqlalchemy as sa

from cyborg.core.inventory.plan import Attribute
from cyborg.db.listing import Listing, columns_of
from cyborg.db.paging import id_in
from cyborg.db.schema import attributes as table
from cyborg.db.schema import deployables


class AttributeRow(TypedDict):
    """An attribute that an operator added to a deployable."""

    uuid: str
    deployable_uuid: str
    key: str
    value: str
    created_at: datetime
    updated_at: datetime | None


SORTABLE = columns_of(table, "uuid", "key", "value", "created_at")
ATTRIBUTES = Listing(
    row=AttributeRow,
    table=table,
    source=table.join(deployables, deployables.c.id == table.c.deployable_id),
    columns=[
        *(column for column in table.c if column.name not in ("id", "deployable_id")),
        deployables.c.uuid.label("deployable_uuid"),
    ],
    sortable=SORTABLE,
    filters={"key": table.c.key, "deployable_uuid": deployables.c.uuid},
)
find = ATTRIBUTES.find
get = ATTRIBUTES.get


def of_deployables(
    connection: sa.Connection, ids: Collection[int]
) -> dict[int, tuple[Attribute, ...]]:
    """Return operators' attributes by the row id of the deployable, in one statement at most.

    A deployable without such attributes has no entry.
    """
    if not ids:
        return {}
    query = (
        sa.select(table.c.deployable_id, table.c.uuid, table.c.key, table.c.value)
        .where(id_in(table.c.deployable_id, ids))
        .order_by(table.c.id)
    )
    attributes: dict[int, tuple[Attribute, ...]] = {}
    for deployable, uuid, key, value in connection.execute(query):
        attributes[deployable] = (*attributes.get(deployable, ()), Attribute(uuid, key, value))
    return attributes
