# SPDX-License-Identifier: Apache-2.0
"""Devices that vanish from under an instance: listeners and the log are told whom it hits."""

from collections.abc import Sequence

import sqlalchemy as sa

from cyborg.conductor.host_rows import DEVICE, HANDLE, Known
from cyborg.conductor.notices import Notices
from cyborg.core.inventory import Drain, Step
from cyborg.core.notification import Event
from cyborg.db.store import attach_handles, outbox

MAX_NAMED = 8  # requests that one line of the log names


def tell(tx: sa.Connection, known: Known, steps: Sequence[Step], notices: Notices) -> list[str]:
    """Write the notifications of what begins to drain; return what to log of it.

    A device is told of when it goes as a whole, a request when the handle goes that it owns. What
    nobody owns is only being cleaned, and is nobody's loss. Two statements at most, and none while
    nothing drains.
    """
    drained = {step.key for step in steps if isinstance(step, Drain)}
    if not drained:
        return []
    whole = {key[1] for key in drained if key[0] == DEVICE}
    # A device may go after the handles that hold it: then its requests have been told before.
    held = {key for key in known.bound if key[1] in whole} | {k for k in drained if k[0] == HANDLE}
    keys = {known.ids[key]: key for key in held}
    owners = attach_handles.owners(tx, keys)
    hit = [row for row in owners if keys[row["handle"]] in drained]
    lost = sorted(whole & {keys[row["handle"]][1] for row in owners})
    rows = [known.rows[DEVICE, address] for address in lost]
    messages = notices.rows(Event.DEVICE_LOST, [{**row, "hostname": row["host"]} for row in rows])
    for row in hit:
        device = keys[row["handle"]][1]
        error = f"device {device} of host {row['hostname']}: what the request holds of it is gone"
        messages += notices.rows(Event.REQUEST_LOST, [row], error=error)
    outbox.add_all(tx, messages)
    return [
        _remark(address, address in lost, [row for row in hit if keys[row["handle"]][1] == address])
        for address in sorted({keys[row["handle"]][1] for row in hit} | set(lost))
    ]


def _remark(address: str, whole: bool, hit: Sequence[sa.RowMapping]) -> str:
    named = [f"{row['uuid']} (instance {row['instance_uuid']})" for row in hit[:MAX_NAMED]]
    if len(hit) > MAX_NAMED:
        named.append(f"{len(hit) - MAX_NAMED} more")
    what = f"device {address}" if whole else f"a part of device {address}"
    of = f" by {', '.join(named)}" if named else ""
    return f"{what} is gone while it is held{of}: it stays, closed, until it is released"
