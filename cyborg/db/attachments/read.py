# SPDX-License-Identifier: Apache-2.0
"""Read attachments, each with the uuids of its ARQs.

Successors (``core.attachments.successor``) are not among them.
"""

from collections import defaultdict
from collections.abc import Collection
from datetime import datetime
from typing import TypedDict, cast

import sqlalchemy as sa

from cyborg.db import paging
from cyborg.db.paging import Page
from cyborg.db.schema import arqs
from cyborg.db.schema import attachments as table


class AttachmentRow(TypedDict):
    """An attachment; ``arqs`` are the uuids of its ARQs in the order of their slots."""

    uuid: str
    project_id: str
    instance_uuid: str | None
    hostname: str
    device_profile_name: str
    device_context: str | None
    accelerator: str | None
    mode: str
    reboot: bool
    state: str
    step: str | None
    error: str | None
    created_at: datetime
    updated_at: datetime | None
    arqs: list[str]


_SHOWN = tuple(name for name in AttachmentRow.__annotations__ if name != "arqs")
COLUMNS = [table.c[name] for name in _SHOWN]
SORTABLE = {
    name: table.c[name]
    for name in ("uuid", "instance_uuid", "hostname", "state", "created_at", "updated_at")
}


def find(
    connection: sa.Connection,
    *,
    page: Page | None = None,
    uuids: Collection[str] | None = None,
    instance_uuid: str | None = None,
    hostname: str | None = None,
    state: str | None = None,
    project_id: str | None = None,
) -> list[AttachmentRow]:
    """Return attachments; execute two statements, or three with a marker.

    ``hostname`` selects the attachments to this host itself. In an attachment to an instance, the
    column ``hostname`` has the name of the compute node, which may differ from that of the host.
    """
    query = sa.select(table.c.id, *COLUMNS).where(table.c.maintained_device.is_(None))
    if uuids is not None:
        query = query.where(table.c.uuid.in_(uuids))
    for name, value in (
        ("instance_uuid", instance_uuid),
        ("state", state),
        ("project_id", project_id),
    ):
        if value is not None:
            query = query.where(table.c[name] == value)
    if hostname is not None:
        query = query.where(table.c.hostname == hostname, table.c.instance_uuid.is_(None))
    query = paging.paginate(connection, query, table, page, SORTABLE)
    rows = [dict(row) for row in connection.execute(query).mappings()]
    owned = _arqs(connection, [row["id"] for row in rows]) if rows else {}
    found = []
    for row in rows:
        uuids_ = owned.get(row.pop("id"), [])
        found.append(cast(AttachmentRow, {**row, "reboot": bool(row["reboot"]), "arqs": uuids_}))
    return found


def count(connection: sa.Connection, project_id: str) -> int:
    """Return the number of attachments of a project."""
    own = (table.c.project_id == project_id, table.c.maintained_device.is_(None))
    query = sa.select(sa.func.count()).where(*own)
    return int(connection.scalar(query) or 0)


def get(
    connection: sa.Connection, uuid: str, project_id: str | None = None
) -> AttachmentRow | None:
    """Return one attachment, or None; with a project, only if it belongs to this project."""
    return next(iter(find(connection, uuids=[uuid], project_id=project_id)), None)


def _arqs(connection: sa.Connection, ids: Collection[int]) -> dict[int, list[str]]:
    query = (
        sa.select(arqs.c.attachment_id, arqs.c.uuid)
        .where(arqs.c.attachment_id.in_(ids))
        .order_by(arqs.c.id)
    )
    by_attachment = defaultdict[int, list[str]](list)
    for attachment, uuid in connection.execute(query):
        by_attachment[attachment].append(uuid)
    return by_attachment
