# SPDX-License-Identifier: Apache-2.0
"""Read hosts, each an agent with the number of its devices and the use of its handles."""

from datetime import datetime
from typing import TypedDict, cast

import sqlalchemy as sa

from cyborg.core.hosts import AGENT, Liveness
from cyborg.db import paging
from cyborg.db.handles import usage as handles
from cyborg.db.handles.usage import ClassUseRow
from cyborg.db.paging import Page
from cyborg.db.schema import devices
from cyborg.db.schema import services as table


class HostRow(TypedDict):
    """A host; ``uuid`` is that of its agent, which is the marker of the next page."""

    uuid: str
    hostname: str
    status: str
    last_seen_at: datetime
    late_at: datetime
    down_at: datetime
    down_since: datetime | None
    devices: int
    resource_classes: list[ClassUseRow]


_HOST_COLUMNS = ("uuid", "status", "last_seen_at", "late_at", "down_at", "down_since")
HOST_SORTABLE = {"hostname": table.c.host, "last_seen_at": table.c.last_seen_at}


def find_hosts(
    connection: sa.Connection,
    *,
    now: datetime,
    page: Page | None = None,
    hostname: str | None = None,
    state: str | None = None,
) -> list[HostRow]:
    """Return hosts; execute four statements, or five with a marker.

    ``state`` selects hosts by the liveness of their agents at ``now``.
    """
    query = sa.select(*(table.c[name] for name in _HOST_COLUMNS), table.c.host.label("hostname"))
    query = query.where(table.c.binary == AGENT)
    if hostname is not None:
        query = query.where(table.c.host == hostname)
    if state is not None:
        query = query.where(_liveness(now)[Liveness(state)])
    query = paging.paginate(connection, query, table, page, HOST_SORTABLE)
    found = [dict(row) for row in connection.execute(query).mappings()]
    names = [row["hostname"] for row in found]
    host = devices.c.host
    counted = sa.select(host, sa.func.count()).where(host.in_(names)).group_by(host)
    numbers: dict[str, int] = {row[0]: row[1] for row in connection.execute(counted)}
    classes = handles.of_hosts(connection, names)
    for row in found:
        row["devices"] = numbers.get(row["hostname"], 0)
        row["resource_classes"] = classes.get(row["hostname"], [])
    return cast(list[HostRow], found)


def _liveness(now: datetime) -> dict[Liveness, sa.ColumnElement[bool]]:
    is_down, is_late = table.c.down_at <= now, table.c.late_at <= now
    return {
        Liveness.DOWN: is_down,
        Liveness.LATE: sa.and_(is_late, sa.not_(is_down)),
        Liveness.UP: sa.not_(sa.or_(is_late, is_down)),
    }
