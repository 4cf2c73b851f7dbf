# SPDX-License-Identifier: Apache-2.0
"""Record notifications of devices that are removed while instances use them."""

from collections.abc import Sequence

import sqlalchemy as sa

from cyborg.conductor.inventory.sync import DEVICE, HANDLE, HostState
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.inventory.plan import Drain, Step
from cyborg.core.log import Remark
from cyborg.core.wire.notification import Event
from cyborg.db.write import attach_handles, outbox

MAX_NAMED = 8  # ARQs listed in one log line


def record_removed_devices(
    tx: sa.Connection, state: HostState, steps: Sequence[Step], notifications: NotificationBuilder
) -> list[Remark]:
    """Write notifications of objects that begin to drain; return remarks, one for each device.

    A device has a notification if all of it is removed, an ARQ if its handle is removed. Handles
    without an owner are only being cleaned and have none. Executes at most two statements, and none
    without a drain.
    """
    drained = {step.key for step in steps if isinstance(step, Drain)}
    if not drained:
        return []
    removed = {key[1] for key in drained if key[0] == DEVICE}
    # A device may be removed after its handles: its ARQs were notified then.
    handles = {key for key in state.bound if key[1] in removed}
    handles |= {key for key in drained if key[0] == HANDLE}
    keys = {state.ids[key]: key for key in handles}
    owners = attach_handles.owners(tx, keys)
    affected = [row for row in owners if keys[row["handle"]] in drained]
    lost = sorted(removed & {keys[row["handle"]][1] for row in owners})
    rows = [state.rows[DEVICE, address] for address in lost]
    messages = notifications.build_messages(
        Event.DEVICE_LOST, [{**row, "hostname": row["host"]} for row in rows]
    )
    for row in affected:
        device = keys[row["handle"]][1]
        error = f"device {device} of host {row['hostname']}: the part that the ARQ uses was removed"
        messages += notifications.build_messages(Event.REQUEST_LOST, [row], error=error)
    outbox.add_all(tx, messages)
    return [
        _describe(
            state.rows[DEVICE, address],
            address in lost,
            [row for row in affected if keys[row["handle"]][1] == address],
        )
        for address in sorted({keys[row["handle"]][1] for row in affected} | set(lost))
    ]


def _describe(device: sa.RowMapping, is_lost: bool, affected: Sequence[sa.RowMapping]) -> Remark:
    named = [f"{row['uuid']} (instance {row['instance_uuid']})" for row in affected[:MAX_NAMED]]
    if len(affected) > MAX_NAMED:
        named.append(f"{len(affected) - MAX_NAMED} more")
    subject = f"device {device['address']}" if is_lost else f"a part of device {device['address']}"
    arqs = f" by ARQs {', '.join(named)}" if named else ""
    return Remark(
        f"{subject} was removed while in use{arqs}; it is draining until it is released",
        {"device": [device["uuid"], device["address"]], **owner_fields(affected)},
    )


def owner_fields(owners: Sequence[sa.RowMapping]) -> dict[str, list[str]]:
    """Return the log fields of the ARQs that own handles."""
    return {
        "arq": [row["uuid"] for row in owners],
        "instance": sorted({row["instance_uuid"] for row in owners if row["instance_uuid"]}),
    }
