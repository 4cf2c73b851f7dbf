# SPDX-License-Identifier: Apache-2.0
"""Change the state of rows: one UPDATE whose condition is the table of ``cyborg.core.life_cycle``.

The count of changed rows decides. A SELECT before the UPDATE would not do: another transaction can
change the state in between, also if this one holds no lock on the row.
"""

from typing import Any

import sqlalchemy as sa

from cyborg.core.life_cycle import Transition


def change_state(
    tx: sa.Connection,
    table: sa.Table,
    transition: Transition[Any, Any],
    *conditions: sa.ColumnElement[bool],
    **values: Any,
) -> int:
    """Apply a transition to the rows that meet the conditions; return how many were changed.

    ``values`` are the columns that change with the state.
    """
    guard = table.c.state.in_(transition.sources)
    change = sa.update(table).where(guard, *conditions).values(state=transition.target, **values)
    return tx.execute(change).rowcount
