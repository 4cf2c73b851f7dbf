# SPDX-License-Identifier: Apache-2.0
"""Change of the layout of a device, within the transaction of the caller, and its obstacles.

Locks are taken in one order: the agent of the host, deployables, handles.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from cyborg.core.errors import InUse, Invalid, NotFound, WrongState
from cyborg.core.inventory.device import Ability
from cyborg.core.jobs.job import JobState
from cyborg.core.text import join_limited
from cyborg.db.backends import desired as desired_backends
from cyborg.db.deployables import programming as store
from cyborg.db.providers import write as providers
from cyborg.db.services import write as services

MAX_NAMED = 8  # layouts or ARQs in an error
_FAILED = (JobState.FAILED, JobState.CANCELLED)


def lock_target(
    tx: sa.Connection, uuid: str, host: str, layout: str
) -> Sequence[store.PartitionRow]:
    """Return a device of a host with each of its deployables, which are locked.

    Raise NotFound if the device was removed, WrongState if its driver cannot partition it, and
    Invalid if it does not have the layout.
    """
    # A report must not add a deployable meanwhile: it would not be closed.
    desired_backends.lock_host(tx, host)
    rows = store.lock_device(tx, uuid)
    if not rows:
        raise NotFound(f"device {uuid} was removed", device=uuid)
    row = rows[0]
    if Ability.PARTITIONS not in row["abilities"]:
        raise WrongState(
            f"device {uuid} of backend {row['backend']} on host {row['host']} cannot be "
            "partitioned: its driver does not support this",
            device=uuid,
        )
    names = [known["name"] for known in row["layouts"]]
    if layout not in names:
        raise Invalid(
            f"device {uuid} has no layout {layout!r}: expected one of "
            f"{join_limited(names, MAX_NAMED)}",
            field="layout",
        )
    return rows


def find_job(
    tx: sa.Connection, uuid: str, rows: Sequence[store.PartitionRow]
) -> tuple[int, dict[str, Any]] | None:
    """Return the id and the arguments of a job that changes or drains a device, or None.

    A failed job is not returned, although the next report must still detach it from the device.
    """
    # No deployable has the job of a device that drains or that has no deployable.
    for job in store.open_partitions(tx, rows[0]["host"]):
        if job["subject"] == uuid:
            return job["id"], job["arguments"]
    for row in rows:
        if row["job_id"] is not None and row["job_state"] not in _FAILED:
            return row["job_id"], row["arguments"] or {}
    return None


def find_obstacle(
    tx: sa.Connection, uuid: str, rows: Sequence[store.PartitionRow]
) -> InUse | WrongState | None:
    """Lock the handles of a device; return why its layout cannot be changed now, or None."""
    ids, host = _deployable_ids(rows), rows[0]["host"]
    # The locks block new claims of handles; earlier claims are visible.
    if owners := store.lock_handles(tx, ids):
        return InUse(
            f"device {uuid} is in use by {len(owners)} request(s): "
            f"{join_limited(owners, MAX_NAMED)}; delete them, or drain the device",
            device=uuid,
            requests=list(owners[:MAX_NAMED]),
        )
    if dirty := store.count_dirty(tx, ids):
        return WrongState(
            f"{dirty} handle(s) of device {uuid} are being cleaned: retry when this is done",
            device=uuid,
        )
    if not services.has_agent(tx, host):
        return WrongState(
            f"device {uuid} cannot be partitioned: the agent of host {host} is down", device=uuid
        )
    return None


def close_device(
    tx: sa.Connection, uuid: str, rows: Sequence[store.PartitionRow], job: int
) -> None:
    """Prevent claims of the handles of a device until a job has ended. Raise WrongState."""
    # A device offers nothing in some layouts, such as a network card of the host that has no
    # virtual functions: then it has no deployable that could be closed.
    ids = _deployable_ids(rows)
    if any(row["job_state"] in _FAILED for row in rows):
        store.detach(tx, ids)  # from a failed job that waits for a report
    if not store.start(tx, ids, job):
        raise WrongState(f"device {uuid} was changed concurrently, retry", device=uuid)


def mark_stale(tx: sa.Connection, rows: Sequence[store.PartitionRow], now: datetime) -> int:
    """Mark the providers of a device stale; return their number."""
    stale = [provider for row in rows if (provider := row["rp_uuid"]) is not None]
    providers.mark_stale_existing(tx, stale, now)
    return len(stale)


def _deployable_ids(rows: Sequence[store.PartitionRow]) -> list[int]:
    return [id_ for row in rows if (id_ := row["deployable_id"]) is not None]
