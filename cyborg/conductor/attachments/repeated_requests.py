# SPDX-License-Identifier: Apache-2.0
"""Repeated requests for an attachment: they get the attachment of the first request."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

import sqlalchemy as sa

from cyborg.core.attachments.attachment import describe_target
from cyborg.core.errors import Conflict, NotFound
from cyborg.db.attachments import write as store


def check_same(
    row: store.AttachmentRow, wanted: Mapping[str, Any], scope: str | None, *, given: bool
) -> None:
    """Raise Conflict if an attachment is not that of a repeated request.

    ``wanted`` has the columns that the request determines; ``given`` is whether it has its uuid.
    Raise NotFound if the caller does not see the attachment.
    """
    if scope is not None and row["project_id"] != scope:
        raise NotFound(f"instance_uuid: no server {wanted['instance_uuid']}")
    found = cast(Mapping[str, Any], row)
    names = [name for name, value in wanted.items() if found[name] != value]
    if not names:
        return
    target = describe_target(row["instance_uuid"], row["hostname"])
    if given:
        raise Conflict(
            f"uuid: attachment {row['uuid']} exists and differs in {', '.join(names)}",
            field="uuid",
        )
    # Found by the server and what is attached.
    raise Conflict(
        f"{names[0]}: {target} already has attachment {row['uuid']} of the same "
        f"selection, with {names[0]} {found[names[0]]}; detach it, or request "
        "another attachment with a uuid of its own",
        field=names[0],
    )


def schedule_reboot(
    tx: sa.Connection, row: store.AttachmentRow, now: datetime, deadline: datetime
) -> store.AttachmentRow:
    """Let the work on an attachment ask for a reboot; return its row.

    If the attachment has changed concurrently so that it cannot get one, nothing is changed.
    Raise NotFound if it was deleted.
    """
    store.schedule_reboot(tx, row["id"], now, deadline)
    found = store.find_request(tx, row["uuid"], None)
    if found is None:
        raise NotFound(f"no attachment {row['uuid']}", field="uuid")
    return found
