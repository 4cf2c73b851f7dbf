# SPDX-License-Identifier: Apache-2.0
"""Read the self-heal counters."""

from datetime import datetime
from typing import TypedDict

import sqlalchemy as sa

from cyborg.db.rows import fetch_all
from cyborg.db.schema import self_heal_counters


class SelfHealRow(TypedDict):
    """The count of one kind of corrective action."""

    kind: str
    count: int
    last_at: datetime


def find_self_heal(connection: sa.Connection) -> list[SelfHealRow]:
    """Return all self-heal counters, ordered by kind."""
    c = self_heal_counters.c
    query = sa.select(c.kind, c.count, c.last_at).order_by(c.kind)
    return fetch_all(SelfHealRow, connection.execute(query))
