# SPDX-License-Identifier: Apache-2.0
"""Devices that fall sick or are well again: listeners, owners and the log are told."""

from collections.abc import Sequence

import sqlalchemy as sa

from cyborg.conductor.host_rows import DEVICE, HANDLE, Known
from cyborg.conductor.notices import Notices
from cyborg.core.device import Device, Health
from cyborg.core.inventory import Add, Change, Step
from cyborg.core.notification import Event
from cyborg.db.store import attach_handles, devices, outbox

MAX_NAMED = 8  # requests that one line of the log names


def tell(
    tx: sa.Connection, host: str, known: Known, steps: Sequence[Step], notices: Notices
) -> list[str]:
    """Write the notifications of devices whose health turned; return what to log of them.

    The steps have been written. Only what opens or closes a device is told: unknown counts as well.
    Three statements at most, and none while no health turns.
    """
    turned = _turned(known, steps)
    if not turned:
        return []
    handles = {
        known.ids[key]: key[1] for key in known.bound if key[0] == HANDLE and key[1] in turned
    }
    owners = attach_handles.owners(tx, handles) if handles else []
    if notices.enabled:
        rows = devices.some(tx, host, turned)
        messages = []
        for sick, ours, theirs in (
            (True, Event.DEVICE_UNHEALTHY, Event.REQUEST_UNHEALTHY),
            (False, Event.DEVICE_HEALTHY, Event.REQUEST_HEALTHY),
        ):
            these = {address for address, device in turned.items() if _is_sick(device) is sick}
            messages += notices.rows(
                ours,
                [{**row, "hostname": host} for row in rows if row["address"] in these],
            )
            for row in owners:
                if (address := handles[row["handle"]]) in these:
                    error = _sentence(turned[address]) if sick else None
                    messages += notices.rows(theirs, [row], error=error)
        outbox.add_all(tx, messages)
    return [
        _sentence(device) + _holders([o for o in owners if handles[o["handle"]] == address])
        for address, device in sorted(turned.items())
    ]


def _turned(known: Known, steps: Sequence[Step]) -> dict[str, Device]:
    """Return the devices that are sick now and were not, or the reverse, by address."""
    turned: dict[str, Device] = {}
    for step in steps:
        if not isinstance(step, Add | Change) or not isinstance(step.value, Device):
            continue
        stored = known.stored.get((DEVICE, step.value.address))
        was_sick = (
            stored is not None and isinstance(stored.value, Device) and _is_sick(stored.value)
        )
        if was_sick != _is_sick(step.value):
            turned[step.value.address] = step.value
    return turned


def _is_sick(device: Device) -> bool:
    return device.health is Health.UNHEALTHY


def _sentence(device: Device) -> str:
    if not _is_sick(device):
        return f"device {device.address} is well again"
    return f"device {device.address} is unhealthy: {device.health_reason or 'no reason is told'}"


def _holders(owners: Sequence[sa.RowMapping]) -> str:
    if not owners:
        return ""
    named = [f"{row['uuid']} (instance {row['instance_uuid']})" for row in owners[:MAX_NAMED]]
    if len(owners) > MAX_NAMED:
        named.append(f"{len(owners) - MAX_NAMED} more")
    return f"; held by {', '.join(named)}"
