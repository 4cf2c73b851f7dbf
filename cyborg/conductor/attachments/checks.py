# SPDX-License-Identifier: Apache-2.0
"""Check a request for an attachment: server, host, limit of the project, earlier requests."""

from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, TypeVar, cast

import sqlalchemy as sa

from cyborg.clients.placement import Placement
from cyborg.conductor.binding.limits import lock_project
from cyborg.core.attachments.attachment import describe_target
from cyborg.core.attachments.server import Server
from cyborg.core.errors import Conflict, CyborgError, NotFound, OverLimit, TimedOut, Unavailable
from cyborg.core.log import get_logger
from cyborg.db.attachments import handles
from cyborg.db.attachments import write as store

LOG = get_logger(__name__)

TIMEOUT = 5.0
"""Seconds for a request to Placement: the caller waits, and the check can be omitted."""

T = TypeVar("T")


def ask_first(ask: Callable[[str], T], uuid: str) -> T:
    """Return the answer of Nova about a server. Raise Unavailable, but not TimedOut, and others."""
    try:
        return ask(uuid)
    except TimedOut as exc:
        # TimedOut would leave open whether the request of the caller has taken effect.
        raise Unavailable(f"{exc.message}; nothing was changed, retry later") from exc


def is_on_other_host(placement: Placement, provider: str, server: Server) -> bool:
    """Return whether a resource provider is below another compute node than a server.

    Return False if Placement does not answer, or does not have both providers yet. The step
    ``allocate`` checks this again in any case, since the server may move.
    """
    assert server.node is not None
    placement = placement.with_timeout(TIMEOUT)
    try:
        node, found = placement.find(server.node), placement.get(provider)
    except CyborgError as exc:
        LOG.info("Cannot compare hosts now, step allocate will compare them: %s", exc.message)
        return False
    if node is None or found is None or found.root_uuid is None:
        return False
    return found.root_uuid != (node.root_uuid or node.uuid)


def check_live(tx: sa.Connection, hosts: Collection[str]) -> None:
    """Raise Conflict if an agent of these hosts does not attach devices to running guests.

    A host without an agent is left out.
    """
    for host, enabled in sorted(handles.live_hosts(tx, hosts).items()):
        if not enabled:
            raise Conflict(
                f"mode: live attach is not enabled on host {host}: its agent needs [libvirt] "
                "live_attach = true; or use the mode next-boot",
                field="mode",
                host=host,
            )


def check_limit(tx: sa.Connection, project: str, limit: int) -> None:
    """Lock a project and raise OverLimit if it cannot have another attachment.

    A negative limit means no limit. Raise ProjectRowMissing.
    """
    if limit < 0:
        return
    # An attachment needs requests to Nova and Placement: one more statement does not matter.
    lock_project(tx, project)
    if store.count(tx, project, limit) >= limit:
        used = store.count(tx, project)
        raise OverLimit(
            f"project {project} has {used} attachments and the limit is {limit}; detach "
            "accelerators, or delete attachments in error",
            project_id=project,
            limit=limit,
            used=used,
        )


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
