# SPDX-License-Identifier: Apache-2.0
"""Reading what the conductors have put right.

Rows: kind, count, last_at; one for each kind of deed that was ever done.
"""

import sqlalchemy as sa

from cyborg.db.read.paging import Row
from cyborg.db.schema import deeds as table


def find(connection: sa.Connection) -> list[Row]:
    """Return every kind of deed that was ever done, in the order of their names."""
    query = sa.select(table.c.kind, table.c.count, table.c.last_at).order_by(table.c.kind)
    return [dict(row) for row in connection.execute(query).mappings()]
