# SPDX-License-Identifier: Apache-2.0
"""Read attachments, each with the uuids of its ARQs.

Successors (``core.attachments.successor``) are not among them.
"""

from collections import defaultdict
from datetime import datetime
from typing import Any, TypedDict, cast

import sqlalchemy as sa

from cyborg.db.listing import Listing, columns_of
from cyborg.db.paging import id_in
from cyborg.db.schema import arqs
from cyborg.db.schema import attachments as table


class AttachmentColumns(TypedDict):
    """The columns of an attachment that a list shows, except its times."""

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


class AttachmentRow(AttachmentColumns):
    """An attachment; ``arqs`` are the uuids of its ARQs in the order of their slots."""

    created_at: datetime
    updated_at: datetime | None
    arqs: list[str]


SORTABLE = columns_of(
    table, "uuid", "instance_uuid", "hostname", "state", "created_at", "updated_at"
)


def _of_host(hostname: str) -> sa.ColumnElement[bool]:
    """Return the condition that an attachment is to the host itself.

    In an attachment to an instance, the column has the name of the compute node, which may differ
    from that of the host.
    """
    return sa.and_(table.c.hostname == hostname, table.c.instance_uuid.is_(None))


def _complete(connection: sa.Connection, rows: list[dict[str, Any]]) -> list[AttachmentRow]:
    # One statement for the page, not one for each attachment.
    owned = defaultdict[int, list[str]](list)
    columns = (arqs.c.id, arqs.c.attachment_id, arqs.c.uuid)
    query = sa.select(*columns).where(id_in(arqs.c.attachment_id, [row["id"] for row in rows]))
    # Sorted here: for ORDER BY, MariaDB would read all ARQs of the cloud in the order of their ids.
    for arq in sorted(connection.execute(query), key=lambda arq: arq.id):
        owned[arq.attachment_id].append(arq.uuid)
    for row in rows:
        row["arqs"] = owned[row.pop("id")]
    return cast(list[AttachmentRow], rows)


ATTACHMENTS = Listing(
    row=AttachmentRow,
    table=table,
    columns=[table.c[name] for name in ("id", *AttachmentRow.__annotations__) if name in table.c],
    conditions=[table.c.maintained_device.is_(None)],
    sortable=SORTABLE,
    filters={
        **columns_of(table, "instance_uuid", "state", "project_id"),
        "hostname": _of_host,
    },
    complete=_complete,
)
find = ATTACHMENTS.find


def get(
    connection: sa.Connection, uuid: str, project_id: str | None = None
) -> AttachmentRow | None:
    """Return one attachment, or None; with a project, only if it belongs to this project."""
    return next(iter(find(connection, uuids=[uuid], project_id=project_id)), None)


def count(connection: sa.Connection, project_id: str) -> int:
    """Return the number of attachments of a project."""
    own = (table.c.project_id == project_id, table.c.maintained_device.is_(None))
    return connection.scalar(sa.select(sa.func.count()).where(*own)) or 0
