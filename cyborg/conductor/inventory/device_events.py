# SPDX-License-Identifier: Apache-2.0
"""Record notifications of devices that become unhealthy or healthy."""

from collections.abc import Sequence

import sqlalchemy as sa

from cyborg.conductor.inventory.device_removals import owner_fields
from cyborg.conductor.inventory.sync import DEVICE, HANDLE, HostState
from cyborg.conductor.notifications.notifications import NotificationBuilder
from cyborg.core.inventory.device import Device, Health
from cyborg.core.inventory.plan import Add, Change, Step
from cyborg.core.log import Remark
from cyborg.core.wire.notification import Event
from cyborg.db.write import attach_handles, devices, outbox

MAX_NAMED = 8  # ARQs listed in one log line


def record_health_changes(
    tx: sa.Connection,
    host: str,
    state: HostState,
    steps: Sequence[Step],
    notifications: NotificationBuilder,
) -> list[Remark]:
    """Write notifications of devices whose health changed; return remarks, one for each device.

    Call this after the steps are written. Only changes from or to UNHEALTHY count; UNKNOWN counts
    as healthy. Executes at most three statements, and none without a change.
    """
    changed = _changed_health(state, steps)
    if not changed:
        return []
    handles = {
        state.ids[key]: key[1] for key in state.bound if key[0] == HANDLE and key[1] in changed
    }
    owners = attach_handles.owners(tx, handles) if handles else []
    if notifications.enabled:
        rows = devices.by_addresses(tx, host, changed)
        messages = []
        for unhealthy, device_event, arq_event in (
            (True, Event.DEVICE_UNHEALTHY, Event.REQUEST_UNHEALTHY),
            (False, Event.DEVICE_HEALTHY, Event.REQUEST_HEALTHY),
        ):
            addresses = {
                address for address, device in changed.items() if _is_unhealthy(device) is unhealthy
            }
            messages += notifications.build_messages(
                device_event,
                [{**row, "hostname": host} for row in rows if row["address"] in addresses],
            )
            for row in owners:
                if (address := handles[row["handle"]]) in addresses:
                    error = _describe(changed[address]) if unhealthy else None
                    messages += notifications.build_messages(arq_event, [row], error=error)
        outbox.add_all(tx, messages)
    return [
        _make_remark(device, [o for o in owners if handles[o["handle"]] == address])
        for address, device in sorted(changed.items())
    ]


def _changed_health(state: HostState, steps: Sequence[Step]) -> dict[str, Device]:
    """Return the devices that became unhealthy or healthy, by address."""
    changed: dict[str, Device] = {}
    for step in steps:
        if not isinstance(step, Add | Change) or not isinstance(step.value, Device):
            continue
        stored = state.stored.get((DEVICE, step.value.address))
        was_unhealthy = (
            stored is not None and isinstance(stored.value, Device) and _is_unhealthy(stored.value)
        )
        if was_unhealthy != _is_unhealthy(step.value):
            changed[step.value.address] = step.value
    return changed


def _is_unhealthy(device: Device) -> bool:
    return device.health is Health.UNHEALTHY


def _describe(device: Device) -> str:
    if not _is_unhealthy(device):
        return f"device {device.address} is healthy again"
    return f"device {device.address} is unhealthy: {device.health_reason or 'no reason reported'}"


def _make_remark(device: Device, owners: Sequence[sa.RowMapping]) -> Remark:
    return Remark(
        _describe(device) + _describe_owners(owners),
        {"device": device.address, **owner_fields(owners)},
    )


def _describe_owners(owners: Sequence[sa.RowMapping]) -> str:
    if not owners:
        return ""
    named = [f"{row['uuid']} (instance {row['instance_uuid']})" for row in owners[:MAX_NAMED]]
    if len(owners) > MAX_NAMED:
        named.append(f"{len(owners) - MAX_NAMED} more")
    return f"; used by ARQs {', '.join(named)}"
